"""What schedulers believe of a request's output length (OSL): a predictor that is trained from a trace, and a calibrated noise."""
