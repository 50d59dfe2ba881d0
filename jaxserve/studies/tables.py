"""Rows of runs picked out, and tables in Markdown."""

from collections.abc import Sequence

import numpy as np
import pandas as pd


def where(frame: pd.DataFrame, **equal: str) -> pd.DataFrame:
    """The rows in which columns have these values."""
    mask = np.ones(len(frame), bool)
    for column, value in equal.items():
        mask &= (frame[column] == value).to_numpy()
    return pd.DataFrame(frame.loc[mask])


def names(frame: pd.DataFrame, column: str) -> list[str]:
    """Values of a column in order of first appearance."""
    return [str(name) for name in dict.fromkeys(frame[column].tolist())]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int] = (0,)) -> str:
    """A table whose columns of numbers stand to the right, those of `text` to the left."""
    lines = [header, ["---" if i in text else "---:" for i in range(len(header))], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
