"""One inference engine: iterations of retire, admit, prefill, decode."""

from collections import deque

from tests.oracle.equations import drawn_j, e_dec, e_pre, t_dec, t_pre
from tests.oracle.model import OracleScenario
from tests.oracle.records import Request, Step


class Engine:
    """Keeps its queue, its batch and a record of every step it ran."""

    def __init__(self, scenario: OracleScenario):
        if scenario.batching not in ("study", "prefill_first"):
            raise ValueError(f"unknown batching {scenario.batching!r}")
        self.s = scenario
        self.waiting: deque[Request] = deque()  # in order of (dc_arrival_s, id)
        self.batch: list[Request] = []  # admitted and not retired
        self.steps: list[Step] = []  # in order of time, without overlaps
        self.wake_planned = False  # an iteration is already on the event queue

    def iterate(self, t: float) -> float | None:
        """Run the iteration that starts at t, all its steps at once; return its end, or None if there was nothing to run.

        Looking ahead is sound because nothing that happens during an iteration changes it.
        """
        steps_before = len(self.steps)
        self.batch = [r for r in self.batch if not r.finish_s <= t]
        admitted = self._admit(t)
        clock = self._prefill(admitted, t)
        if self.s.batching == "study" or not admitted:
            clock = self._decode(clock)
        return clock if len(self.steps) > steps_before else None

    def _admit(self, t: float) -> list[Request]:
        s = self.s
        admitted: list[Request] = []
        reserved = sum(r.isl + r.osl for r in self.batch)
        prompt_tokens, longest = 0, 0
        while self.waiting:
            r = self.waiting[0]
            # The engine is told of an arrival when it happens, so all that wait have dc_arrival_s <= t.
            if len(self.batch) >= s.max_num_seqs or reserved + r.isl + r.osl > s.kv_capacity_tokens:
                break
            spent = (len(admitted) + 1) * max(longest, r.isl) if s.token_count == "padded" else prompt_tokens + r.isl
            if s.batching == "prefill_first" and admitted and spent > s.max_num_batched_tokens:
                break
            self.waiting.popleft()
            r.admit_s = t
            reserved += r.isl + r.osl
            prompt_tokens += r.isl
            longest = max(longest, r.isl)
            self.batch.append(r)
            admitted.append(r)
        return admitted

    def _prefill(self, admitted: list[Request], clock: float) -> float:
        c = self.s
        padded = c.token_count == "padded"
        for pieces in (pack_padded if padded else pack_prompts)(admitted, c.max_num_batched_tokens):
            longest = max(new for _, _, new in pieces)
            computed = [longest if padded else new for _, _, new in pieces]
            n = sum(computed)
            s2 = sum((cached + new) ** 2 - cached**2 for (_, cached, _), new in zip(pieces, computed, strict=True))
            end = clock + t_pre(c.t_pre, n, len(pieces), s2)
            self._record(clock, end, "prefill", e_pre(c.e_pre, n, s2), tuple(r.id for r, _, _ in pieces))
            for r, cached, new in pieces:
                r.pieces.append((end, new))
                if cached + new == r.isl:
                    self._give_token(r, end)
            clock = end
        return clock

    def _decode(self, clock: float) -> float:
        c = self.s
        running = [r for r in self.batch if len(r.token_s) < r.osl]
        if not running:
            return clock
        b = len(running)
        k = sum(r.isl + len(r.token_s) for r in running)
        end = clock + t_dec(c.t_dec, b, k)
        self._record(clock, end, "decode", e_dec(c.e_dec, b, k), tuple(r.id for r in running))
        for r in running:
            self._give_token(r, end)
        return end

    def _record(self, start: float, end: float, kind: str, asked_j: float, requests: tuple[int, ...]) -> None:
        idle_w, max_w = self.s.idle_w_per_gpu * self.s.tp, self.s.max_w_per_gpu * self.s.tp
        above = asked_j > max_w * (end - start) * (1.0 + 1e-9)
        self.steps.append(Step(start, end, kind, drawn_j(asked_j, end - start, idle_w, max_w), requests, above))

    @staticmethod
    def _give_token(r: Request, end: float) -> None:
        r.token_s.append(end)
        if len(r.token_s) == r.osl:
            r.finish_s = end


def pack_prompts(admitted: list[Request], budget: int) -> list[list[tuple[Request, int, int]]]:
    """Prefill steps as lists of (request, tokens cached before, new tokens), each step of at most `budget` new tokens."""
    steps: list[list[tuple[Request, int, int]]] = []
    room = 0
    for r in admitted:
        cached = 0
        while cached < r.isl:
            if room == 0:
                steps.append([])
                room = budget
            new = min(room, r.isl - cached)
            steps[-1].append((r, cached, new))
            cached += new
            room -= new
    return steps


def pack_padded(admitted: list[Request], budget: int) -> list[list[tuple[Request, int, int]]]:
    """The same where a step spends its number of pieces times the longest of them."""
    pieces = [(r, cached, min(budget, r.isl - cached)) for r in admitted for cached in range(0, r.isl, budget)]
    steps: list[list[tuple[Request, int, int]]] = []
    for piece in pieces:
        if steps and (len(steps[-1]) + 1) * max(new for _, _, new in [*steps[-1], piece]) <= budget:
            steps[-1].append(piece)
        else:
            steps.append([piece])
    return steps
