"""`python -m calibration_fit`."""

from calibration_fit.cli import main

main()
