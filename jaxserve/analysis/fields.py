"""One table of every number that the analysis hands out: its unit and what it means. Tables, datasets and docs read it here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Field:
    """What a named number is."""

    unit: str
    """UDUNITS-like; `1` for a count or a share."""
    text: str
    """One sentence; a share says of what."""


PERCENTILES = (50, 90, 99)


def _spread(stem: str, text: str) -> dict[str, Field]:
    """Mean and percentiles of one latency, s."""
    percentiles = {f"{stem}_p{p}_s": Field("s", f"{p}th percentile of {text}") for p in PERCENTILES}
    return {f"{stem}_mean_s": Field("s", f"mean of {text}"), **percentiles}


METRICS: dict[str, Field] = {
    "requests": Field("1", "requests that arrived in [warm-up, horizon) (injected); these alone are counted below"),
    "finished": Field("1", "requests served to their last token, those finished after the horizon included"),
    "rejected": Field("1", "requests that no engine could ever hold; each counts as an SLO violation"),
    "finished_after_horizon": Field("1", "finished requests whose last token came after the horizon"),
    "warmup_s": Field("s", "what arrives or is spent before it is not counted"),
    "horizon_s": Field("s", "time until which requests arrive and energy and carbon are counted"),
    "arrival_mean_s": Field("s", "mean arrival time (in whole microseconds); with the totals it tells one trace from another"),
    "input_tokens_asked": Field("1", "prompt tokens of all requests"),
    "output_tokens_asked": Field("1", "output tokens of all requests"),
    "input_tokens_served": Field("1", "prompt tokens of finished requests"),
    "output_tokens_served": Field("1", "output tokens of finished requests"),
    "slo_ttft_s": Field("s", "budget of TTFT"),
    "slo_tpot_s": Field("s", "budget of TPOT"),
    "slo_attainment": Field("1", "share of all requests that were served within both budgets"),
    "slo_violation": Field("1", "share of all requests over a budget or rejected"),
    "ttft_violation": Field("1", "share of all requests whose TTFT is over its budget"),
    "tpot_violation": Field("1", "share of all requests whose TPOT is over its budget"),
    "both_violation": Field("1", "share of all requests over both budgets (counted in each of the two shares above)"),
    "rejected_share": Field("1", "share of all requests that were rejected"),
    **_spread("ttft", "time from arrival at the first scheduler to the first token, finished requests"),
    **_spread("tpot", "(finish - first token)/(osl - 1), finished requests with osl > 1"),
    "tpot_undefined": Field("1", "finished requests with osl = 1, which have no TPOT"),
    **_spread("queue_wait", "time from arrival at the DC to admission by an engine, finished requests"),
    "carbon_g": Field("g", "CO2e of the facilities, [warm-up, horizon]: sum of PUE * CI * energy"),
    "energy_kwh": Field("kWh", "energy of the facilities (PUE * engine and host energy), [warm-up, horizon]"),
    "facility_energy_j": Field("J", "the same energy in joules"),
    "prefill_energy_j": Field("J", "energy of prefill steps before PUE, [warm-up, horizon]"),
    "decode_energy_j": Field("J", "energy of decode steps before PUE, [warm-up, horizon]"),
    "idle_energy_j": Field("J", "energy of idle engines before PUE, [warm-up, horizon]"),
    "host_energy_j": Field("J", "energy of the nodes' hosts before PUE, [warm-up, horizon]"),
    "drain_energy_j": Field("J", "step energy before PUE after the horizon (the drain), which the other energies and carbon_g leave out"),
    "carbon_with_drain_g": Field("g", "CO2e of [warm-up, horizon] and of the drain, at the last CI: what savings are of"),
    "mean_ci_g_per_kwh": Field("g/kWh", "carbon over facility energy: the carbon intensity of the energy used"),
    "idle_share": Field("1", "share of engine time in [warm-up, horizon] that was idle"),
    "prefill_share": Field("1", "share of engine time in [warm-up, horizon] spent in prefill steps"),
    "decode_share": Field("1", "share of engine time in [warm-up, horizon] spent in decode steps"),
    "carbon_g_per_request": Field("g", "CO2e with the drain per finished request"),
    "energy_j_per_output_token": Field("J", "facility energy with the drain per output token of a finished request"),
    "goodput_req_per_s": Field("1/s", "requests within both budgets per second between warm-up and horizon"),
    "goodput_req_per_j": Field("1/J", "requests within both budgets per joule of facility energy, drain included"),
    "goodput_req_per_g": Field("1/g", "requests within both budgets per gram of CO2e, drain included"),
    "goodput_tokens_per_j": Field("1/J", "output tokens of requests within both budgets per joule of facility energy, drain included"),
    "goodput_tokens_per_g": Field("1/g", "output tokens of requests within both budgets per gram of CO2e, drain included"),
}
"""The names of a summary, in order."""

RUN_METRICS: dict[str, Field] = {
    "simulated_req_per_wall_s": Field("1/s", "requests simulated per second of wall time"),
    "fallback_lowest_carbon": Field("1", "requests decided after the warm-up that a fallback sent to the feasible DC of lowest CI"),
    "fallback_round_robin": Field("1", "requests decided after the warm-up that a fallback dealt in turn"),
}
"""What whoever ran the simulation may add to a summary; carried along, never required."""

COMPARISON: dict[str, Field] = {
    "saving_vs_baseline": Field("1", "1 - carbon_with_drain_g/that of the baseline; missing where the two did not serve the same"),
    "drain_vs_baseline": Field("1", "drain energy less the baseline's, over the baseline's energy before PUE: work left for later"),
    "share_of_possible_saving": Field("1", "the saving over the largest that any policy could have; missing without bound or saving"),
}

LEDGER: dict[str, Field] = {
    "prefill_j": Field("J", "energy of prefill steps before PUE"),
    "decode_j": Field("J", "energy of decode steps before PUE"),
    "idle_j": Field("J", "energy of idle engines before PUE"),
    "host_j": Field("J", "energy of the nodes' hosts before PUE"),
    "facility_j": Field("J", "PUE * (prefill + decode + idle + host)"),
    "ci_g_per_kwh": Field("g/kWh", "carbon intensity at the interval's start"),
    "carbon_g": Field("g", "CO2e of the facility"),
}
