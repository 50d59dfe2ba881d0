"""How many compiled programs a process may hold.

On a CPU, XLA maps three pieces of memory for every kernel, so that a program of a policy that optimises takes some 1500 of the 65530 maps
that Linux allows a process by default (vm.max_map_count); when they are used up, XLA crashes with a segmentation fault. JAX itself keeps
every program for good: fifty runs of different shapes would be the last.
"""

from pathlib import Path

import jax

IN_USE = Path("/proc/self/maps")
LIMIT = Path("/proc/sys/vm/max_map_count")
SHARE = 0.5
"""Of the limit; the other half is for the programs of one run, and for whatever else the process does."""


def forget_programs_if_many() -> bool:
    """Drop all compiled programs if their memory maps near the limit; whether that was so. What is needed again is loaded from the disk."""
    try:
        limit = int(LIMIT.read_text())
        with IN_USE.open("rb") as maps:
            used = sum(1 for _ in maps)
    except (OSError, ValueError):
        return False  # not Linux, or not told
    if used < SHARE * limit:
        return False
    jax.clear_caches()
    return True
