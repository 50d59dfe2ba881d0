"""Compiled programs are dropped before they use up the memory maps of the process."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxserve
from jaxserve.engine import programs
from jaxserve.engine.programs import forget_programs_if_many

linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux limits and tells memory maps")


def maps() -> int:
    with programs.IN_USE.open("rb") as lines:
        return sum(1 for _ in lines)


@pytest.mark.parametrize(("used", "many"), [(49, False), (50, True), (99, True)])
def test_half_of_the_limit_is_many(used: int, many: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "maps").write_text("a map\n" * used)
    (tmp_path / "limit").write_text("100\n")
    monkeypatch.setattr(programs, "IN_USE", tmp_path / "maps")
    monkeypatch.setattr(programs, "LIMIT", tmp_path / "limit")
    dropped: list[bool] = []
    monkeypatch.setattr(jax, "clear_caches", lambda: dropped.append(True))
    assert forget_programs_if_many() is many and bool(dropped) is many


def test_where_nothing_is_told_nothing_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(programs, "IN_USE", tmp_path / "none")
    assert not forget_programs_if_many()


@pytest.mark.slow  # compiles everything twice
@linux
def test_dropping_gives_the_maps_back_and_changes_no_result(monkeypatch: pytest.MonkeyPatch):
    overrides = ["horizon_s=1.0", 'policies=[{kind="round_robin"}]']
    first = jaxserve.run("two-region", overrides=overrides)
    held = [jax.jit(lambda x, i=i: jnp.sort(x * i).sum() + i)(jnp.arange(7.0)) for i in range(20)]
    before = maps()
    monkeypatch.setattr(programs, "SHARE", 0.0)
    assert forget_programs_if_many()
    assert maps() < before - 3 * len(held)  # three a kernel at least
    again = jaxserve.run("two-region", overrides=overrides)
    assert (first["round_robin"].requests["finish_s"] == again["round_robin"].requests["finish_s"]).all()
