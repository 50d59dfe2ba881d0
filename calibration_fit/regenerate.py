"""Regenerate the shipped coefficients files from the published measurements: `python -m calibration_fit.regenerate DATA_DIR --out DIR`."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from calibration_fit import published as pub
from calibration_fit.holdout import grouped_mape
from calibration_fit.measurements import Setup
from calibration_fit.output import Borrowed, coefficients_table, write_coefficients
from calibration_fit.pipeline import SetupFit, TableFit, fit_setups
from calibration_fit.report import write_report
from calibration_fit.uncertainty import BOOTSTRAP_SAMPLES
from jaxserve.errors import InputError

A100_PREFILL_W = 395.0
"""Measured by Wilkins, Mistral-7B on A100-40GB, prompts of 541 tokens and more (the data's README)."""
A100_PREFILL_J_PER_TOKEN = 25.1e-3
"""395 W (Wilkins, Mistral-7B on A100-40GB) x 63.6 us a token (ANL TTFT of Llama-3-8B): an estimate, no measurement of a step."""
H100_PREFILL_W = 0.98 * 700.0
"""Assumed power of an H100 in prefill: the share of its board power that the A100 draws there (395 of 400 W)."""
CONTEXT = 900.0
"""Mean context at which the H200 energies of two setups are compared."""
RATIO_BATCHES = np.array([1.0, 32.0, 64.0])
POWER_A100 = Borrowed(
    {"idle_w_per_gpu": 60.0, "host_w": 300.0},
    "idle with a model loaded 59 to 62 W (chuyishang/inference-energy, A100-80GB); host: our definition, 37.5 W a GPU for a node of eight",
    False,
)
POWER_H100 = Borrowed(
    {"idle_w_per_gpu": 70.0, "host_w": 300.0},
    "assumed: a tenth of the board power idle, as no idle H100 was measured; host: our definition, 37.5 W a GPU for a node of eight",
    True,
)
KERNELS = "composed of kernel times (ai-dynamo/aiconfigurator, vLLM 0.14), no run of the model: GPU time only, no host time"
DIRECT = "vLLM static batches (argonne-lcf/LLM-Inference-Bench), prefill taken from the composed table"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def regenerate(data: Path, samples: int = BOOTSTRAP_SAMPLES) -> dict[str, tuple[SetupFit, dict[str, Any]]]:
    """Fit everything and build the files' contents, by file name."""
    a100 = _composed(data, pub.A100, samples)
    h100 = _composed(data, pub.H100, samples)
    a100_direct = _direct(
        data, a100, "Nvidia A100 GPU", [("Llama-3.1-8B", 1), ("Llama-3.1-8B", 2), ("Qwen2.5-7B", 2), ("Mixtral-8x7B", 4)], samples
    )
    h100_direct = _direct(data, h100, "Nvidia H100 GPU", [("Llama-3.1-8B", 1)], samples)
    energies = fit_setups(_by_setup(pub.composed(data, pub.H200)), only=("prefill_energy", "decode_energy"), samples=20)
    h200 = {(s.setup.model, s.setup.tp): s.tables for s in energies}
    llama, mixtral, llama_h100 = (
        fit_setups([[m]], only=("decode_energy",), samples=samples, fixed={"decode_energy": {"e_dec_kv": 0.0}})[0]
        for m in (
            pub.llama_decode_energy_a100(data),
            pub.mlenergy_decode_energy(data, "Mixtral-8x7B", 4, "v2"),
            pub.mlenergy_decode_energy(data, "Llama-3.1-8B", 1, "v3"),
        )
    )
    out: dict[str, tuple[SetupFit, dict[str, Any]]] = {}
    for model, tp in pub.SETUPS:
        key = (model, tp)
        tables = {k: v for k, v in a100[key].items() if k.endswith("time")}
        notes = {"prefill_time": KERNELS, "decode_time": KERNELS}
        if key in a100_direct:
            tables["decode_time"] = a100_direct[key]
            notes["decode_time"] = f"A100-40GB, {DIRECT}"
            if model == "Mixtral-8x7B":
                notes["decode_time"] += "; batch_knee taken from the fit to composed steps, as no batch between 1 and 16 was run"
        borrowed = {"prefill_energy": _prefill_energy(key, h200, tables["prefill_time"])}
        if key == ("Llama-3.1-8B", 1):
            tables["decode_energy"] = llama.tables["decode_energy"]
            notes["decode_energy"] = "14 run averages on A100-40GB (ANL, ML.ENERGY v2), prefill share removed by an estimate"
        elif model == "Mixtral-8x7B":
            tables["decode_energy"] = mixtral.tables["decode_energy"]
            notes["decode_energy"] = (
                "run averages on A100-40GB (ML.ENERGY v2, vLLM 0.5.4, B up to 320: the line bends beyond): "
                "prefill energy is inside and so counted twice"
            )
        else:
            borrowed["decode_energy"] = _decode_energy(key, h200, llama.tables["decode_energy"])
        fit = SetupFit(Setup(model, tp, "A100"), tables)
        name = f"{model.lower()}_tp{tp}_a100"
        out[name] = fit, coefficients_table(fit, borrowed=borrowed, notes=notes, power=POWER_A100)
    key = ("Llama-3.1-8B", 1)
    tables = {
        "prefill_time": h100[key]["prefill_time"],
        "decode_time": h100_direct[key],
        "decode_energy": llama_h100.tables["decode_energy"],
    }
    notes = {
        "prefill_time": KERNELS + "; measured prefill of 16 x 1024 tokens is about 22 % slower than this table",
        "decode_time": DIRECT,
        "decode_energy": "run averages (ML.ENERGY v3, vLLM 0.11.1): prefill energy is inside and so counted twice",
    }
    fit = SetupFit(Setup(*key, "H100"), tables)
    per_token = H100_PREFILL_W * tables["prefill_time"].result.coefficients["tok_slope_above"]
    borrowed = {
        "prefill_energy": Borrowed(
            {"e_pre0": 0.0, "e_pre_tok": float(f"{per_token:.4g}"), "e_pre_sq": 0.0},
            f"extrapolated: {H100_PREFILL_W:.0f} W, the A100's share of board power in prefill, x the fitted time of a token",
        )
    }
    out["llama-3.1-8b_tp1_h100"] = fit, coefficients_table(fit, borrowed=borrowed, notes=notes, power=POWER_H100)
    return out


def _by_setup(measurements):
    groups: dict[Setup, list] = {}
    for m in measurements:
        groups.setdefault(m.setup, []).append(m)
    return list(groups.values())


def _composed(data: Path, gpu: str, samples: int) -> dict[tuple[str, int], dict[str, TableFit]]:
    """Fits to the composed steps of one GPU: the study's form, except for the MoE, which it misses at small batches."""
    groups = _by_setup(pub.composed(data, gpu))
    moe = [g for g in groups if g[0].setup.model == "Mixtral-8x7B"]
    dense = [g for g in groups if g[0].setup.model != "Mixtral-8x7B"]
    fits = fit_setups(dense, decode_form="study", samples=samples) + fit_setups(moe, decode_form="two_piece", samples=samples)
    return {(f.setup.model, f.setup.tp): f.tables for f in fits}


def _direct(data: Path, composed, hardware: str, keys, samples: int) -> dict[tuple[str, int], TableFit]:
    """Decode times fitted through the sums of ANL's static batches, with the composed prefill of the same setup."""
    out = {}
    for moe in (False, True):
        mine = [k for k in keys if (k[0] == "Mixtral-8x7B") == moe]
        if not mine:
            continue
        groups = [[pub.anl_end_to_end(data, *k, gpu=hardware)] for k in mine]
        prefill = {g[0].setup: {"prefill_time": composed[k]["prefill_time"].result.module} for g, k in zip(groups, mine, strict=True)}
        fixed = {"decode_time": {"batch_knee": composed[mine[0]]["decode_time"].result.coefficients["batch_knee"]}} if moe else {}
        form = "two_piece" if moe else "study"
        fits = fit_setups(groups, decode_form=form, prefill=prefill, fixed=fixed, samples=samples)
        out |= {k: f.tables["decode_time"] for k, f in zip(mine, fits, strict=True)}
    return out


def _prefill_energy(key: tuple[str, int], h200, prefill: TableFit) -> Borrowed:
    """Prefill energy on A100: the estimate for Llama TP1, times the ratio of composed H200 energies a token for the other dense models.

    The H200 energies of Mixtral are unreliable (the data's README), so for it the measured power of another model, times fitted time.
    """
    if key[0] == "Mixtral-8x7B":
        per_token_s = prefill.result.coefficients["tok_slope_above"]
        return Borrowed(
            {"e_pre0": 0.0, "e_pre_tok": float(f"{A100_PREFILL_W * key[1] * per_token_s:.4g}"), "e_pre_sq": 0.0},
            f"extrapolated: {A100_PREFILL_W:.0f} W a GPU (Wilkins, another model) x {key[1]} GPUs x {1e6 * per_token_s:.2f} us a token",
        )
    n = 1024.0

    def per_token(k: tuple[str, int]) -> float:
        return float(h200[k]["prefill_energy"].result.module(n, n * n)) / n

    ratio = per_token(key) / per_token(("Llama-3.1-8B", 1))
    values = {"e_pre0": 0.0, "e_pre_tok": float(f"{A100_PREFILL_J_PER_TOKEN * ratio:.4g}"), "e_pre_sq": 0.0}
    estimate = "estimate: 395 W (Wilkins, A100-40GB) x 63.6 us a token (ANL TTFT); the fixed part is unknown and taken as 0"
    if key == ("Llama-3.1-8B", 1):
        return Borrowed(values, estimate, False)
    text = f"extrapolated: Llama-3.1-8B TP1 on A100 ({1e3 * A100_PREFILL_J_PER_TOKEN:.1f} mJ a token, an {estimate[:8]}) x {ratio:.2f}, "
    text += "the ratio of composed energies on H200"
    return Borrowed(values, text)


def _decode_energy(key: tuple[str, int], h200, llama: TableFit) -> Borrowed:
    """Decode energy on A100: that of Llama TP1 times ratios of composed H200 energies at three batches, refitted to a line."""

    def energy(k: tuple[str, int]) -> np.ndarray:
        return np.asarray(h200[k]["decode_energy"].result.module(RATIO_BATCHES, RATIO_BATCHES * CONTEXT))

    ratio = energy(key) / energy(("Llama-3.1-8B", 1))
    target = np.asarray(llama.result.module(RATIO_BATCHES, 0.0 * RATIO_BATCHES)) * ratio
    slope, constant = np.polyfit(RATIO_BATCHES, target, 1, w=1.0 / target)
    values = {"e_dec0": float(f"{constant:.4g}"), "e_dec_req": float(f"{slope:.4g}"), "e_dec_kv": 0.0}
    shown = " / ".join(f"{r:.2f}" for r in ratio)
    text = (
        f"extrapolated: Llama-3.1-8B TP1 on A100 x {shown} at B = 1 / 32 / 64, the ratios of composed energies on H200, refitted to a line"
    )
    return Borrowed(values, text)


@app.command()
def write(
    data: Annotated[Path, typer.Argument(help="The folder shared/data/calibration.")],
    out: Annotated[Path, typer.Option(help="Folder for the coefficients files.")],
    report: Annotated[Path | None, typer.Option(help="Folder for a report on all of them.")] = None,
    samples: Annotated[int, typer.Option(help="Bootstrap resamples.", min=20)] = BOOTSTRAP_SAMPLES,
) -> None:
    """Regenerate all shipped coefficients files into OUT."""
    try:
        files = regenerate(data, samples)
        out.mkdir(parents=True, exist_ok=True)
        for name, (_, table) in files.items():
            write_coefficients(out / f"{name}.toml", table, "Written by python -m calibration_fit.regenerate; do not edit by hand.")
            tomllib.loads((out / f"{name}.toml").read_text())
        if report is not None:
            write_report(report, [fit for fit, _ in files.values()])
    except (InputError, FileNotFoundError) as error:
        print(f"calibration_fit.regenerate: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    for name, (fit, contents) in files.items():
        for warning in contents["fit"].get("warnings", ()):
            print(f"{name}\n  warning: {warning}")
        for table, t in fit.tables.items():
            print(f"{name} {table} ({t.result.form.name}): in sample {t.result.mape:.2f} %, held out {grouped_mape(t.held):.2f} %")
            for warning in t.warnings:
                print(f"  warning: {warning}")


if __name__ == "__main__":
    app()
