"""README.md is short, and the trees and tables of the documents are those of the project."""

import json
import re

import pytest
from documents import README, ROOT

from livt_hf.recipes.ablations import REPORTED
from livt_hf.recipes.paper import tables

RECIPES = ROOT / "recipes"


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 180


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


def test_some_variants_of_several_sweeps_become_one_short_table(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    row = {"seeds": 3, "posterior_accuracy": 60.0, "paper": None} | {name: 50.0 for name in REPORTED}
    row |= {f"{name}_deviation": 0.5 for name in REPORTED}
    for name in ("losses", "head"):
        rows = [row | {"variant": variant} for variant in ("ce", "bce", "bal_bce")]
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    marker = "<!-- short Birds, from scratch: losses ce bal_bce; Birds, a head: head ce -->\n"
    table = tables.render(f"{marker}<!-- /short -->\n", tmp_path).splitlines()[3:-1]
    assert table == [
        "| Birds, from scratch | ce | 50.0 ± 0.5 | 50.0 | 50.0 | 50.0 | 60.0 |",
        "|  | bal_bce | 50.0 ± 0.5 | 50.0 | 50.0 | 50.0 | 60.0 |",
        "| Birds, a head | ce | 50.0 ± 0.5 | 50.0 | 50.0 | 50.0 | 60.0 |",
    ]
