"""Token lengths: the shipped tables have the means and the shapes that they state, and a bad table is refused."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from jaxserve.errors import InputError
from jaxserve.scenario import lengths
from jaxserve.scenario.workload import LengthsSpec, PoissonWorkload, Requests, generate_requests

DATA = Path(os.environ.get("JAXSERVE_SHARED_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
real_data = pytest.mark.skipif(not (DATA / "traces").is_dir(), reason=f"no real traces at {DATA} (set JAXSERVE_SHARED_DATA)")


def generate(section: dict[str, Any], count: int, base_dir: Path = Path()) -> Requests:
    """About `count` requests within one second."""
    spec = PoissonWorkload(kind="poisson", rate_req_per_s=float(count), lengths=LengthsSpec(**section))
    return generate_requests(spec, horizon_s=1.0, seed=7, scheduler_names=["a"], scheduler_weights=[1.0], base_dir=base_dir)


MEANS = {"cnn_dailymail": (842.0, 71.0), "openorca": (195.0, 211.0), "long": (10700.0, 629.0)}
MEANS["mixed"] = (2900.0, 0.383 * 71 + 0.383 * 211 + 0.234 * 629)  # the mean ISL is published
TABLE_TOLERANCE = 2e-3  # a table has 40 points and two decimals; the digitised histogram is good to about 0.1 %
SAMPLES = 200_000


@pytest.mark.parametrize("name", lengths.NAMES)
def test_named_lengths_have_the_stated_means(name: str) -> None:
    stated, table = MEANS[name], lengths.length_means(name)
    assert table == pytest.approx(stated, rel=TABLE_TOLERANCE)
    requests = generate({"distribution": name}, SAMPLES)
    for sample, mean in ((requests.isl, table[0]), (requests.osl, table[1])):
        # Four standard errors, and 0.01 token for what rounding and the floor of 1 may add.
        assert abs(sample.mean() - mean) < 4 * sample.std() / len(sample) ** 0.5 + 0.01
        assert sample.min() >= 1
    assert f"lengths from {name}" in requests.notes[-1]
    if name != "mixed":  # a mixture is independent within its parts only
        assert abs(np.corrcoef(requests.isl, requests.osl)[0, 1]) < 4 / SAMPLES**0.5


def test_unknown_name() -> None:
    with pytest.raises(InputError, match="cnn_dailymail, openorca, long, mixed"):
        lengths.length_means("short")


@pytest.mark.parametrize("name", lengths.TABLES)
def test_tables_state_their_source(name: str) -> None:
    header = [line for line in (lengths.DATA / f"{name}.csv").read_text().splitlines() if line.startswith("#")]
    text = " ".join(header)
    assert "ISL:" in text and "OSL:" in text and "independent" in text and "ASSUMPTION" in text


@real_data
def test_tables_are_what_their_headers_say() -> None:
    """Rebuilds every column from its source; whoever changes a table changes this recipe."""
    traces = DATA / "traces"
    p = lengths.named_table("long").probability

    def scaled(quantiles: np.ndarray, mean: float) -> np.ndarray:
        return quantiles * mean / np.trapezoid(quantiles, p)

    bins = pd.read_csv(traces / "cnn_dailymail_llama31_8b_input_histogram.csv")
    below = np.concatenate([[0.0], bins["count"].cumsum() / bins["count"].sum()])
    article = np.interp(p, below, np.concatenate([bins.bin_lo_tokens[:1], bins.bin_hi_tokens])) - 28
    arxiv = pd.read_csv(traces / "arxiv_summarization_llama2_lengths.csv.gz").output_tokens.to_numpy()
    low, high = np.quantile(arxiv, [0.01, 0.90])
    summary = np.quantile(arxiv[(arxiv >= low) & (arxiv <= high)], p)
    chat = np.maximum(np.quantile(pd.read_csv(traces / "azure2023_conv.csv.gz").input_tokens, p), 6)
    logs = pd.read_csv(traces / "mlperf_output_lengths.csv").query("model == 'mixtral-8x7b' and dataset == 'openorca'")
    facts = pd.read_csv(traces / "length_summary.csv").query("dataset == 'mooncake_conversation' and kind == 'input'").iloc[0]
    known = facts[["min", "p01", "p05", "p10", "p25", "p50", "p75", "p90", "p95"]].to_numpy(float)
    document = np.exp(np.interp(p, np.array([0, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95]) / 0.95, np.log(known)))
    recipe = {
        "cnn_dailymail": (article, scaled(summary, 71)),
        "openorca": (scaled(chat, 195), scaled(np.quantile(logs.output_tokens_median, p), 211)),
        "long": (scaled(document, 10700), scaled(summary, 629)),
    }
    for name, (isl, osl) in recipe.items():
        table = lengths.named_table(name)
        np.testing.assert_allclose(table.isl_tokens, isl, atol=0.0051)  # two decimals are stored
        np.testing.assert_allclose(table.osl_tokens, osl, atol=0.0051)


HEADER = "probability,isl_tokens,osl_tokens\n"
BAD_TABLES = {
    "empty": ("", "is empty"),
    "comments only": ("# nothing\n", r"has 0 row\(s\)"),
    "header only": (HEADER, r"has 0 row\(s\)"),
    "one row": (HEADER + "0,1,1\n", r"has 1 row\(s\)"),
    "unknown header": ("p,isl,osl\n0,1,1\n1,2,2\n", "row 1: the header 'p,isl,osl' should be probability"),
    "late start": (HEADER + "0.1,1,1\n1,2,2\n", "row 2, column probability: starts at 0.1"),
    "early end": (HEADER + "0,1,1\n0.9,2,2\n", "column probability: ends at 0.9"),
    "probability twice": (HEADER + "0,1,1\n0,2,2\n1,2,2\n", "row 3, column probability: 0 after 0"),
    "falling": ("# c\n" + HEADER + "0,5,1\n1,4,2\n", "row 4, column isl_tokens: 4 after 5"),
    "below one": (HEADER + "0,0,1\n1,2,2\n", "row 2, column isl_tokens: 0 is outside 1"),
    "NaN": (HEADER + "0,1,nan\n1,2,2\n", "row 2, column osl_tokens: nan is outside"),
    "text": (HEADER + "0,1,x\n1,2,2\n", "row 2, column osl_tokens: 'x' is not a number"),
    "short row": (HEADER + "0,1\n1,2,2\n", r"row 2: has 2 field\(s\)"),
    "beyond 1": (HEADER + "0,1,1\n1.5,2,2\n", "row 3, column probability: 1.5 is outside"),
    "a cell beyond reason": (HEADER + "0,5,5\n1," + "6" * 200_000 + ",5\n", "row 3"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_bad_quantiles_file(tmp_path: Path, case: str) -> None:
    content, pattern = BAD_TABLES[case]
    (tmp_path / "q.csv").write_text(content)
    with pytest.raises(InputError, match=pattern) as caught:
        generate({"quantiles_file": "q.csv"}, 10, tmp_path)
    assert "q.csv" in str(caught.value)


def test_own_quantiles_file(tmp_path: Path) -> None:
    (tmp_path / "q.csv").write_text("# mine\n\nosl_tokens,probability,isl_tokens\n5,0,100\n5,1,200\n")
    requests = generate({"quantiles_file": "q.csv"}, SAMPLES, tmp_path)
    assert set(requests.osl) == {5} and requests.isl.min() == 100 and requests.isl.max() == 200
    assert requests.isl.mean() == pytest.approx(150, abs=0.5)
