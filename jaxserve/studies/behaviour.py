"""How the policies behave at the study's loads: `jaxserve behaviour --out DIR` measures all, and writes tables beside what was published.

Every figure is a mean over seeds with its 95 % interval (Student's t); differences are paired by seed.
"""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from jaxserve.analysis.directions import judge
from jaxserve.studies.comparison import with_shares
from jaxserve.studies.expected import load_directions, setting_directions
from jaxserve.studies.measure import Progress, measure
from jaxserve.studies.report import write
from jaxserve.studies.setups import MODELS, groups


def behave(
    models: Sequence[str], seeds: Sequence[int], horizon_s: float, *, out: Path, jobs: int, command: str, progress: Progress
) -> pd.DataFrame:
    """Measure `models` in `jobs` processes and write the tables to `out`; returns a row a run.

    `runs.csv` in `out` grows as runs are done; called again, what stands there is not run again. Raises `InputError`.
    """
    runs = measure(groups(models, seeds, horizon_s), out, jobs, progress)
    write(runs, judged(with_shares(runs)), out, command, horizon_s)
    return runs


def judged(runs: pd.DataFrame) -> pd.DataFrame:
    """A row for each direction that is expected: whether it holds."""
    verdicts = []
    for name, mine in runs.groupby("model", sort=False):
        by_load = mine[mine["part"] == "load"].assign(setting=lambda f: f["load"])
        around = mine[(mine["part"] == "setting") & (mine["load"] == "moderate")]
        policies = [str(policy) for policy in by_load["policy"].unique()]
        verdicts += [judge(pd.DataFrame(by_load), d) for d in load_directions(str(name), list(MODELS[str(name)].loads), policies)]
        verdicts += [judge(pd.DataFrame(around), d) for d in setting_directions(str(name))]
    return pd.DataFrame(verdicts)
