"""A predictor's file: what is written is read, and nothing else is taken for one. Nothing in a file is executed."""

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
import pytest

from jaxserve.errors import InputError
from jaxserve.osl.files import HEADER, load, save
from jaxserve.osl.predictor import Predictor

Members = dict[str, bytes]


@pytest.fixture
def file(predictor: Predictor, tmp_path: Path) -> Path:
    path = tmp_path / "predictor.npz"
    save(predictor, path)
    return path


def members(path: Path) -> Members:
    with zipfile.ZipFile(path) as zipped:
        return {name: zipped.read(name) for name in zipped.namelist()}


def rewrite(path: Path, changed: Members) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, content in changed.items():
            zipped.writestr(name, content)


def test_round_trip(predictor: Predictor, file: Path):
    read = load(file)
    assert read.facts == predictor.facts
    leaves = zip(jax.tree.leaves(read.network), jax.tree.leaves(predictor.network), strict=True)
    assert all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in leaves)
    isl, application = np.arange(1, 4000, 7), pd.Categorical(["chat"] * 572)
    one, two = (p.predict(isl, None, application) for p in (read, predictor))
    assert np.array_equal(one.quantiles, two.quantiles) and np.array_equal(one.bucket, two.bucket)


def test_equal_predictors_are_equal_files(predictor: Predictor, file: Path, tmp_path: Path):
    save(load(file), tmp_path / "again.npz")
    assert (tmp_path / "again.npz").read_bytes() == file.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.npz", "predictor.npz"]


def test_people_can_read_the_header_and_numpy_the_weights(predictor: Predictor, file: Path):
    header = json.loads(members(file)[HEADER])
    assert header["encoding"]["applications"] == ["chat", "code", "summary"]
    assert header["held_out"]["predictor"]["bucket_accuracy"] == predictor.facts.held_out.predictor.bucket_accuracy
    with np.load(file, allow_pickle=False) as arrays:
        assert np.array_equal(arrays["layers.1.weight"], predictor.network.layers[1].weight)


def test_what_exists_is_left_alone(predictor: Predictor, file: Path, tmp_path: Path):
    before = file.read_bytes()
    with pytest.raises(InputError, match=r"predictor.npz: exists already and is left as it is; choose another --out"):
        save(predictor, file)
    assert file.read_bytes() == before
    with pytest.raises(InputError, match=r"there is no folder .*/absent to write in"):
        save(predictor, tmp_path / "absent" / "p.npz")


def test_a_write_that_fails_leaves_nothing(predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(InputError, match=r"p.npz: cannot write the predictor: No space left on device"):
        save(predictor, tmp_path / "p.npz")
    assert not list(tmp_path.iterdir())


class Trap:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.path),)


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def test_an_object_array_is_refused_and_not_executed(file: Path, tmp_path: Path):
    trap = np.empty((), object)
    trap[()] = Trap(tmp_path / "sprung")
    rewrite(file, members(file) | {"layers.0.bias.npy": npy(trap)})
    with pytest.raises(InputError, match=r"predictor.npz: is no whole OSL predictor \(layers.0.bias.npy is"):
        load(file)
    assert not (tmp_path / "sprung").exists()


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Members], Members]:
    def changed(old: Members) -> Members:
        table = json.loads(old[HEADER])
        change(table)
        return old | {HEADER: json.dumps(table).encode()}

    return changed


BIAS = "layers.0.bias.npy"
SPOILT: dict[str, tuple[Callable[[Members], Members], str]] = {
    "newer version": (header(lambda t: t.update(schema_version=2)), "header.json: schema_version: must be 1 (got 2); train one with"),
    "another format": (header(lambda t: t.update(format="sonnets")), "header.json: format: must be 'jaxserve OSL predictor'"),
    "header without edges": (header(lambda t: t["encoding"].pop("bucket_edges")), "encoding.bucket_edges: this field is missing"),
    "five buckets": (header(lambda t: t["encoding"]["bucket_edges"].pop()), "encoding.bucket_edges: must have at least 5"),
    "falling edges": (header(lambda t: t["encoding"]["bucket_edges"].reverse()), "encoding: bucket_edges: must rise"),
    "accuracy above 1": (
        header(lambda t: t["held_out"]["predictor"].update(bucket_accuracy=1.5)),
        "held_out.predictor.bucket_accuracy: must be at most 1 (got 1.5)",
    ),
    "NaN in the header": (header(lambda t: t["encoding"]["isl"].update(mean=float("nan"))), "encoding.isl.mean: must be a finite number"),
    "no spread": (header(lambda t: t["encoding"]["isl"].update(std=0.0)), "encoding.isl.std: must be above 0"),
    "span turned round": (header(lambda t: t["encoding"]["osl"].update(least=9e9)), "encoding.osl: least must not be above most"),
    "one label too many": (
        header(lambda t: t["encoding"]["models"].append("x")),
        "layers.0.weight.npy is no array of float32 of shape (128, 9)",
    ),
    "header no table": (lambda old: old | {HEADER: b"[]"}, "header.json: must be a table"),
    "header no JSON": (lambda old: old | {HEADER: b"{"}, "is no whole OSL predictor"),
    "header too deep": (lambda old: old | {HEADER: b"[" * 200_000}, "is no whole OSL predictor"),
    "header no text": (lambda old: old | {HEADER: b"\xff\xfe\x00"}, "is no whole OSL predictor"),
    "header gigantic": (lambda old: old | {HEADER: b" " * 2_000_000}, "header.json is too large"),
    "no header": (lambda old: {k: v for k, v in old.items() if k != HEADER}, "is no OSL predictor (it has no header.json)"),
    "weight missing": (lambda old: {k: v for k, v in old.items() if k != BIAS}, "layers.0.bias.npy"),
    "weight of another shape": (
        lambda old: old | {BIAS: npy(np.zeros(127, np.float32))},
        "layers.0.bias.npy is no array of float32 of shape (128,)",
    ),
    "weight of another type": (lambda old: old | {BIAS: npy(np.zeros(128, np.int32))}, "layers.0.bias.npy is no array of float32"),
    "weight NaN": (lambda old: old | {BIAS: npy(np.full(128, np.nan, np.float32))}, "layers.0.bias.npy holds values that are not finite"),
    "weight cut off": (lambda old: old | {BIAS: old[BIAS][:300]}, "is no whole OSL predictor"),
    "weight no array": (lambda old: old | {BIAS: b"hello"}, "is no whole OSL predictor"),
    "weight gigantic": (lambda old: old | {BIAS: bytes(10_000_000)}, "layers.0.bias.npy is too large"),
    "weight that claims to be gigantic": (
        lambda old: old | {BIAS: old[BIAS].replace(b"(128,), }     ", b"(9999999,), } ")},
        "layers.0.bias.npy is no array",
    ),
    "weight with half a head": (lambda old: old | {BIAS: old[BIAS].replace(b"}", b"(")}, "layers.0.bias.npy is no array"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_spoilt_file_is_one_sentence(case: str, file: Path):
    change, sentence = SPOILT[case]
    rewrite(file, change(members(file)))
    with pytest.raises(InputError) as error:
        load(file)
    assert str(error.value).startswith(str(file)) and sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"isl,osl\n1,2\n", bytes(range(256)) * 10])
def test_a_foreign_file_is_one_sentence(content: bytes, tmp_path: Path):
    path = tmp_path / "foreign.npz"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"foreign.npz: is no whole OSL predictor \(.*\); train one with jaxserve osl-train$"):
        load(path)


def test_an_npz_of_something_else_is_told_apart(tmp_path: Path):
    np.savez(tmp_path / "other.npz", weights=np.zeros(3))
    with pytest.raises(InputError, match=r"other.npz: is no OSL predictor \(it has no header.json\)"):
        load(tmp_path / "other.npz")


def test_damage_anywhere_is_noticed(file: Path):
    content = file.read_bytes()
    for at in np.linspace(40, len(content) - 1, 40).astype(int):
        file.write_bytes(content[:at])
        with pytest.raises(InputError):
            load(file)
    inside = content.index(b"layers.1.weight.npy") + 5000
    file.write_bytes(content[:inside] + bytes([content[inside] ^ 1]) + content[inside + 1 :])
    with pytest.raises(InputError, match="Bad CRC-32"):
        load(file)


def test_what_is_no_file(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for name, sentence in (
        ("absent.npz", "there is no such file; give an OSL predictor, or train one with"),
        (".", "is not a regular file"),
        ("pipe", "is not a regular file"),
    ):
        with pytest.raises(InputError, match=sentence):
            load(tmp_path / name)
