"""From a scenario to what the engine takes: the fleet, the requests with their decision times, and the grid."""

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jax import Array
from numpy.typing import NDArray

from jaxserve.engine.lane import Requests as EngineRequests
from jaxserve.engine.lane import first_requests
from jaxserve.engine.model import ALIKE, OBSERVED, UNKNOWN, Fleet, Sizes, ValidRange
from jaxserve.errors import InputError
from jaxserve.perf.coefficients import Coefficients
from jaxserve.scenario.decisions import batch_decision_times, close_windows, decision_times
from jaxserve.scenario.doubts import doubts
from jaxserve.scenario.grid import GridSeries, load_grid
from jaxserve.scenario.intervals import ci_changes, interval_windows, warmup_note
from jaxserve.scenario.osl_knowledge import OracleKnowledge, believed_osl
from jaxserve.scenario.spec import MOST_KV_TOKENS, Engine, Scenario
from jaxserve.scenario.workload import Requests, generate_requests
from jaxserve.types import on_host
from jaxserve.units import MS_PER_S

LONGEST_STEP_S = 1.0
"""Steps of the engine are at most this long (or one window): longer ones save nothing and need larger buffers."""


@dataclass(frozen=True)
class Compiled:
    """A scenario ready to run under any policy."""

    scenario: Scenario
    fleet: Fleet
    requests: Requests  # all that arrive
    accepted: NDArray[np.int64]  # [A] numbers of those that can ever be served
    engine_requests: EngineRequests  # the accepted ones, decided at arrival
    grid: GridSeries
    site_zone: NDArray[np.int64]  # [D] column of each site in `grid`
    horizon_windows: int
    warmup_windows: int
    ledger_windows: int
    interval_windows: NDArray[np.int64]  # [I+1] first window of each interval of the ledger, then the horizon
    notes: tuple[str, ...]

    def ci(self, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """g/kWh [n, D] at `times_s` [n]."""
        return self.grid.at(times_s)[:, self.site_zone]

    def requests_for(self, batched: bool) -> EngineRequests:
        """The accepted requests as a policy takes them that decides at arrival, or window by window."""
        if not batched:
            return self.engine_requests
        r, dispatch = self.engine_requests, self.scenario.dispatch
        windows = close_windows(r.arrival_s, r.scheduler, dispatch.window_s, dispatch.window_max_requests)
        return replace(r, windows=windows, decision_s=batch_decision_times(self.scenario, windows, r.scheduler))

    def fingerprint(self) -> str:
        """Of what the files behind the scenario held: a trace or grid file that has changed since gives another one."""
        digest = hashlib.sha256()
        r, g = self.requests, self.grid
        believed = self.engine_requests.osl_believed
        for values in (r.arrival_s, r.isl, r.osl, r.scheduler, g.edges_s, g.ci_g_per_kwh, *([] if believed is None else [believed])):
            digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()

    def step_windows(self, observes: bool) -> int:
        """Windows in a step of the engine: as many as fit between the edges of ledger intervals, the horizon and, if observed, polls."""
        fleet, window_s = self.fleet, self.scenario.dispatch.window_s
        if self.fleet.forward_owner and observes:
            return 1  # what a window hands over is placed at its end
        common = math.gcd(self.ledger_windows, *self.interval_windows.tolist())
        if observes:
            common = math.gcd(common, int(fleet.poll_windows), *(int(offset) for offset in fleet.poll_offset))
        most = max(1, math.floor(LONGEST_STEP_S / window_s * (1 + 1e-9)))
        small = [d for d in range(1, math.isqrt(common) + 1) if common % d == 0]
        return max(d for d in (*small, *(common // d for d in small)) if d <= most)

    def sizes(self, step_windows: int, most_steps: int | None = None) -> Sizes:
        """First guesses of the static shapes, of chunks of at most `most_steps`; the simulation grows those that prove too small."""
        window_s = self.scenario.dispatch.window_s
        step_s = step_windows * window_s
        horizon_steps = self.horizon_windows // step_windows
        arrival = self.engine_requests.arrival_s
        busiest = int(np.diff(first_requests(arrival, window_s, step_windows, horizon_steps)).max())
        # Decode steps of a second, and the admissions and prefill steps of an engine that is filled at once.
        burst = min(2 * self.scenario.dispatch.batch_capacity, MOST_BURST)
        passes = round_up(1.15 * step_s / self.scenario.coefficients.decode_time.empty_s + burst + 8, 8)
        rate = len(arrival) / self.scenario.horizon_s
        steps = chunk_steps(passes, self.fleet.n_engines, horizon_steps * 1.05 + 4)
        steps = min(steps, max(8, int(CHUNK_REQUESTS // max(rate * step_s, 1e-9))))
        steps = steps if most_steps is None else min(steps, most_steps)
        requests = min(1.3 * rate * step_s * steps + CHUNK_REQUESTS, 1.0 * len(arrival))
        longest_rtt = float(np.max(self.fleet.rtt_s, initial=0.0))
        return Sizes(
            stay=most_stay(self.engine_requests.osl),
            requests=roomy(max(requests + 256, FEW_REQUESTS), 8),
            step_requests=roomy(max(busiest, FEW_IN_A_STEP), 16),
            transit=round_up(rate * (longest_rtt + step_s) * 1.3 + 64, 64),
            passes=passes,
            steps=steps,
            step_windows=step_windows,
        )


CHUNK_BYTES = 48e6
"""Memory for the table of step ends of one chunk."""
MAX_CHUNK_STEPS = 1024
CHUNK_REQUESTS = 50_000
"""Arrivals of one chunk, which stay in a CPU's cache, and room for as many that are not done by then.

512 engines, 4000 req/s, two cores, round-robin: 2.4 us a request, with twelve times as many 3.3 (greedy: 4.8 and 6.1).
"""

MOST_BURST = 256
FEW_REQUESTS, FEW_IN_A_STEP, FEW_STEPS, FEW_TOKENS = 512, 64, 64, 128
"""Room that costs nothing when it stays empty: with no less, short and light runs of one fleet share their programs."""

MOST_ENGINES = 1_000_000
MOST_CALENDAR = 200_000_000
"""Decode steps ahead, of all engines, by which their requests' last tokens are kept: 1.6 GB."""
SHORTEST_STEP_S = 1e-6
LONGEST_ENGINE_STEP_S = 60.0


def round_up(value: float, multiple: int) -> int:
    """The least whole multiple that is not below `value`."""
    return math.ceil(value / multiple) * multiple


def most_stay(osl: NDArray[Any]) -> int:
    """Decode steps between the admission and the last token of any request, in few sizes."""
    return roomy(max(int(osl.max(initial=1)) - 1, FEW_TOKENS), 1)


def roomy(value: float, parts: int) -> int:
    """Not below `value`, in steps of one of `parts` of a power of two, so that runs of another seed share shapes and so programs."""
    return round_up(value, max(2 ** int(math.log2(max(value, 1.0))) // parts, 16))


def chunk_steps(passes: int, n_engines: int, wanted: float) -> int:
    """Steps of a chunk: as many as wanted, while the table of step ends [steps, passes, engines] stays within its memory."""
    return max(8, min(int(CHUNK_BYTES // (passes * n_engines * 8)), MAX_CHUNK_STEPS, roomy(max(wanted, FEW_STEPS), 2)))


def compile_scenario(scenario: Scenario, base_dir: Path) -> Compiled:
    """Generate the requests, read the grid and build the fleet. Raises `InputError` for what only shows when the parts meet."""
    fleet = build_fleet(scenario)
    requests = generate_requests(
        scenario.workload,
        horizon_s=scenario.horizon_s,
        seed=scenario.seed,
        scheduler_names=[s.name for s in scenario.schedulers],
        scheduler_weights=[s.weight for s in scenario.schedulers],
        base_dir=base_dir,
    )
    # Nothing that fits an engine needs more than 32 bits, and a day of requests should stay small.
    requests = replace(requests, isl=requests.isl.astype(np.int32), osl=requests.osl.astype(np.int32))
    zones = list(dict.fromkeys(site.zone for site in scenario.sites))
    grid = load_grid(scenario.grid, zones=zones, start=scenario.start_time, duration_s=scenario.horizon_s, base_dir=base_dir)
    belief = believed_osl(scenario.osl_knowledge, requests, seed=scenario.seed, base_dir=base_dir)
    accepted = _acceptable(scenario, fleet, requests)
    taken = accepted if len(accepted) < len(requests.arrival_s) else slice(None)  # a slice copies nothing
    site_zone = np.array([grid.zones.index(site.zone) for site in scenario.sites])
    ledger, warmup, horizon = (scenario.windows(s) for s in (scenario.ledger_s, scenario.warmup_s, scenario.horizon_s))
    arrival, scheduler = requests.arrival_s[taken], requests.scheduler[taken]
    if scenario.workload.split == "origin":
        shares = np.bincount(requests.scheduler, minlength=len(scenario.schedulers))
        fleet = replace(fleet, **_peers(scenario, shares))
    return Compiled(
        scenario=scenario,
        fleet=fleet,
        requests=requests,
        accepted=accepted,
        engine_requests=EngineRequests(
            arrival_s=arrival,
            decision_s=decision_times(scenario, arrival, scheduler),
            isl=requests.isl[taken],
            osl=requests.osl[taken],
            scheduler=scheduler,
            osl_believed=None if isinstance(scenario.osl_knowledge, OracleKnowledge) else belief.osl[taken],
        ),
        grid=grid,
        site_zone=site_zone,
        horizon_windows=horizon,
        warmup_windows=warmup,
        ledger_windows=ledger,
        interval_windows=interval_windows(ledger, warmup, horizon, ci_changes(grid, site_zone, scenario.dispatch.window_s, horizon)),
        notes=(
            *requests.notes,
            *doubts(scenario, requests.zero),
            *warmup_note(requests.arrival_s, scenario.counted_from_s),
            *belief.notes,
            f"grid: {grid.signal} carbon intensity ({grid.basis}), {grid.source}",
            *grid.notes,
            *scenario.coefficients.caveats,
        ),
    )


def build_fleet(scenario: Scenario) -> Fleet:
    """Engines, DCs, schedulers and network as arrays; raises `InputError` naming the field."""
    engine, coefficients = scenario.engine, scenario.coefficients
    tp = coefficients.setup.tp
    capacity = engine.kv_tokens(tp)
    if capacity < 2:
        raise InputError(
            f"engine: {tp} GPU(s) of {engine.gpu_memory_gib:g} GiB at utilisation {engine.gpu_memory_utilization:g} "
            f"leave no room for a KV cache beside {engine.weights_gib:g} GiB of weights; "
            "raise gpu_memory_gib or the tensor parallel size of the coefficients"
        )
    if capacity > MOST_KV_TOKENS:
        raise InputError(f"engine.kv_bytes_per_token: {engine.kv_bytes_per_token:g} bytes make a KV cache of over {MOST_KV_TOKENS} tokens")
    _check_steps(engine, coefficients, capacity)
    engines = np.array([site.nodes * _engines_per_node(i, site.gpus_per_node, tp) for i, site in enumerate(scenario.sites)])
    if engines.sum() > MOST_ENGINES:
        raise InputError(f"sites: {engines.sum()} engines are more than a run may hold ({MOST_ENGINES}); lower nodes or gpus_per_node")
    first = np.concatenate([[0], np.cumsum(engines)[:-1]])
    index = {site.name: i for i, site in enumerate(scenario.sites)}
    members = first[:, None] + np.arange(engines.max())
    poll_windows = scenario.windows(scenario.provisioner.poll_s)
    n_dc = len(scenario.sites)
    offset = np.arange(n_dc) * poll_windows // n_dc if scenario.provisioner.mode == "async" else np.zeros(n_dc)
    as_int, as_float = np.int32, np.float64
    own_first = np.array([min(index[name] for name in s.sites) for s in scenario.schedulers])
    order = ((own_first[:, None] + np.arange(n_dc)) % n_dc).astype(as_int)  # from its first own DC on, wrapping round
    return Fleet(
        prefill_time=coefficients.prefill_time_model(),
        decode_time=coefficients.decode_time_model(),
        prefill_energy=coefficients.prefill_energy_model(),
        decode_energy=coefficients.decode_energy_model(),
        valid=_valid_range(coefficients),
        max_num_seqs=on_host(as_int(engine.max_num_seqs)),
        token_budget=on_host(as_float(engine.max_num_batched_tokens)),
        kv_capacity=on_host(as_float(capacity)),
        dc_members=on_host(np.where(np.arange(engines.max()) < engines[:, None], members, engines.sum()).astype(as_int)),
        dc_first_engine=on_host(first.astype(as_int)),
        dc_engines=on_host(engines.astype(as_int)),
        pue=on_host(np.array([site.pue for site in scenario.sites])),
        rtt_s=on_host(_rtt(scenario)),
        own=on_host(np.array([[site.name in s.sites for site in scenario.sites] for s in scenario.schedulers])),
        order=on_host(order),
        place=on_host(np.argsort(order, axis=1).astype(as_int)),
        slo_ttft_s=on_host(as_float(scenario.slo.ttft_s)),
        slo_tpot_s=on_host(as_float(scenario.slo.tpot_s)),
        batch_capacity=on_host(as_float(scenario.dispatch.batch_capacity)),
        window_s=on_host(as_float(scenario.dispatch.window_s)),
        poll_windows=on_host(as_int(poll_windows)),
        poll_offset=on_host(offset.astype(as_int)),
        prefill_first=on_host(np.bool_(engine.batching == "prefill_first")),
        ledger_kept=on_host(np.bool_(scenario.dispatch.ledger != "off")),
        ledger_in_flight=on_host(np.bool_(scenario.dispatch.ledger == "in-flight")),
        **_peers(scenario, [s.weight for s in scenario.schedulers] if scenario.workload.split == "weight" else None),
        peers=on_host(as_int({"unknown": UNKNOWN, "alike": ALIKE, "observed": OBSERVED}[scenario.dispatch.peers])),
        view_aged=on_host(np.bool_(scenario.dispatch.view == "aged")),
        window_max_requests=on_host(as_int(scenario.dispatch.window_max_requests)),
        forward_window=on_host(np.bool_(scenario.dispatch.forwarding != "direct")),
        forward_owner=scenario.dispatch.forwarding == "owner",
        idle_w=on_host(as_float(coefficients.power.idle_w_per_gpu * tp)),
        max_w=on_host(as_float(coefficients.power.max_w_per_gpu * tp)),
        n_engines=int(engines.sum()),
        padded=engine.token_count == "padded",
    )


def _peers(scenario: Scenario, shares: Any) -> dict[str, Array]:
    """What one request of each scheduler stands for [G], by the `shares` [G] of all requests that they are dealt (None: equal ones)."""
    share = np.ones(len(scenario.schedulers)) if shares is None else np.asarray(shares, np.float64)
    alike = np.where(share > 0, share.sum() / np.where(share > 0, share, 1.0), 1.0)
    parts = alike if scenario.dispatch.headroom == "divided" else np.ones_like(alike)
    return {"alike": on_host(alike), "headroom_parts": on_host(parts)}


def _check_steps(engine: Engine, coefficients: Coefficients, capacity: int) -> None:
    """Refuse step times that are negative somewhere within the engine's limits, or that no GPU could have: a run would never end."""
    shortest = {
        "prefill_time": coefficients.shortest_prefill_s(engine.max_num_seqs, engine.max_num_batched_tokens, capacity),
        "decode_time": coefficients.shortest_decode_s(engine.max_num_seqs, capacity),
    }
    for table, seconds in shortest.items():
        if seconds <= 0:
            raise InputError(
                f"engine.coefficients.{table}: a step could last {seconds:.3g} s within max_num_seqs = {engine.max_num_seqs}, "
                f"max_num_batched_tokens = {engine.max_num_batched_tokens} and {capacity} tokens of KV cache; "
                "the fit does not reach that far, lower these or use other coefficients"
            )
        if not SHORTEST_STEP_S <= seconds <= LONGEST_ENGINE_STEP_S:
            raise InputError(
                f"engine.coefficients.{table}: the shortest step lasts {seconds:.3g} s, "
                f"not {SHORTEST_STEP_S:g} to {LONGEST_ENGINE_STEP_S:g} s; coefficients are in seconds, check their unit"
            )


def _valid_range(coefficients: Coefficients) -> ValidRange:
    def limits(table: str, quantity: str) -> Array:
        known = coefficients.valid_range.get(table)
        return on_host(np.array((known and getattr(known, quantity)) or (-np.inf, np.inf)))

    return ValidRange(
        prefill_tokens=limits("prefill_time", "n_tokens"),
        batch=limits("decode_time", "batch"),
        context=limits("decode_time", "mean_ctx"),
    )


def _engines_per_node(site: int, gpus: int, tp: int) -> int:
    if gpus % tp:
        raise InputError(f"sites.{site}.gpus_per_node: {gpus} GPUs cannot be shared out over engines of {tp} GPUs each")
    return gpus // tp


def _rtt(scenario: Scenario) -> NDArray[np.float64]:
    """Seconds [G, D]; 0 to a scheduler's own DCs."""
    table = scenario.network.rtt_ms
    known = {site.region for site in scenario.sites} | {s.region for s in scenario.schedulers}
    for a, row in table.items():
        for b in (a, *row):
            if b not in known:
                raise InputError(
                    f"network.rtt_ms.{a}: no site or scheduler is in region {b!r}; known regions are {', '.join(sorted(known))}"
                )
            back = table.get(b, {}).get(a)
            if b in row and back is not None and back != row[b]:
                raise InputError(f"network.rtt_ms: {a} to {b} is {row[b]:g} ms but {b} to {a} is {back:g} ms; a round trip has one time")
    rtt = np.zeros((len(scenario.schedulers), len(scenario.sites)))
    for g, scheduler in enumerate(scenario.schedulers):
        for d, site in enumerate(scenario.sites):
            if site.name in scheduler.sites:
                continue
            a, b = scheduler.region, site.region
            value = table.get(a, {}).get(b, table.get(b, {}).get(a, 0.0 if a == b else None))
            if value is None:
                raise InputError(
                    f"network.rtt_ms: no round-trip time between {a!r} (scheduler {scheduler.name}) and {b!r} (site {site.name})"
                )
            rtt[g, d] = value / MS_PER_S
    return rtt


def _acceptable(scenario: Scenario, fleet: Fleet, requests: Requests) -> NDArray[np.int64]:
    """Numbers of the requests that can ever be admitted; the others are refused here or rejected, as the scenario says."""
    limits = [(int(fleet.kv_capacity), "the KV cache of an engine")]
    if scenario.engine.max_model_len is not None:
        limits.append((scenario.engine.max_model_len, "engine.max_model_len"))
    limit, what = min(limits)
    total = requests.isl.astype(np.int64) + requests.osl
    too_long = np.flatnonzero(total > limit)
    if len(too_long) and scenario.engine.oversize == "error":
        r = int(too_long[0])
        raise InputError(
            f"workload: request {r} (arrival {requests.arrival_s[r]:g} s, ISL {requests.isl[r]}, OSL {requests.osl[r]}) "
            f"needs {total[r]} tokens, more than the {limit} of {what}, and so do {len(too_long) - 1} others; nothing is truncated: "
            'set engine.oversize = "reject" to count them as rejected'
        )
    accepted = np.flatnonzero(total <= limit)
    if fleet.n_engines * most_stay(requests.osl[accepted]) > MOST_CALENDAR:
        r = int(accepted[np.argmax(requests.osl[accepted])])
        most = 1 << (MOST_CALENDAR // fleet.n_engines).bit_length() - 1  # `most_stay` rounds up to powers of two
        raise InputError(
            f"workload: request {r} (arrival {requests.arrival_s[r]:g} s) has an OSL of {requests.osl[r]}, on {fleet.n_engines} engines "
            f"more than a run may hold ({most} tokens); lower nodes, gpus_per_node or engine.max_model_len"
        )
    return accepted
