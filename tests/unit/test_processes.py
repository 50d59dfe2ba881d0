"""Work spread over processes ends with the process that spread it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxserve.studies.processes import spread


def work(folder: str) -> None:
    """Tell which process this is, and go on for a minute."""
    Path(folder, str(os.getpid())).touch()
    time.sleep(60.0)


def runs(pid: int) -> bool:
    """Whether the process is there, and not only waits to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
def test_a_parent_killed_outright_takes_its_children_along(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, __file__, str(tmp_path)], start_new_session=True)
    try:
        until = time.monotonic() + 120.0
        while len(children := [int(path.name) for path in tmp_path.iterdir()]) < 2:
            assert parent.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        assert all(map(runs, children))
        parent.send_signal(signal.SIGKILL)
        until = time.monotonic() + 30.0
        while any(map(runs, children)) and time.monotonic() < until:
            time.sleep(0.1)
        assert not any(map(runs, children))
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()


if __name__ == "__main__":
    list(spread(work, [sys.argv[1]] * 2, 2))
