"""Who may import whom: mathematics nothing of ours, data no model, training no command, the package no recipe."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "livt_hf"
ABOVE = ("commands", "recipes", "hub", "reports", "evaluation")
# Part of the package: what it must not import, at any level of indentation.
FORBIDDEN = {
    "long_tail/losses.py": (*ABOVE, "data", "training", "metrics", "settings", "runs", "modeling", "configuration"),
    "long_tail/priors.py": (*ABOVE, "data", "training", "metrics", "settings", "runs", "modeling", "configuration"),
    "long_tail": (*ABOVE, "data", "training", "settings", "runs", "configuration_livit"),
    "modeling_livit.py": (*ABOVE, "data", "training", "settings", "runs"),
    "modeling_livit_mae.py": (*ABOVE, "data", "training", "settings", "runs"),
    "data": (*ABOVE, "training", "modeling", "configuration", "long_tail", "runs"),
    "metrics": (*ABOVE, "data", "training", "modeling", "settings", "runs"),
    "training": ("commands", "recipes", "hub", "reports"),
    "training/loop.py": (*ABOVE, "data", "metrics", "modeling", "long_tail"),
    "training/checkpoints.py": (*ABOVE, "data", "metrics", "modeling", "long_tail"),
    "training/optim.py": (*ABOVE, "data", "metrics", "modeling", "long_tail"),
    "training/device.py": (*ABOVE, "data", "metrics", "modeling", "long_tail"),
    "processors.py": (*ABOVE, "data", "training", "modeling", "settings", "runs"),
    "pretrained.py": (*ABOVE, "data", "training", "modeling", "settings", "runs"),
    "reports": ("hub", "recipes", "training"),
    "options.py": (*ABOVE, "data", "training", "modeling", "runs", "metrics", "settings"),
    "": ("recipes",),
}


def imported(path: Path) -> set[str]:
    """Modules of ours that a file imports, as paths below the package such as `data.loading`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("livt_hf.") for name in names if name.startswith("livt_hf.")}


@pytest.mark.parametrize("part", FORBIDDEN)
def test_a_part_imports_nothing_from_above_it(part):
    place = PACKAGE / part
    files = [place] if place.suffix == ".py" else sorted(place.rglob("*.py"))
    assert files
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in files
        for name in imported(path)
        if name.startswith(FORBIDDEN[part])
    ]
    assert sorted(wrong) == []


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import livt_hf", ("torch", "transformers", "datasets", "numpy")),
        ("import livt_hf.data.subsample", ("torch", "transformers", "datasets")),
        ("import livt_hf.settings, livt_hf.runs, livt_hf.recipes.cli", ("torch", "transformers", "datasets")),
    ],
)
def test_importing_costs_nothing_that_is_not_used(statement, absent):
    code = f"{statement}\nimport sys\nprint([name for name in {absent!r} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_the_auto_classes_know_a_livit_once_a_name_is_used_or_if_they_were_there_first(tmp_path):
    code = """
from livt_hf import LiViTConfig, LiViTForImageClassification
config = LiViTConfig.preset("micro", class_counts=[3, 2])
LiViTForImageClassification(config).save_pretrained(FOLDER)
"""
    load = """
from transformers import AutoConfig, AutoModelForImageClassification
print(type(AutoConfig.from_pretrained(FOLDER)).__name__)
print(type(AutoModelForImageClassification.from_pretrained(FOLDER)).__name__)
"""
    folder = f"FOLDER = {str(tmp_path)!r}\n"
    subprocess.run([sys.executable, "-c", folder + code], check=True)
    for first in ("from livt_hf import balance", "import transformers.models.auto.modeling_auto, livt_hf"):
        program = f"{first}\n{load}"
        answer = subprocess.run([sys.executable, "-c", folder + program], capture_output=True, text=True, check=True)
        assert answer.stdout.split() == ["LiViTConfig", "LiViTForImageClassification"]
