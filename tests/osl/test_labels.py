"""Model and application of a trace's requests, from the file to the requests of a scenario."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pydantic import TypeAdapter

from jaxserve.errors import InputError
from jaxserve.scenario.traces import read_trace
from jaxserve.scenario.workload import Requests, WorkloadSpec, generate_requests

SPEC = TypeAdapter(WorkloadSpec)
MODELS, APPLICATIONS = ["m1", "m2", "m1"], ["chat", "", "code"]

FILES = {
    "generic": "arrival_s,isl,osl,model,application\n0,1,1,m1,chat\n1,2,2, m2 ,\n2,3,3,m1,code\n",
    "columns in another order": "application , osl,isl,arrival_s,model\nchat,1,1,0,m1\n,2,2,1,m2\ncode,3,3,2,m1 \n",
    "BurstGPT": ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n0,m1,1,1,2,chat\n1,m2,2,2,4,\n2,m1,3,3,6,code\n"),
    "Azure with two columns more": (
        "TIMESTAMP,ContextTokens,GeneratedTokens,model,application\n"
        "2023-11-16 18:00:00,1,1,m1,chat\n2023-11-16 18:00:01,2,2,m2,\n2023-11-16 18:00:02,3,3,m1,code\n"
    ),
    "Mooncake": (
        '{"timestamp": 0, "input_length": 1, "output_length": 1, "model": "m1", "application": "chat"}\n'
        '{"timestamp": 1000, "input_length": 2, "output_length": 2, "model": "m2", "application": null}\n'
        '{"timestamp": 2000, "input_length": 3, "output_length": 3, "model": "m1", "application": "code"}\n'
    ),
    "out of order": "arrival_s,isl,osl,model,application\n2,3,3,m1,code\n0,1,1,m1,chat\n1,2,2,m2,\n",
}


def values(labels: pd.Categorical | None) -> list[str] | None:
    return None if labels is None else [str(value) for value in labels]


def write(tmp_path: Path, text: str) -> Path:
    (tmp_path / "t.csv").write_bytes(text.encode())
    return tmp_path / "t.csv"


def generate(tmp_path: Path, **section: Any) -> Requests:
    spec = SPEC.validate_python({"kind": "trace", "path": "t.csv"} | section)
    return generate_requests(spec, horizon_s=100.0, seed=1, scheduler_names=["a", "b"], scheduler_weights=[1, 1], base_dir=tmp_path)


@pytest.mark.parametrize("form", FILES)
def test_labels_are_read_beside_the_lengths(form: str, tmp_path: Path):
    trace = read_trace(write(tmp_path, FILES[form]))
    assert trace.isl.tolist() == trace.osl.tolist() == [1, 2, 3]
    assert (values(trace.model), values(trace.application)) == (MODELS, APPLICATIONS)
    requests = generate(tmp_path)
    assert (values(requests.model), values(requests.application)) == (MODELS, APPLICATIONS)


def test_labels_stay_with_their_requests(tmp_path: Path):
    write(tmp_path, FILES["generic"])
    looped = generate(tmp_path, loop=True, slice_start_s=1.0, slice_end_s=3.0)
    assert values(looped.model) == ["m2", "m1"] * 50 and looped.isl.tolist() == [2, 3] * 50
    thinned = generate(tmp_path, loop=True, rate_scale=0.5, rate_method="thin")
    assert thinned.model is not None and 20 < len(thinned.isl) < 80
    assert values(thinned.model) == [MODELS[isl - 1] for isl in thinned.isl]


def test_rows_that_are_dropped_take_their_labels_along(tmp_path: Path):
    trace = read_trace(write(tmp_path, "arrival_s,isl,osl,model\n0,1,1,a\n1,1,0,b\n2,1,1,c\n"), invalid_rows="drop")
    assert values(trace.model) == ["a", "c"]


@pytest.mark.parametrize(
    "text",
    [
        "arrival_s,isl,osl\n0,1,1\n",
        "arrival_s,isl,osl,model,application\n0,1,1,,\n1,1,1, ,\n",
        '{"timestamp": 0, "input_length": 1, "output_length": 1}\n',
    ],
)
def test_a_trace_that_does_not_say_has_none(text: str, tmp_path: Path):
    trace = read_trace(write(tmp_path, text))
    assert trace.model is None and trace.application is None
    requests = generate(tmp_path)
    assert requests.model is None and requests.application is None


def test_an_origin_may_be_the_model(tmp_path: Path):
    write(tmp_path, FILES["generic"])
    requests = generate(tmp_path, split="origin", origin_column="model", origin_map={"m1": "b", "m2": "a"})
    assert requests.scheduler.tolist() == [1, 0, 1] and values(requests.model) == MODELS


def test_text_that_is_no_unicode_is_replaced(tmp_path: Path):
    text = '{"timestamp": 0, "input_length": 1, "output_length": 1, "model": "\\ud800x"}\n'
    assert values(read_trace(write(tmp_path, text)).model) == ["?x"]


def test_a_column_given_twice_is_told(tmp_path: Path):
    with pytest.raises(InputError, match="row 1: the column model appears 2 times; keep one"):
        read_trace(write(tmp_path, "arrival_s,isl,osl,model,model\n0,1,1,a,b\n"))
