"""Reading a scenario: TOML, dotted overrides, and errors that say which field of which file."""

import copy
import json
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from jaxserve.errors import InputError, explain
from jaxserve.perf.coefficients import Coefficients, load_coefficients
from jaxserve.scenario.spec import Scenario
from jaxserve.tomlfile import parse_toml, read_toml

DEEPEST_PATH = 20
"""Parts of a dotted path: no field lies deeper."""


def shipped_scenarios() -> list[str]:
    """Names of the scenarios in the package."""
    folder = resources.files("jaxserve.scenario") / "data"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def load_scenario(name_or_path: str | Path, overrides: list[str] | None = None) -> tuple[Scenario, Path]:
    """Read a shipped scenario by name or one of your own by path, apply `a.b=c` overrides, and inline the coefficients.

    Returns the scenario and the folder that its relative paths start from. Raises `InputError` naming file and field path.
    """
    name = str(name_or_path)
    shipped = shipped_scenarios()
    if name in shipped:
        table = parse_toml((resources.files("jaxserve.scenario") / "data" / f"{name}.toml").read_text(encoding="utf-8"), name)
        base = Path.cwd()
    else:
        table = read_toml(Path(name), "scenario", f"shipped scenarios are {', '.join(shipped)}")
        base = Path(name).resolve().parent
    for override in overrides or []:
        _override(table, override)
    return parse_scenario(table, name, base), base


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


def _override(table: dict[str, Any], override: str) -> None:
    """Set one dotted path: `engine.max_num_seqs=64`, `sites.0.pue=1.3`, `sites.*.pue=1.2` for every entry of a list."""
    path, equals, text = override.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys) or len(keys) > DEEPEST_PATH:
        raise InputError(f"--set {override}: write a.b=value")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        parsed = {}
    # A bare word is text, and so is what would smuggle in more than one value.
    _set(table, keys, parsed["value"] if set(parsed) == {"value"} else text.strip(), override)


def _set(node: Any, keys: list[str], value: Any, override: str) -> None:
    key, rest = keys[0], keys[1:]
    if isinstance(node, list):
        if key != "*" and not (key.isdecimal() and len(key) < 10 and int(key) < len(node)):
            numbers = f"a number from 0 to {len(node) - 1}, or * for every entry" if node else "a number, but the list is empty"
            raise InputError(f"--set {override}: {key!r} must be {numbers}")
        for i in range(len(node)) if key == "*" else [int(key)]:
            if rest:
                _set(node[i], rest, value, override)
            else:
                node[i] = copy.deepcopy(value)
    elif isinstance(node, dict):
        if rest:
            _set(node.setdefault(key, {}), rest, value, override)
        else:
            node[key] = copy.deepcopy(value)  # entries of a list that are set by * must stay apart
    else:
        raise InputError(f"--set {override}: {json.dumps(node, default=str)} has no field {key!r}")
