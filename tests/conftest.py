"""What every test shares."""

from collections.abc import Iterator

import pytest

# Before jax, which it tells to be quiet.
import jaxserve  # noqa: F401 # isort: skip
import jax


@pytest.fixture(scope="module", autouse=True)
def _compiled_programs_are_dropped() -> Iterator[None]:
    """Every compiled program holds some memory maps; a few thousand of them in one process pass Linux's limit (vm.max_map_count) and XLA
    then crashes."""
    yield
    jax.clear_caches()
