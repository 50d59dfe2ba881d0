"""Changes to a scenario's table before it is checked: `a.b=c` texts, dotted paths with values, and a file that builds on another."""

import copy
import json
import tomllib
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import InputError

DEEPEST_PATH = 20
"""Parts of a dotted path: no field lies deeper."""


def parse_override(text: str) -> tuple[str, Any]:
    """The path and value of `engine.max_num_seqs=64`; what TOML does not read as one value is text."""
    path, equals, value = text.partition("=")
    keys = path.split(".")
    if not equals or not all(key.strip() for key in keys) or len(keys) > DEEPEST_PATH:
        raise InputError(f"--set {text}: write a.b=value")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        parsed = {}
    # A bare word is text, and so is what would smuggle in more than one value.
    return path, parsed["value"] if set(parsed) == {"value"} else value.strip()


def set_path(table: dict[str, Any], path: str, value: Any, where: str) -> None:
    """Set one dotted path of `table`: a field of tables, an entry of a list by its number or `name`, or `*` for every entry.

    Raises `InputError` that begins with `where`.
    """
    *parents, last = (key.strip() for key in path.split("."))
    nodes: list[Any] = [table]
    for key in parents:
        nodes = [node[name] for node in nodes for name in _places(node, key, where)]
    for node in nodes:
        for name in _places(node, last, where):
            node[name] = copy.deepcopy(value)  # entries of a list that are set by * must stay apart


def merge(table: Any, changes: Mapping[str, Any], where: str, path: str = "") -> None:
    """Lay a file's own `changes` over the `table` that it builds on, or over the part of it at `path`.

    Tables are merged field by field, unless their `kind` differs; a list takes a table of changes by number, `name` or `*`; all else is
    replaced. Raises `InputError` that begins with `where`.
    """
    for key, value in changes.items():
        for name in [key] if isinstance(table, dict) else _places(table, key, f"{where}: {path}"):
            below = table.get(name) if isinstance(table, dict) else table[name]
            if isinstance(value, dict) and isinstance(below, dict | list) and not _other_kind(below, value):
                merge(below, value, where, f"{path}.{key}" if path else key)
            else:
                table[name] = copy.deepcopy(value)


def _other_kind(below: Any, value: Mapping[str, Any]) -> bool:
    return isinstance(below, dict) and "kind" in value and below.get("kind") != value["kind"]


def _places(node: Any, key: str, where: str) -> list[Any]:
    """Where `key` leads in `node`: the field of a table (made if need be), or entries of a list."""
    if isinstance(node, dict):
        node.setdefault(key, {})
        return [key]
    if not isinstance(node, list):
        raise InputError(f"{where}: {json.dumps(node, default=str)} has no field {key!r}")
    if key == "*":
        return list(range(len(node)))
    if key.isdecimal() and len(key) < 10 and int(key) < len(node):
        return [int(key)]
    named: list[Any] = [i for i, entry in enumerate(node) if isinstance(entry, dict) and entry.get("name") == key]
    if not named:
        numbers = f"a number from 0 to {len(node) - 1}, the name of an entry, or * for every entry"
        raise InputError(f"{where}: {key!r} must be {numbers if node else 'a number, but the list is empty'}")
    return named
