"""recipes/tour.ipynb runs from top to bottom without a network, and what it claims on the way is so."""

import ast
import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "recipes" / "tour.ipynb"


def test_the_stored_outputs_are_small_and_show_what_the_notebook_says():
    assert NOTEBOOK.stat().st_size < 1_000_000
    check_outputs(json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"])


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_says(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(NOTEBOOK, 4)
    nbclient.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    check_outputs(notebook.cells)
    assert list(tmp_path.iterdir()) == []  # its files go to a temporary folder


def check_outputs(cells: list[dict]) -> None:
    """Check that all cells ran, in order, and that their numbers are as the text around them says."""
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    shown = [output["data"] for cell in code for output in cell["outputs"] if "data" in output]
    assert sum("image/png" in data for data in shown) == 3
    texts = ["".join(data["text/plain"]) for data in shown]
    values = [ast.literal_eval(text) for text in texts if text.startswith(("{", "("))]
    balanced, plain, deployment, (before, after), top = values
    assert percent(balanced["few"]) > percent(plain["few"])
    assert percent(deployment["posterior, deployment prior"]) > percent(deployment["largest logit"])
    assert percent(after["few"]) > percent(before["few"]) and percent(after["accuracy"]) > percent(before["accuracy"])
    assert len(top) == 3


def percent(text: str) -> float:
    return float(text.removesuffix(" %"))
