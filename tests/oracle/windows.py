"""The requests of a scheduler between two decisions of a batch policy."""

from tests.oracle.records import Request
from tests.oracle.timeline import window_of


class Gathering:
    """Requests of one scheduler that wait for their window to close."""

    def __init__(self, window_s: float, most: int):
        self.window_s = window_s
        self.most = most
        self.waiting: list[Request] = []

    def add(self, r: Request) -> float | None:
        """Let a request wait; return when its window ends, or None if it has filled the batch, which closes at once."""
        self.waiting.append(r)
        return None if len(self.waiting) == self.most else (window_of(r.arrival_s, self.window_s) + 1) * self.window_s

    def close(self) -> list[Request]:
        """The batch, which may be empty: a window's end comes also where the last request has filled one."""
        batch, self.waiting = self.waiting, []
        return batch
