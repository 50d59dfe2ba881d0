"""What `import jaxserve` gives: functions where functions are promised, and names that completion can find."""

import importlib
import inspect
from importlib import resources

import pytest

import jaxserve


@pytest.mark.parametrize(("name", "home"), [("run", "jaxserve.running"), ("sweep", "jaxserve.sweep")])
def test_functions_stay_functions_once_their_modules_are_loaded(name: str, home: str) -> None:
    module = importlib.import_module(home)
    assert inspect.isfunction(getattr(jaxserve, name))
    assert getattr(jaxserve, name) is getattr(module, name)


def test_every_public_name_is_listed_and_there() -> None:
    assert set(jaxserve.__all__) <= set(dir(jaxserve))
    assert all(getattr(jaxserve, name) is not None for name in jaxserve.__all__)


def test_both_packages_say_that_they_are_typed() -> None:
    assert all((resources.files(name) / "py.typed").is_file() for name in ("jaxserve", "calibration_fit"))
