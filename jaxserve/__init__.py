"""A vectorised model, in JAX, of LLM serving over many data centres: carbon against TTFT and TPOT.

import jaxserve
results = jaxserve.run("two-region")
results.frame                       # a row a policy, savings against the first
results["greedy-0.5"].requests      # a row a request
results["greedy-0.5"].ledger        # energy and carbon by interval and DC, with units
"""

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

# XLA's loader of cached CPU code takes LLVM tuning hints (+prefer-no-gather) for missing CPU features and says so at length on every load.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax

if TYPE_CHECKING:
    from jaxserve.errors import InputError as InputError
    from jaxserve.running import Results as Results
    from jaxserve.running import Run as Run
    from jaxserve.running import run as run
    from jaxserve.scenario.load import load_scenario as load_scenario
    from jaxserve.scenario.spec import Scenario as Scenario
    from jaxserve.sweep import sweep as sweep

__version__ = "0.1.0"

# 24 h at microsecond resolution does not fit float32.
jax.config.update("jax_enable_x64", True)
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # What one process has compiled, the next one loads.
    _cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "jaxserve" / "xla"
    jax.config.update("jax_compilation_cache_dir", str(_cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

_HOMES = {
    "run": "jaxserve.running",
    "Results": "jaxserve.running",
    "Run": "jaxserve.running",
    "sweep": "jaxserve.sweep",
    "load_scenario": "jaxserve.scenario.load",
    "Scenario": "jaxserve.scenario.spec",
    "InputError": "jaxserve.errors",
}
__all__ = ["InputError", "Results", "Run", "Scenario", "__version__", "load_scenario", "run", "sweep"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: `import jaxserve.perf` must not bring plots and tables along.
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """`jaxserve.sweep` is the function, although importing the module of that name would put the module in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
