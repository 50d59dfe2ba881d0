"""What every test shares."""

from collections.abc import Iterator

import pytest

from jaxserve.engine.programs import forget_programs_if_many


@pytest.fixture(scope="module", autouse=True)
def _compiled_programs_do_not_pile_up() -> Iterator[None]:
    """Some tests compile without running a simulation, which looks after this by itself."""
    yield
    forget_programs_if_many()
