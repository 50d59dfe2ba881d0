"""Regenerate the shipped coefficients files from the published measurements: `python -m calibration_fit.regenerate DATA_DIR --out DIR`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from calibration_fit import published as pub
from calibration_fit.holdout import grouped_mape
from calibration_fit.measurements import Setup
from calibration_fit.output import check_out, coefficients_table, write_coefficients
from calibration_fit.pipeline import fit_setups
from calibration_fit.report import write_report
from calibration_fit.results import SetupFit, TableFit
from calibration_fit.shipped_energy import (
    LLAMA,
    POWER_A100,
    POWER_H100,
    Key,
    decode_energy,
    prefill_energy_a100,
    prefill_energy_h100,
)
from calibration_fit.uncertainty import BOOTSTRAP_SAMPLES
from jaxserve.errors import InputError

KERNELS = "composed of kernel times (ai-dynamo/aiconfigurator, vLLM 0.14), no run of the model: GPU time only, no host time"
DIRECT = "vLLM static batches (argonne-lcf/LLM-Inference-Bench), prefill taken from the composed table"
COUNTED_TWICE = "prefill energy is inside and so counted twice"
# Mixtral on H100 is left out: vLLM was not measured on it there, and the energies of ML.ENERGY v2 over composed step times would be over
# twice the board power, because that engine waited for its CPU.
A100_DIRECT: tuple[Key, ...] = (LLAMA, ("Llama-3.1-8B", 2), ("Qwen2.5-7B", 2), ("Mixtral-8x7B", 4))
H100_DIRECT: tuple[Key, ...] = (LLAMA, ("Llama-3.1-8B", 2), ("Qwen2.5-7B", 1), ("Qwen2.5-7B", 2))
"""The setups whose static batches vLLM was measured on: on A100 the decode times of the others are composed."""
Tables = dict[str, TableFit]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def regenerate(data: Path, samples: int = BOOTSTRAP_SAMPLES) -> dict[str, tuple[SetupFit, dict[str, Any]]]:
    """Fit everything and build the files' contents, by file name."""
    a100, h100 = (_composed(data, gpu, keys, samples) for gpu, keys in ((pub.A100, pub.SETUPS), (pub.H100, H100_DIRECT)))
    a100_direct = _direct(data, a100, "Nvidia A100 GPU", A100_DIRECT, samples)
    h100_direct = _direct(data, h100, "Nvidia H100 GPU", H100_DIRECT, samples)
    energies = fit_setups(_by_setup(pub.composed(data, pub.H200)), only=("prefill_energy", "decode_energy"), samples=20)
    h200 = {(s.setup.model, s.setup.tp): s.tables for s in energies}
    llama, mixtral, llama_h100 = (
        fit_setups([[m]], only=("decode_energy",), samples=samples, fixed={"decode_energy": {"e_dec_kv": 0.0}})[0].tables["decode_energy"]
        for m in (pub.llama_decode_energy_a100(data), pub.mlenergy_v2(data), pub.mlenergy_v3(data))
    )
    out: dict[str, tuple[SetupFit, dict[str, Any]]] = {}
    for key in pub.SETUPS:
        out[_name(key, "a100")] = _a100_file(key, a100[key], a100_direct.get(key), h200, llama, mixtral)
    for key in H100_DIRECT:
        out[_name(key, "h100")] = _h100_file(key, h100[key], h100_direct[key], h200, llama_h100)
    return out


def _name(key: Key, gpu: str) -> str:
    return f"{key[0].lower()}_tp{key[1]}_{gpu}"


def _a100_file(key: Key, composed: Tables, direct: TableFit | None, h200: dict[Key, Tables], llama: TableFit, mixtral: TableFit):
    """The fit and the contents of the file of one setup on A100."""
    tables = {k: v for k, v in composed.items() if k.endswith("time")}
    notes = {"prefill_time": KERNELS, "decode_time": KERNELS}
    if direct is not None:
        tables["decode_time"] = direct
        notes["decode_time"] = f"A100-40GB, {DIRECT}"
        if key[0] == "Mixtral-8x7B":
            notes["decode_time"] += "; batch_knee taken from the fit to composed steps, as no batch between 1 and 16 was run"
    borrowed = {"prefill_energy": prefill_energy_a100(key, h200, tables["prefill_time"])}
    if key == LLAMA:
        tables["decode_energy"] = llama
        notes["decode_energy"] = "14 run averages on A100-40GB (ANL, ML.ENERGY v2), prefill share removed by an estimate"
    elif key[0] == "Mixtral-8x7B":
        tables["decode_energy"] = mixtral
        notes["decode_energy"] = (
            f"run averages on A100-40GB (ML.ENERGY v2, vLLM 0.5.4, B up to 320: the line bends beyond): {COUNTED_TWICE}"
        )
    else:
        borrowed["decode_energy"] = decode_energy(key, "A100", h200, llama)
    fit = SetupFit(Setup(*key, "A100"), tables)
    return fit, coefficients_table(fit, borrowed=borrowed, notes=notes, power=POWER_A100)


def _h100_file(key: Key, composed: Tables, direct: TableFit, h200: dict[Key, Tables], llama: TableFit):
    """The same on H100."""
    slower = "measured prefill of 16 x 1024 tokens is about 22 % slower than this table" + ("" if key == LLAMA else " (Llama-3.1-8B TP1)")
    notes = {"prefill_time": f"{KERNELS}; {slower}", "decode_time": DIRECT}
    tables = {"prefill_time": composed["prefill_time"], "decode_time": direct}
    borrowed = {"prefill_energy": prefill_energy_h100(key, tables["prefill_time"])}
    if key == LLAMA:
        tables["decode_energy"] = llama
        notes["decode_energy"] = f"run averages (ML.ENERGY v3, vLLM 0.11.1): {COUNTED_TWICE}"
    else:
        borrowed["decode_energy"] = decode_energy(key, "H100", h200, llama)
    fit = SetupFit(Setup(*key, "H100"), tables)
    return fit, coefficients_table(fit, borrowed=borrowed, notes=notes, power=POWER_H100)


def _by_setup(measurements):
    groups: dict[Setup, list] = {}
    for m in measurements:
        groups.setdefault(m.setup, []).append(m)
    return list(groups.values())


def _composed(data: Path, gpu: str, keys: Sequence[Key], samples: int) -> dict[Key, Tables]:
    """Fits to the composed steps of some setups on one GPU: the study's form, except for the MoE, which it misses at small batches."""
    groups = _by_setup(m for m in pub.composed(data, gpu) if (m.setup.model, m.setup.tp) in keys)
    moe = [g for g in groups if g[0].setup.model == "Mixtral-8x7B"]
    dense = [g for g in groups if g[0].setup.model != "Mixtral-8x7B"]
    fits = fit_setups(dense, decode_form="study", samples=samples)
    fits += fit_setups(moe, decode_form="two_piece", samples=samples) if moe else []
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
        fits = fit_setups(groups, decode_form=form, prefill=prefill, fixed=fixed, only=("decode_time",), samples=samples)
        out |= {k: f.tables["decode_time"] for k, f in zip(mine, fits, strict=True)}
    return out


@app.command()
def write(
    data: Annotated[Path, typer.Argument(help="The folder shared/data/calibration.")],
    out: Annotated[Path, typer.Option(help="Folder for the coefficients files.")],
    report: Annotated[Path | None, typer.Option(help="Folder for a report on all of them.")] = None,
    samples: Annotated[int, typer.Option(help="Bootstrap resamples.", min=20)] = BOOTSTRAP_SAMPLES,
) -> None:
    """Regenerate all shipped coefficients files into OUT."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        check_out(out / "any.toml", report)
        files = regenerate(data, samples)
        for name, (_, table) in files.items():
            write_coefficients(out / f"{name}.toml", table, "Written by python -m calibration_fit.regenerate; do not edit by hand.")
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
