"""What the results of a run depend on, hashed: `inputs.json` of its folder, by which a later process can tell whether it may go on."""

import hashlib
import importlib.metadata
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
import tomli_w

import jaxserve
from jaxserve.errors import InputError
from jaxserve.scenario.compile import Compiled

PACKAGES = ("jax", "jaxlib", "numpy", "scipy", "equinox", "pandas", "pyarrow", "cvxpy", "highspy")
"""What computes, solves, reads or writes: another version of any may give other bits, or other bytes for the same ones."""


def versions() -> dict[str, str]:
    """The version of jaxserve, and of what it computes and writes with."""
    return {"jaxserve": jaxserve.__version__} | {name: importlib.metadata.version(name) for name in PACKAGES}


def inputs(compiled: Compiled, scenario_toml: str, code: Mapping[str, str]) -> dict[str, Any]:
    """Everything that decides the bits of a run, as JSON holds it: versions as text, data as SHA-256 in hex.

    `compiled` is of a scenario with absolute paths, `scenario_toml` that scenario as the folder keeps it, `code` the functions that its
    policies name, `module:function` -> text. Raises `InputError` where a file cannot be read any more.
    """
    coefficients = compiled.scenario.coefficients
    return {
        "versions": versions(),
        "jaxserve_sha256": source_sha256(),
        "device": str(jax.devices()[0].platform),
        "scenario_sha256": _sha256(scenario_toml),
        "coefficients": coefficients.setup.model_dump()
        | {"sha256": _sha256(tomli_w.dumps(coefficients.model_dump(mode="python", exclude_none=True)))},
        "files_sha256": {path: _file_sha256(Path(path)) for path in compiled.scenario.input_files()},
        "requests_and_grid_sha256": compiled.fingerprint(),
        "code_sha256": {path: _sha256(text) for path, text in code.items()},
    }


@cache
def source_sha256() -> str:
    """Of the package's own Python files: between releases the version stays, the code does not."""
    folder = Path(jaxserve.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        digest.update(f"{path.relative_to(folder).as_posix()}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _file_sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: cannot be read again to note its hash ({error.strerror or error}); leave it where it is") from None
