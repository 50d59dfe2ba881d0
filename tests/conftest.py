"""What every test shares."""

import importlib
import os
from collections.abc import Iterator

import pytest

# Before jax starts: one thread of XLA's a process. As many processes as cores run the tests, and small arrays gain nothing from more.
os.environ.setdefault("NPROC", "1")

from jaxserve.engine.programs import forget_programs_if_many


@pytest.fixture(scope="module", autouse=True)
def _compiled_programs_do_not_pile_up() -> Iterator[None]:
    """Some tests compile without running a simulation, which looks after this by itself."""
    yield
    forget_programs_if_many()


@pytest.fixture(scope="module")
def no_figures() -> Iterator[None]:
    """Runs without figures, which take longer than a small run itself, for tests of what is in the tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("jaxserve.running"), "save_figures", lambda *_, **__: None)
        yield
