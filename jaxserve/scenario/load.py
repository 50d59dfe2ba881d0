"""Reading a scenario: TOML, dotted overrides, and errors that say which field of which file."""

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from jaxserve.errors import InputError, explain
from jaxserve.perf.coefficients import Coefficients, load_coefficients
from jaxserve.scenario.overrides import merge, parse_override, set_path
from jaxserve.scenario.spec import Scenario
from jaxserve.tomlfile import parse_toml, read_toml


def shipped_scenarios() -> list[str]:
    """Names of the scenarios in the package."""
    folder = resources.files("jaxserve.scenario") / "data"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def load_scenario(
    name_or_path: str | Path, overrides: Sequence[str] | None = None, values: Mapping[str, Any] | None = None
) -> tuple[Scenario, Path]:
    """Read a shipped scenario by name or one of your own by path, change it, and inline the coefficients.

    It is changed by `overrides`, `a.b=c` each, then by `values`, dotted path -> value. A file may build on another: `base` names a
    shipped scenario or a file beside it, over which the file's own fields are laid (`jaxserve.scenario.overrides.merge`).
    Returns the scenario and the folder that its relative paths start from. Raises `InputError` naming file and field path.
    """
    name = str(name_or_path)
    base_dir = Path.cwd() if name in shipped_scenarios() else Path(name).resolve().parent
    table = scenario_table(name)
    for override in overrides or []:
        set_path(table, *parse_override(override), f"--set {override}")
    for path, value in (values or {}).items():
        set_path(table, path, value, path)
    return parse_scenario(table, name, base_dir), base_dir


def scenario_table(name: str, above: Sequence[str] = ()) -> dict[str, Any]:
    """The table of a scenario as written, with what it builds on, unchecked; `above` are the files that build on it."""
    shipped = shipped_scenarios()
    if name in shipped:
        table = parse_toml((resources.files("jaxserve.scenario") / "data" / f"{name}.toml").read_text(encoding="utf-8"), name)
    else:
        table = read_toml(Path(name), "scenario", f"shipped scenarios are {', '.join(shipped)}")
    below = table.pop("base", None)
    if below is None:
        return table
    if not isinstance(below, str) or not below:
        raise InputError(f"{name}: base: must be the name of a shipped scenario or the path of a file, in quotes")
    below = below if below in shipped else str(Path(name).parent / below)
    if below in (*above, name):
        raise InputError(f"{name}: base: {below} builds on this file; a scenario cannot be its own base")
    whole = scenario_table(below, [*above, name])
    merge(whole, table, name)
    return whole


def parse_scenario(table: dict[str, Any], where: str, base_dir: Path) -> Scenario:
    """Check a scenario's table and inline its coefficients; raises `InputError` naming `where` and the field path."""
    try:
        scenario = Scenario.model_validate(table)
    except ValidationError as error:
        raise InputError(f"{where}: {explain(error, table, Scenario)}") from None
    coefficients = scenario.engine.coefficients
    if not isinstance(coefficients, Coefficients):
        inline = load_coefficients(coefficients, base_dir)
        scenario = scenario.model_copy(update={"engine": scenario.engine.model_copy(update={"coefficients": inline})})
    return scenario


def to_toml(scenario: Scenario) -> str:
    """The scenario with every default filled in and every coefficient inlined, as TOML that `load_scenario` reads back."""
    return tomli_w.dumps(scenario.model_dump(mode="python", exclude_none=True))
