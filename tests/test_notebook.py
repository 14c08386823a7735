"""recipes/tour.ipynb runs from top to bottom without a network, and what it claims on the way is so."""

import ast
import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "recipes" / "tour.ipynb"


def test_the_notebook_is_stored_without_outputs():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell for cell in cells if cell["outputs"] or cell["execution_count"]] == []


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_says(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(NOTEBOOK, 4)
    nbclient.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output["data"] for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    assert sum("image/png" in data for data in shown) == 3
    said = [ast.literal_eval(data["text/plain"]) for data in shown if data["text/plain"].startswith(("{", "("))]
    balanced, plain, elsewhere, (before, after), top = said
    assert percent(balanced["few"]) > percent(plain["few"])
    assert percent(elsewhere["as frequent as they are there"]) > percent(elsewhere["argmax of the logits"])
    assert percent(after["few"]) > percent(before["few"]) and percent(after["accuracy"]) > percent(before["accuracy"])
    assert len(top) == 3
    assert list(tmp_path.iterdir()) == []  # its files go to a temporary folder


def percent(text: str) -> float:
    return float(text.removesuffix(" %"))
