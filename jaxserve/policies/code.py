"""Code that a scenario names by import path. A scenario is data: nothing here is imported until the user has allowed it."""

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxserve.errors import InputError

FIELD = "constraints"
"""The one parameter of a policy that names code."""

PATTERN = re.compile(r"\w+(\.\w+)*:\w+", re.ASCII)


def named_code(tables: Iterable[Mapping[str, Any]]) -> list[str]:
    """`module:function`, each once, of the code that resolved policies name."""
    return list(dict.fromkeys(table[FIELD] for table in tables if FIELD in table))


def without_code(table: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved policy without the code that it names: what can be looked at and not run."""
    return {name: value for name, value in table.items() if name != FIELD}


def refuse_code(table: Mapping[str, Any]) -> None:
    """Raise `InputError` for a resolved policy that names code."""
    for path in named_code([table]):
        raise InputError(
            f'{FIELD} = "{path}" is code, and a scenario is data; read that code, and if you trust it let `jaxserve run` run it by '
            "--allow-code, or jaxserve.run by allow_code=True"
        )


def load_code(path: str) -> Callable[..., Any]:
    """Import the function at `module:function`, which runs the module. Raises `InputError` where that fails."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
        if not callable(found):
            raise AttributeError(f"{name} is not a function")
        return found
    except Exception as error:  # importing runs the user's module, in which anything may go wrong
        raise InputError(f'{FIELD} = "{path}": {error}; name a function as module:function, the module on the Python path') from None


def source(path: str) -> str:
    """The text of the file that defines the function at `module:function`, or of its cell in a notebook; what it imports is not in it."""
    try:
        lines, _ = inspect.findsource(inspect.unwrap(load_code(path)))
    except (OSError, TypeError):  # built in, compiled, or typed at a prompt
        raise InputError(f'{FIELD} = "{path}": has no source to keep with the results; name a function that a .py file defines') from None
    return "".join(lines)
