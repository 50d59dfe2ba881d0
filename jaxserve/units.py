"""Constants and conversions. Names elsewhere carry their unit: `energy_j`, `ci_g_per_kwh`, `rtt_ms`."""

J_PER_KWH = 3.6e6
"""Joules in a kilowatt-hour."""

MS_PER_S = 1e3
US_PER_S = 1e6
S_PER_HOUR = 3600.0
LATEST_EPOCH_S = 1e11
"""As a time in seconds, since 1970 or since a run began, the year 5138: what lies beyond was counted in a finer unit."""
BYTES_PER_GIB = 2**30
