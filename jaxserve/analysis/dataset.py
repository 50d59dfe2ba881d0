"""Results as xarray Datasets whose variables carry `units` and `long_name`."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from jaxserve.analysis.fields import LEDGER, METRICS, RUN_METRICS, Field
from jaxserve.errors import InputError


def ledger_dataset(ledger: pd.DataFrame) -> xr.Dataset:
    """The ledger as arrays over (interval, dc), DCs in the order in which they first appear.

    Coordinate `interval` is the interval's start, `interval_s` its length (both s). Every DC needs every interval, once.
    """
    starts, interval = np.unique(ledger["interval_start_s"].to_numpy(dtype=np.float64), return_inverse=True)
    # As text: an unused category would otherwise become a DC without rows.
    dc, names = pd.factorize(ledger["dc"].astype(str))
    shape = (len(starts), len(names))
    filled = np.zeros(shape, dtype=np.int64)
    np.add.at(filled, (interval, dc), 1)
    if (filled != 1).any():
        i, d = np.argwhere(filled != 1)[0]
        raise InputError(
            f"ledger: DC {names[d]!r} has {filled[i, d]} rows for the interval that starts at {starts[i]:g} s;"
            " every DC has each interval once."
        )
    lengths_s = np.zeros(shape)
    lengths_s[interval, dc] = ledger["interval_s"].to_numpy(dtype=np.float64)
    variables = {}
    for name, field in LEDGER.items():
        values = np.empty(shape)
        values[interval, dc] = ledger[name].to_numpy(dtype=np.float64)
        variables[name] = (("interval", "dc"), values, _attrs(field))
    coordinates = {
        "interval": ("interval", starts, {"units": "s", "long_name": "start of the interval"}),
        "dc": ("dc", np.asarray(names, dtype=object), {"long_name": "data centre"}),
        "interval_s": ("interval", lengths_s.max(axis=1, initial=0.0), {"units": "s", "long_name": "length of the interval"}),
    }
    return xr.Dataset(variables, coordinates)


def summary_dataset(summaries: Mapping[str, Mapping[str, Any]]) -> xr.Dataset:
    """Summaries as one Dataset over `policy`: every metric that any of them holds, NaN where undefined (None)."""
    variables = {}
    for name, field in (METRICS | RUN_METRICS).items():
        column = [summary.get(name) for summary in summaries.values()]
        if any(value is not None for value in column) or name in METRICS:
            # Counts stay integers; None has no place in an integer array.
            whole = bool(column) and all(isinstance(value, int) for value in column)
            values = np.array(column, dtype=np.int64) if whole else np.array([np.nan if v is None else v for v in column], dtype=np.float64)
            variables[name] = ("policy", values, _attrs(field))
    policies = np.asarray(list(summaries), dtype=object)
    return xr.Dataset(variables, {"policy": ("policy", policies, {"long_name": "routing policy"})})


def _attrs(field: Field) -> dict[str, str]:
    return {"units": field.unit, "long_name": field.text}
