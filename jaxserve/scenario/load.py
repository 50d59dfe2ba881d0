"""Reading a scenario: TOML, dotted overrides, and errors that say which field of which file."""

import json
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from jaxserve.errors import InputError
from jaxserve.perf.coefficients import Coefficients, load_coefficients
from jaxserve.scenario.spec import Scenario


def shipped_scenarios() -> list[str]:
    """Names of the scenarios in the package."""
    folder = resources.files("jaxserve.scenario") / "data"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def load_scenario(name_or_path: str | Path, overrides: list[str] | None = None) -> tuple[Scenario, Path]:
    """Read a shipped scenario by name or one of your own by path, apply `a.b=c` overrides, and inline the coefficients.

    Returns the scenario and the folder that its relative paths start from. Raises `InputError` naming file and field path.
    """
    name = str(name_or_path)
    if name in shipped_scenarios():
        text, base, where = (resources.files("jaxserve.scenario") / "data" / f"{name}.toml").read_text(encoding="utf-8"), Path.cwd(), name
    else:
        path = Path(name)
        text, base, where = _read(path), path.resolve().parent, name
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{where}: not valid TOML: {error}") from None
    for override in overrides or []:
        _override(table, override)
    return parse_scenario(table, where, base), base


def parse_scenario(table: dict[str, Any], where: str, base_dir: Path) -> Scenario:
    """Check a scenario's table and inline its coefficients; raises `InputError` naming `where` and the field path."""
    try:
        scenario = Scenario.model_validate(table)
    except ValidationError as error:
        raise InputError(f"{where}: {explain(error)}") from None
    coefficients = scenario.engine.coefficients
    if not isinstance(coefficients, Coefficients):
        inline = load_coefficients(coefficients, base_dir)
        scenario = scenario.model_copy(update={"engine": scenario.engine.model_copy(update={"coefficients": inline})})
    return scenario


def explain(error: ValidationError) -> str:
    """The first fault of a failed validation as `field.path: sentence`, with how many more there are."""
    errors = error.errors()
    first = errors[0]
    # Tags of unions are no part of the path that the user wrote.
    tags = {"poisson", "trace", "constant", "table", "file", "none", "fixed", "affine", "str", "Coefficients", "by_zone", "all_zones"}
    path = ".".join(str(part) for i, part in enumerate(first["loc"]) if not (i > 0 and part in tags and not isinstance(part, int)))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "there is no such field; check the spelling"
    elif first["type"] == "missing":
        message = "this field is missing"
    elif "input" in first and isinstance(first["input"], str | int | float | bool):
        message = f"{message} (got {first['input']!r})"
    more = f" (and {len(errors) - 1} more faults)" if len(errors) > 1 else ""
    return f"{path}: {message}{more}" if path else f"{message}{more}"


def to_toml(scenario: Scenario) -> str:
    """The scenario with every default filled in and every coefficient inlined, as TOML that `load_scenario` reads back."""
    return tomli_w.dumps(scenario.model_dump(mode="python", exclude_none=True))


def _read(path: Path) -> str:
    if not path.exists():
        raise InputError(f"{path}: there is no such scenario file; shipped scenarios are {', '.join(shipped_scenarios())}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except IsADirectoryError:
        raise InputError(f"{path}: this is a folder; give the scenario's .toml file") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text; save the scenario as UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if not text.strip():
        raise InputError(f"{path}: the file is empty; see the shipped scenarios for what belongs in it")
    return text


def _override(table: dict[str, Any], override: str) -> None:
    """Set one dotted path: `engine.max_num_seqs=64`, `sites.0.pue=1.3`, `sites.*.pue=1.2` for every entry of a list."""
    path, equals, text = override.partition("=")
    if not equals or not path.strip():
        raise InputError(f"--set {override}: write a.b=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is text
    _set(table, path.strip().split("."), value, override)


def _set(node: Any, keys: list[str], value: Any, override: str) -> None:
    key, rest = keys[0], keys[1:]
    if isinstance(node, list):
        if key != "*" and not (key.isdecimal() and int(key) < len(node)):
            raise InputError(f"--set {override}: {key!r} must be a number from 0 to {len(node) - 1}, or * for every entry")
        for i in range(len(node)) if key == "*" else [int(key)]:
            if rest:
                _set(node[i], rest, value, override)
            else:
                node[i] = value
    elif isinstance(node, dict):
        if rest:
            _set(node.setdefault(key, {}), rest, value, override)
        else:
            node[key] = value
    else:
        raise InputError(f"--set {override}: {json.dumps(node)} has no field {key!r}")
