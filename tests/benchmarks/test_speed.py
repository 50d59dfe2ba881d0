"""Speed of the engine, opt-in: `pytest -m benchmark -s tests/benchmarks`. Prints figures; asserts only that the work was done.

Every figure is a median of runs after a warm-up, compilation apart, with its ratio to the event-driven oracle in the same process,
which tells a slow machine from a slow engine.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxserve.cases import build_case, first_sizes
from jaxserve.engine.simulate import Simulation
from jaxserve.policies.registry import resolve_policies
from jaxserve.scenario.compile import Compiled, compile_scenario
from jaxserve.scenario.load import load_scenario
from tests.oracle.random_scenarios import random_scenario
from tests.oracle.simulator import simulate

pytestmark = pytest.mark.benchmark
REPEATS = 5
POLICIES = {"round_robin": {"kind": "round_robin"}, "greedy": {"kind": "greedy", "alpha": 0.5}}


def compiled(*overrides: str) -> Compiled:
    """The study's Llama scenario with overrides."""
    scenario, base = load_scenario("study-llama", list(overrides))
    return compile_scenario(scenario, base)


def run_once(case: Compiled, policy: dict) -> float:
    """Seconds of one run through the engine, from requests on the host to times on the host."""
    whole = build_case(case, resolve_policies([policy])[0])
    step_windows = case.step_windows(whole.policy.observes)
    sizes = first_sizes(case, whole, step_windows)
    began = time.perf_counter()
    simulation = Simulation(
        [whole], window_s=case.scenario.dispatch.window_s, horizon_steps=case.horizon_windows // step_windows, sizes=sizes
    )
    finished = 0
    while not simulation.done:
        (advance,) = simulation.advance()
        finished += len(advance.finished.engine)
    wall_s = time.perf_counter() - began
    assert finished == len(case.engine_requests.arrival_s)
    return wall_s


def oracle_rate() -> float:
    """Requests a wall second of the event-driven reference on its own small worlds."""
    worlds = [random_scenario(seed) for seed in range(30)]
    began = time.perf_counter()
    for world in worlds:
        simulate(world)
    return sum(len(world.arrival_s) for world in worlds) / (time.perf_counter() - began)


def report(name: str, **figures: float) -> None:
    """One JSON line."""
    print(json.dumps({"benchmark": name} | {key: float(f"{value:.4g}") for key, value in figures.items()}))


@pytest.mark.parametrize("name", POLICIES)
def test_throughput(name: str) -> None:
    """512 engines, 4000 req/s, 200 s of Llama-3.1-8B."""
    case = compiled("workload.rate_req_per_s=4000.0", "horizon_s=200.0")
    first_s = run_once(case, POLICIES[name])
    walls = [run_once(case, POLICIES[name]) for _ in range(REPEATS)]
    rate = len(case.engine_requests.arrival_s) / statistics.median(walls)
    report(
        f"throughput {name}",
        requests_per_wall_s=rate,
        ratio_to_oracle=rate / oracle_rate(),
        first_run_extra_s=first_s - statistics.median(walls),
        slowest_s=max(walls),
    )


@pytest.mark.parametrize("gpus_per_node", [1, 8, 64])
@pytest.mark.parametrize("name", POLICIES)
def test_engines(name: str, gpus_per_node: int) -> None:
    """Time a request from 64 to 4096 engines at equal load (4000 req/s for 512)."""
    engines = 64 * gpus_per_node
    case = compiled(f"sites.*.gpus_per_node={gpus_per_node}", f"workload.rate_req_per_s={engines * 4000 / 512}", "horizon_s=60.0")
    run_once(case, POLICIES[name])
    wall = statistics.median(run_once(case, POLICIES[name]) for _ in range(3))
    report(f"engines {name}", engines=engines, us_per_request=1e6 * wall / len(case.engine_requests.arrival_s))


@pytest.mark.parametrize("horizon_s", [60.0, 600.0, 3600.0])
def test_horizon(horizon_s: float) -> None:
    """Time a request from 60 s to 3600 s of horizon, 512 engines at 4000 req/s."""
    case = compiled("workload.rate_req_per_s=4000.0", f"horizon_s={horizon_s}")
    run_once(compiled("workload.rate_req_per_s=4000.0", "horizon_s=60.0"), POLICIES["round_robin"])
    wall = statistics.median(run_once(case, POLICIES["round_robin"]) for _ in range(3 if horizon_s < 1000 else 1))
    report("horizon", horizon_s=horizon_s, us_per_request=1e6 * wall / len(case.engine_requests.arrival_s))


def test_second_process_compiles_nothing(tmp_path: Path) -> None:
    """Compilations in a first and in a second process that share a cache."""
    code = (
        "import jax, jaxserve, sys\n"
        "from jax import monitoring\n"
        "misses = [0]\n"
        "missed = '/jax/compilation_cache/cache_misses'\n"
        "monitoring.register_event_listener(lambda e, **_: misses.__setitem__(0, misses[0] + (e == missed)))\n"
        "jaxserve.run('two-region', overrides=['horizon_s=10.0'], out=sys.argv[1])\n"
        "print(misses[0])"
    )
    counts = []
    for out in ("first", "second"):
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / out)], env=environment, capture_output=True, text=True, check=True
        )
        counts.append(int(done.stdout.split()[-1]))
        report(f"cache, {out} process", cache_misses=counts[-1], wall_s=time.perf_counter() - began)
    assert counts[1] == 0


def test_memory_of_a_day(tmp_path: Path) -> None:
    """24 h at 100 req/s: peak resident memory of the process."""
    code = (
        "import jaxserve, resource, sys, time\n"
        "t = time.perf_counter()\n"
        "sets = ['horizon_s=86400.0', 'ledger_s=60.0', 'workload.rate_req_per_s=100.0', 'sites.*.nodes=1', 'sites.*.gpus_per_node=2',\n"
        "        'policies=[{kind=\"round_robin\"}]']\n"
        "r = jaxserve.run('study-llama', overrides=sets, out=sys.argv[1])\n"
        "m = r.runs['round_robin'].summary['metrics']\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, m['requests'], time.perf_counter() - t)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "day")], capture_output=True, text=True, check=True)
    resident_mib, requests, wall_s = map(float, done.stdout.split()[-3:])
    report("a day at 100 req/s", resident_mib=resident_mib, requests=requests, wall_s=wall_s)
    assert requests > 8e6
