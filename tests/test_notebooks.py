"""The notebooks run from top to bottom, and are stored without what they print: outputs would go stale and make every change unreadable."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def test_there_is_one() -> None:
    assert "00_quickstart.ipynb" in [path.name for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_without_outputs(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None


@pytest.mark.slow  # a process of its own for every notebook, which compiles for itself
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "stream" and output.name == "stderr"], "nothing is said on stderr"
    assert not list(tmp_path.iterdir())
    if path.stem == "00_quickstart":
        shown = [output.data for output in outputs if "data" in output]
        assert sum("image/png" in data for data in shown) == 2
        assert any("greedy-0.5" in data["text/plain"] and "saving_vs_baseline" in data["text/plain"] for data in shown)
