"""The equations: step time, step energy and their coefficients. What is fitted is what is simulated."""
