"""A predictor's file: a zip of `header.json`, for people, and one NumPy array a weight. Nothing in it is ever executed.

`unzip -p FILE header.json` shows what it knows, what it learned from and how good it is. The same predictor gives the same bytes.
"""

import io
import json
import stat
import zipfile
import zlib
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from jaxserve.errors import InputError, explain
from jaxserve.osl.model import OTHER, Network
from jaxserve.osl.predictor import Facts, Predictor
from jaxserve.outputs import check_free

HEADER = "header.json"
LARGEST_HEADER = 1_000_000
AGAIN = "train one with jaxserve osl-train"
UNREADABLE = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, RuntimeError, MemoryError)
"""What zip, JSON and NumPy raise at bytes that are none of theirs, encrypted, cut off or hostile."""


def save(predictor: Predictor, path: Path) -> None:
    """Write the file whole or not at all; raises `InputError` where there is one already, or no writing."""
    check_free(path)
    members = {HEADER: (predictor.facts.model_dump_json(indent=2) + "\n").encode()}
    for name, array in _weights(predictor.network).items():
        members[name] = _npy(np.asarray(array))
    fresh = path.with_name(path.name + ".new")
    try:
        with zipfile.ZipFile(fresh, "w") as file:
            for name, content in members.items():
                file.writestr(zipfile.ZipInfo(name), content)  # a fixed date, so that equal predictors are equal files
        fresh.replace(path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise InputError(f"{path}: cannot write the predictor: {error.strerror or error}") from error


def load(path: Path) -> Predictor:
    """Read a predictor; raises `InputError` naming the file for one that is absent, foreign, damaged or of another version."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a folder; also a pipe or device, which could block for ever
            raise InputError(f"{path}: is not a regular file; give an OSL predictor, or {AGAIN}")
        with zipfile.ZipFile(path) as file:
            if HEADER not in file.namelist():
                raise InputError(f"{path}: is no OSL predictor (it has no {HEADER}); {AGAIN}")
            facts = _facts(path, json.loads(_member(file, HEADER, LARGEST_HEADER)))
            return Predictor(facts, _network(file, facts))
    except InputError:
        raise
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path}: there is no such file; give an OSL predictor, or {AGAIN}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); check the path and the disk") from None
    except UNREADABLE as error:
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise InputError(f"{path}: is no whole OSL predictor ({reason}); {AGAIN}") from None


def _facts(path: Path, table: Any) -> Facts:
    try:
        return Facts.model_validate(table)
    except ValidationError as error:
        raise InputError(f"{path}, {HEADER}: {explain(error, table, Facts)}; {AGAIN}") from None


def _network(file: zipfile.ZipFile, facts: Facts) -> Network:
    sizes = (OTHER + 1 + len(facts.encoding.models), OTHER + 1 + len(facts.encoding.applications))
    shape = eqx.filter_eval_shape(Network, *sizes, jax.random.key(0))
    arrays = [jnp.asarray(_array(file, name, wanted)) for name, wanted in _weights(shape).items()]
    return jax.tree.unflatten(jax.tree.structure(shape), arrays)


def _array(file: zipfile.ZipFile, name: str, wanted: jax.ShapeDtypeStruct) -> NDArray[Any]:
    """The array of a member. Its head can only be the one that `wanted` has, so it is compared, not parsed."""
    blank = np.zeros(wanted.shape, wanted.dtype)
    whole = _npy(blank)
    content = _member(file, name, len(whole))
    start = len(whole) - blank.nbytes
    if len(content) != len(whole) or content[:start] != whole[:start]:
        raise ValueError(f"{name} is no array of {wanted.dtype} of shape {wanted.shape}")
    array = np.frombuffer(content[start:], wanted.dtype).reshape(wanted.shape)
    if not np.isfinite(array).all():
        raise ValueError(f"{name} holds values that are not finite")
    return array


def _npy(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _member(file: zipfile.ZipFile, name: str, most: int) -> bytes:
    """The bytes of a member, which may not be more than it needs: a small zip can hold gigabytes."""
    if file.getinfo(name).file_size > most:
        raise ValueError(f"{name} is too large")
    return file.read(name)


def _weights(network: Network) -> dict[str, Any]:
    """The arrays by name, such as `layers.0.weight.npy`, in the order of the tree's leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(network)
    return {jax.tree_util.keystr(path, simple=True, separator=".") + ".npy": leaf for path, leaf in leaves}
