"""Which numbers can be points in time in seconds: one rule for every log."""

import numpy as np
from numpy.typing import NDArray

from jaxserve.errors import InputError
from jaxserve.units import LATEST_EPOCH_S


def check_seconds(seconds: NDArray[np.float64], where: str) -> None:
    """Raise `InputError` where one of the times `seconds` [R] cannot be seconds; `where` names file and column."""
    if seconds.max() > LATEST_EPOCH_S:
        raise InputError(
            f"{where}: {seconds.max():.15g} s is far beyond any date, so these are milliseconds or finer; give seconds, not a finer unit."
        )
