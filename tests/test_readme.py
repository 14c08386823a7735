"""README.md is short, and the trees and tables of the documents are those of the project."""

import json
import re

import pytest
from documents import PAGES, README, ROOT

from livt_hf.recipes.benchmarks import peers
from livt_hf.recipes.paper import tables

RECIPES = ROOT / "recipes"


def test_the_readme_is_short():
    assert len(re.sub(r"<!--.*?-->\n", "", README, flags=re.DOTALL).splitlines()) <= 170


def test_the_tree_names_only_what_exists():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page[page.index("## The tree") :]
    folder, checked = None, []
    for line in re.search(r"^```\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[1].splitlines():
        start = re.match(r"\w+/", line)
        if start:
            folder = ROOT / start[0]
            line = line[start.end() :]
            checked.append(folder)
        together = re.search(r"((?:\w+ )+)\.py", line)  # "pretrain finetune .py"
        checked += [folder / f"{name}.py" for name in together[1].split()] if together else []
        for name in re.findall(r"(?<!\S)[\w*/]+(?:/|\.py|\.yaml)(?=[\s,]|$)", line):
            if "*" in name:
                assert list(folder.glob(name)), name
            else:
                checked.append(ROOT / name if (ROOT / name).exists() else folder / name)
    assert [str(path.relative_to(ROOT)) for path in checked if not path.exists()] == []
    assert ROOT / "livt_hf" / "modeling_livit.py" in checked and RECIPES / "sweep.py" in checked and len(checked) > 30


def test_the_tables_are_those_of_the_result_files():
    with pytest.raises(SystemExit) as stopped:
        tables.main(["--check"])
    assert stopped.value.code == 0


def test_result_files_become_tables_between_the_markers(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results")

    def render(text: str) -> str:
        return tables.render(text, tmp_path / "docs" / "README.md")

    empty = "a\n<!-- results -->\n<!-- /results -->\nb\n<!-- benchmark -->\n<!-- /benchmark -->\nc\n"
    empty += "<!-- benchmark stop; step -->\n<!-- /benchmark -->\n<!-- benchmark stop -->\n<!-- /benchmark -->\n"
    empty += "<!-- scale -->\n<!-- /scale -->\n<!-- results glyphs/losses -->\n<!-- /results -->\n"
    assert render(empty.replace("<!-- results glyphs/losses -->\n<!-- /results -->\n", "")) in empty
    (tmp_path / "results" / "glyphs").mkdir(parents=True)
    row = {"variant": "ce", "seeds": 1, "posterior_accuracy": None, "paper": None}
    row |= {name: 50.0 for name in ("accuracy", "many", "medium", "few", "ece")}
    row |= {f"{name}_deviation": None for name in ("accuracy", "many", "medium", "few", "ece")}
    sweep = {"title": "Losses", "budget": "micro", "command": "livt sweep losses", "rows": [row]}
    (tmp_path / "results" / "glyphs" / "losses.json").write_text(json.dumps(sweep))
    peers = [{"question": "steps", "peer_name": "stock", "ratio": 1.234}, {"question": "growth", "ratio": None}]
    (tmp_path / "results" / "benchmark.json").write_text(json.dumps(peers))
    (tmp_path / "results" / "glyphs" / "tau.json").write_text(json.dumps(sweep | {"title": "Tau"}))
    (tmp_path / "results" / "glyphs" / "tau.png").touch()
    (tmp_path / "results" / "scale.json").write_text(json.dumps({"table": [{"stage": "MGP, ViT-B"}]}))
    full = render(empty)
    assert (full.count("**Losses**"), full.count("**Tau**")) == (2, 1)  # all of them, and the one that is named
    assert '<img src="../results/glyphs/tau.png"' in full and "| MGP, ViT-B |" in full
    assert "**Losses**, glyphs: micro\n\n`livt sweep losses`\n\n| variant | accuracy |" in full
    assert "| ce | 50.0 | 50.0 | 50.0 | 50.0 | 50.0 | - | 1 |" in full
    assert full.count("| steps | stock | 1.23 |") == 2 and "growth" not in full
    assert render(full) == full


def test_no_measured_number_of_a_page_is_typed_by_hand():
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        text = re.sub(r"<!-- (\w+)[^>]*-->\n.*?<!-- /\1 -->", "", text, flags=re.DOTALL)
        assert re.findall(r"\d+\.\d+ %|\d points", text) == [], page


def test_other_tools_are_compared_over_seeds(tmp_path, monkeypatch):
    assert list(tables.PEERS) == list(peers.ENTRIES)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    numbers = {"mean_class_accuracy": 60.0, "nll": 1.0, "ece": 5.0, "seconds": 120.0}
    cells = [("logreg", 0, 40.0), ("trainer", 0, 50.0), ("ours", 0, 60.0), ("ours", 1, 62.0)]
    rows = [numbers | {"dataset": "a", "minutes": 2.0, "entry": e, "seed": s, "accuracy": v} for e, s, v in cells]
    tests = [{"dataset": "a", "minutes": 2.0, "entry": "trainer", "p": 0.04}]
    (tmp_path / "peers.json").write_text(json.dumps({"rows": rows, "tests": tests}))
    short = tables.render("<!-- peers accuracy -->\n<!-- /peers -->\n", tmp_path)
    assert "| trained by | a, 2 minutes |" in short
    assert "| livt train | 61.0 ± 1.4 |\n| Trainer, cross-entropy | 50.0 \\* |" in short
    full = tables.render("<!-- peers -->\n<!-- /peers -->\n", tmp_path)
    assert "| a | 2 | livt train | 2 | 61.0 ± 1.4 | 60.0 ± 0.0 | 1.00 ± 0.00 | 5.0 ± 0.0 | 120 ± 0 | - |" in full
    # Not in the order of names.
    assert "| 0.040 |\n| a | 2 | LogisticRegression on frozen features | 1 | 40.0 |" in full
    assert "| a | 2 | Trainer, cross-entropy | 1 | 50.0 | 60.0 | 1.00 | 5.0 | 120 | 0.040 |" in full
