"""The published study measured with this simulator, beside what was published."""
