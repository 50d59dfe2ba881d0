"""Regenerate the shipped coefficients files from the published measurements: `python -m calibration_fit.regenerate DATA_DIR --out DIR`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from calibration_fit import published as pub
from calibration_fit.hardware import known_model
from calibration_fit.holdout import grouped_mape
from calibration_fit.measurements import Measurements, Setup
from calibration_fit.output import Borrowed, check_out, coefficients_table, write_coefficients
from calibration_fit.pipeline import HELD_OF_FEW, fit_setups
from calibration_fit.report import write_report
from calibration_fit.results import SetupFit, TableFit
from calibration_fit.shipped_energy import (
    A100,
    H100,
    LLAMA,
    Board,
    Key,
    by_power,
    by_work,
    decode_energy,
    from_llama,
    joined,
    prefill_energy,
    served_runs,
    static_runs,
    step_seconds,
)
from calibration_fit.uncertainty import BOOTSTRAP_SAMPLES
from jaxserve.errors import InputError
from jaxserve.perf.latency import DecodeTime
from jaxserve.perf.power import DecodeEnergy, PrefillEnergy

KERNELS = "composed of kernel times (ai-dynamo/aiconfigurator, vLLM 0.14), no run of the model"
SLOWER = (
    "x {:.3f}, what prefill of 16 x 1024 tokens of Llama-3-8B takes in vLLM (argonne-lcf/LLM-Inference-Bench) over its composed time: an "
    "estimate of host time and of clocks under load"
)
HOST_TIME = (
    "plus what measured steps of Llama-3.1-8B TP1 take beyond its composed ones at the same batch and cached bytes: an estimate of host "
    "time and of the 40 GB part's bandwidth"
)
DIRECT = "vLLM static batches (argonne-lcf/LLM-Inference-Bench), prefill taken from the composed table"
ANL = "run averages of static batches (LLM-Inference-Bench: vLLM, TensorRT-LLM)"
V2 = "run averages on A100-40GB (ML.ENERGY v2, vLLM 0.5.4, B up to 320)"
WORK = "what they drew above idle, and idle power for the step time here"
SAME_POWER = "_same-power"
"""Ends the name of a file whose decode energy comes over in the other way: see `_energies`."""
# Mixtral on H100 is left out: vLLM was not measured on it there.
QWEN: Key = ("Qwen2.5-7B", 1)
MIXTRAL: Key = ("Mixtral-8x7B", 4)
A100_DIRECT: tuple[Key, ...] = (LLAMA, ("Llama-3.1-8B", 2), ("Qwen2.5-7B", 2), MIXTRAL)
H100_DIRECT: tuple[Key, ...] = (LLAMA, ("Llama-3.1-8B", 2), QWEN, ("Qwen2.5-7B", 2))
"""The setups whose static batches vLLM was measured on: on A100 the decode times of the others are composed."""
Tables = dict[str, TableFit]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def regenerate(data: Path, samples: int = BOOTSTRAP_SAMPLES) -> dict[str, tuple[SetupFit, dict[str, Any]]]:
    """Fit everything and build the files' contents, by file name."""
    h200 = {(m.setup.model, m.setup.tp): m for m in pub.composed(data, pub.H200) if m.phase == "decode"}
    out: dict[str, tuple[SetupFit, dict[str, Any]]] = {}
    for board, gpu, hardware, keys, measured in (
        (A100, pub.A100, "Nvidia A100 GPU", pub.SETUPS, A100_DIRECT),
        (H100, pub.H100, "Nvidia H100 GPU", H100_DIRECT, H100_DIRECT),
    ):
        steps = pub.composed(data, gpu)
        slowdown = pub.prefill_slowdown(data, steps, board.name)
        steps = [replace(m, time_s=slowdown * m.time_s) if m.phase == "prefill" else m for m in steps]
        composed = _composed(steps, keys, samples)
        direct = _direct(data, composed, hardware, measured, samples)
        if board is A100:
            (qwen,) = (m for m in steps if m.phase == "decode" and (m.setup.model, m.setup.tp) == QWEN)
            hosted = with_host_time(qwen, composed[LLAMA]["decode_time"].result.module, direct[LLAMA].result.module)
            fits = fit_setups([[hosted]], decode_form="study", fixed=HELD_OF_FEW, only=("decode_time",), samples=samples)
            composed[QWEN]["decode_time"] = fits[0].tables["decode_time"]
        times = {key: direct.get(key, composed[key]["decode_time"]) for key in keys}
        tables = {key: {"prefill_time": composed[key]["prefill_time"], "decode_time": times[key]} for key in keys}
        notes = {key: _notes(key, board, slowdown, key in direct) for key in keys}
        prefill = {key: prefill_energy(key, board, tables[key]["prefill_time"]) for key in keys}
        for (key, variant), decode in _energies(data, board, hardware, tables, prefill, h200).items():
            fit = SetupFit(Setup(*key, board.name), tables[key])
            borrowed = {"prefill_energy": prefill[key], "decode_energy": decode}
            contents = coefficients_table(fit, borrowed=borrowed, notes=notes[key], power=board.power)
            out[f"{key[0].lower()}_tp{key[1]}_{board.name.lower()}{variant}"] = fit, contents
    return out


def with_host_time(m: Measurements, composed: DecodeTime, measured: DecodeTime) -> Measurements:
    """Composed decode steps with what `measured` steps of Llama TP1 take beyond its `composed` ones, cached tokens counted in its bytes."""
    llama, own = known_model(LLAMA[0]), known_model(m.setup.model)
    assert llama is not None and own is not None
    cached = m.cached_tokens * own.kv_bytes_per_token / llama.kv_bytes_per_token
    return replace(m, time_s=m.time_s + step_seconds(measured, m.batch, cached) - step_seconds(composed, m.batch, cached))


def _notes(key: Key, board: Board, slowdown: float, measured: bool) -> dict[str, str]:
    """What the source of each time table adds."""
    decode = f"{board.name}{'-40GB' if board is A100 else ''}, {DIRECT}" if measured else f"{KERNELS}; {HOST_TIME}"
    if key == MIXTRAL:
        decode += "; batch_knee taken from the fit to composed steps, as no batch between 1 and 16 was run"
    return {"prefill_time": f"{KERNELS}; {SLOWER.format(slowdown)}", "decode_time": decode}


def _energies(
    data: Path, board: Board, hardware: str, tables: dict[Key, Tables], prefill: dict[Key, Borrowed], h200: dict[Key, Measurements]
) -> dict[tuple[Key, str], Borrowed]:
    """Decode energies by setup and ending of the file's name.

    Llama TP1's power was measured together with its times. For the others there are two files, to be compared: the work of a step comes
    over (energy above idle), of the model's own runs or of Llama's; or the power that Llama draws at the same batch and context does.
    """
    time = {key: t["decode_time"].result.module for key, t in tables.items()}
    joules = {key: PrefillEnergy(**b.values) for key, b in prefill.items()}
    measured = pub.anl_energies(data, LLAMA[0], gpu=hardware)
    runs = static_runs(measured, tables[LLAMA]["prefill_time"].result.module, joules[LLAMA], ANL)
    if board is A100:
        served = served_runs(pub.mlenergy_v2(data, *LLAMA), pub.MLENERGY_ISL, joules[LLAMA], V2)
        runs = joined([runs, served], f"{ANL} and {V2}")
    llama = decode_energy(
        replace(runs, text=f"{runs.text}: {WORK}"), by_work(runs, time[LLAMA], board.idle_w), time[LLAMA], board, 1, False
    )
    known = DecodeEnergy(**llama.values)
    out = {(LLAMA, ""): llama}
    for key in tables:
        if key == LLAMA:
            continue
        # The composed energies of Mixtral are unreliable (the data's README): its power is taken to be that of Llama itself.
        like = None if key == MIXTRAL else (h200[key], h200[LLAMA])
        work, power = from_llama(h200[key], like, time[LLAMA], known, board, key[1])
        if key == MIXTRAL:
            text = f"extrapolated: {V2} of the same model: {WORK}; there power falls with the batch, which is not taken over"
            work = served_runs(pub.mlenergy_v2(data, *key), pub.MLENERGY_ISL, joules[key], text)
        at_work = by_work(work, time[key], board.idle_w * key[1])
        out[key, ""] = decode_energy(work, at_work, time[key], board, key[1], True)
        out[key, SAME_POWER] = decode_energy(power, by_power(power, time[key]), time[key], board, key[1], True)
    return out


def _by_setup(measurements):
    groups: dict[Setup, list] = {}
    for m in measurements:
        groups.setdefault(m.setup, []).append(m)
    return list(groups.values())


def _composed(steps: Sequence[Measurements], keys: Sequence[Key], samples: int) -> dict[Key, Tables]:
    """Fits to the composed steps of some setups on one GPU: prefill in the form of least held-out error, decode in one that energies know.

    That is the study's, except for the MoE, which it misses at small batches.
    """
    groups = _by_setup(m for m in steps if (m.setup.model, m.setup.tp) in keys)
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
            write_report(report, [fit for name, (fit, _) in files.items() if not name.endswith(SAME_POWER)])
    except (InputError, FileNotFoundError) as error:
        print(f"calibration_fit.regenerate: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    for name, (fit, contents) in files.items():
        for warning in contents["fit"].get("warnings", ()):
            print(f"{name}\n  warning: {warning}")
        print(f"{name}: decode energy: {contents['fit']['decode_energy']}")
        for table, t in fit.tables.items():
            print(f"{name} {table} ({t.result.form.name}): in sample {t.result.mape:.2f} %, held out {grouped_mape(t.held):.2f} %")
            for warning in t.warnings:
                print(f"  warning: {warning}")


if __name__ == "__main__":
    app()
