"""A vectorised model, in JAX, of LLM serving over many data centres: carbon against TTFT and TPOT."""

import jax

# 24 h at microsecond resolution does not fit float32.
jax.config.update("jax_enable_x64", True)

__version__ = "0.1.0"
