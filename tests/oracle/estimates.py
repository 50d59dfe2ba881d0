"""What a scheduler takes the DCs to be, and what it expects of a request there."""

import math
from dataclasses import dataclass, replace

from tests.oracle.equations import e_fix, t_dec, t_pre
from tests.oracle.model import OracleScenario
from tests.oracle.records import Request

# Numbers of requests are whole where their formulas are, as N*(capacity - B) with B in thirds, or 0.1*30: rounding must not change them.
WHOLE = 1e-9


@dataclass(frozen=True)
class Means:
    """Mean lengths of the requests a scheduler has decided so far."""

    isl: float
    isl2: float
    osl: float
    osl2: float


@dataclass(frozen=True)
class Belief:
    """The view of a DC and the scheduler's ledger together: means over the DC's engines."""

    b: float
    q_tokens: float
    q: float  # requests queued, from the view alone
    k: float
    duty: float
    ci: float
    above_mean: float = 0.0  # s: requests by which one of its engines in a hundred exceeds the mean

    def plus(self, requests: list[Request], n_engines: int) -> "Belief":
        """The same with these requests sent there as well; q and s stay."""
        tokens = sum(r.isl for r in requests) / n_engines
        return replace(self, b=self.b + len(requests) / n_engines, q_tokens=self.q_tokens + tokens, k=self.k + tokens)


def n_engines(s: OracleScenario, dc: int) -> int:
    """Engines of a DC."""
    return s.nodes[dc] * s.engines_per_node[dc]


def alike(s: OracleScenario, scheduler: int) -> float:
    """w0: how many requests one of a scheduler's stands for, if all schedulers do alike."""
    return float(len(s.own)) if s.alike is None else s.alike[scheduler]


def most_running(s: OracleScenario, means: Means, limit: int) -> int:
    """m or M: requests of mean lengths that an engine takes at once, and no more than the limit."""
    return max(1, min(limit, math.floor(s.kv_capacity_tokens / (means.isl + means.osl))))


def latency(s: OracleScenario, rtt_s: float, r: Request, at: Belief, means: Means) -> tuple[float, float]:
    """(TTFT, TPOT) to expect of a request at a DC."""
    osl = r.believed_osl
    duty = min(at.duty, 0.95)
    m = most_running(s, means, s.batch_capacity)
    t_res = means.osl * t_dec(s.t_dec, max(at.b, 1.0), at.k) / (1.0 - duty)
    wait = max(0.0, at.b + at.q + at.above_mean + 1.0 - m) * t_res / m
    prefill = t_pre(s.t_pre, r.isl + at.q_tokens, 1.0 + at.q, r.isl**2 + at.q * means.isl2)
    others_prefill = 0.0 if at.q_tokens == 0.0 else t_pre(s.t_pre, at.q_tokens, at.q, at.q * means.isl2) / osl
    tpot = (t_dec(s.t_dec, at.b + 1.0, at.k + r.isl) + others_prefill) / (1.0 - duty)
    return rtt_s + wait + prefill, tpot


def energy_j(s: OracleScenario, r: Request, b: float, q: float) -> float:
    """E: energy of a request at an engine that runs b others and holds q in its queue."""
    return s.e_pre["e_pre0"] / (1.0 + q) + r.believed_osl * e_fix(s.e_dec, b + 1.0) / (b + 1.0) + marginal_energy_j(s, r)


def marginal_energy_j(s: OracleScenario, r: Request) -> float:
    """E_m: the same without the fixed part of the steps."""
    osl = r.believed_osl
    prompt = s.e_pre["e_pre_tok"] * r.isl + s.e_pre["e_pre_sq"] * r.isl**2
    return prompt + osl * (s.e_dec["e_dec_req"] + s.e_dec["e_dec_kv"] * (r.isl + osl / 2.0))


def headroom(s: OracleScenario, scheduler: int, dc: int, at: Belief) -> int:
    """H: requests that a DC may still take from a scheduler."""
    parts = {"whole": 1.0, "divided": alike(s, scheduler)}[s.headroom]
    return math.floor(n_engines(s, dc) * max(0.0, s.batch_capacity - at.b - at.q) / parts + WHOLE)


def waking_j(s: OracleScenario, means: Means) -> float:
    """Energy that one engine spends on a request's steps alone, over what it would have drawn idle."""
    idle_j = s.idle_w_per_gpu * s.tp * t_dec(s.t_dec, 1.0, means.isl + means.osl / 2.0)
    return max(0.0, s.e_pre["e_pre0"] + means.osl * (e_fix(s.e_dec, 1.0) - idle_j))


def unloaded_s_per_token(s: OracleScenario, means: Means) -> float:
    """v of Green-LLM: time by token of a mean request by itself."""
    seconds = t_pre(s.t_pre, means.isl, 1.0, means.isl**2) + means.osl * t_dec(s.t_dec, 1.0, means.isl)
    return seconds / (means.isl + means.osl)
