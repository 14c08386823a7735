"""Imports point one way, and a command imports only what it needs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "livt_hf"
ABOVE = ("cli", "recipes", "demo")
STAGES = (*ABOVE, "hub", "reports", "training", "predictions")
# Part of the package: what it must not import, at any level of indentation.
FORBIDDEN = {
    "": ("recipes",),
    "specs.py": (*STAGES, "data", "modeling", "runs", "metrics", "long_tail"),
    "long_tail/losses.py": (*STAGES, "data", "metrics", "runs", "modeling", "configuration"),
    "long_tail/priors.py": (*STAGES, "data", "metrics", "runs", "modeling", "configuration"),
    "long_tail": (*STAGES, "data", "runs", "configuration_livit"),
    "modeling_livit.py": (*STAGES, "data", "runs"),
    "modeling_livit_mae.py": (*STAGES, "data", "runs"),
    "precision.py": (*STAGES, "data", "modeling", "runs", "metrics", "long_tail", "classifiers"),
    "processors.py": (*STAGES, "data", "modeling", "runs"),
    "pretrained.py": (*STAGES, "data", "modeling", "runs"),
    "data": (*STAGES, "modeling", "configuration", "long_tail"),
    "metrics": (*ABOVE, "hub", "reports", "training", "data", "modeling", "runs"),
    "predictions": (*ABOVE, "hub", "reports", "training"),
    "training": (*ABOVE, "hub", "reports"),
    "training/loop.py": (*STAGES[:5], "data", "metrics", "modeling", "long_tail"),
    "training/checkpoints.py": (*STAGES[:5], "data", "metrics", "modeling", "long_tail"),
    "training/optim.py": (*STAGES[:5], "data", "metrics", "modeling", "long_tail"),
    "training/device.py": (*STAGES[:5], "data", "metrics", "modeling", "long_tail"),
    "reports": (*ABOVE, "hub", "training"),
    "hub": ABOVE,
    "demo": ("cli", "recipes"),
    "runs.py": (*ABOVE, "reports", "predictions"),
}


def imported(path: Path) -> set[str]:
    """Return the modules of ours that a file imports, as paths below the package such as `data.loading`."""
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
        if name.split(".")[0].startswith(FORBIDDEN[part])
        and name.split(".")[:2] != part.removesuffix(".py").split("/")
    ]
    assert sorted(wrong) == []


def loaded_modules(code: str) -> list[str]:
    """Return the modules that are loaded after a program has run."""
    code += "\nimport sys\nprint(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return answer.stdout.split()


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import livt_hf", {"torch", "transformers", "datasets", "numpy"}),
        ("import livt_hf.data.subsample", {"torch", "transformers", "datasets"}),
        ("import livt_hf.cli.training_settings, livt_hf.cli.resume, livt_hf.cli.main", {"torch", "transformers"}),
    ],
)
def test_importing_costs_nothing_that_is_not_used(statement, absent):
    assert not absent & set(loaded_modules(statement))


def test_predict_needs_a_model_its_processor_decoding_the_record_and_rules():
    own = [
        name
        for name in loaded_modules("import livt_hf.cli.main, livt_hf.recipes.predict")
        if name.startswith("livt_hf.")
    ]
    above = ("livt_hf.training", "livt_hf.reports", "livt_hf.hub", "livt_hf.demo", "livt_hf.predictions.evaluate")
    assert [name for name in own if name.startswith(above)] == []
    assert len(own) <= 48, sorted(own)


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
