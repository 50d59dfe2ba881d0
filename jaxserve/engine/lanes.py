"""Many scenarios in one call."""

import jax
from jax import Array

LANES = "lanes"
"""Name of the mapped axis when many scenarios run as one call."""


def across_lanes(value: Array) -> Array:
    """The largest `value` of all scenarios that run as one `vmap`ped call.

    A loop bound that differs from lane to lane would make `vmap` select over the whole carried state in every pass; a shared
    bound does not, unless schedulers are mapped beside the lanes; a lane that has nothing left to do is guarded by its own conditions.
    """
    try:
        return jax.lax.pmax(value, LANES)
    except NameError:  # not mapped: a single run
        return value
