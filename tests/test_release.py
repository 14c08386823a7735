"""What is released: one version, every package, and in the wheel nothing that only a checkout needs."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from livt_hf.version import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_changelog_begins_with_the_version_of_the_package():
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == __version__


def test_the_wheel_has_every_package_of_the_library_and_the_commands_without_research():
    library = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "livt_hf").rglob("*.py")}
    assert {*library, "livt_hf.recipes"} == set(PROJECT["tool"]["setuptools"]["packages"])


def test_no_shipped_module_imports_research():
    shipped = [*(ROOT / "livt_hf").rglob("*.py"), *(ROOT / "recipes").glob("*.py")]
    pattern = re.compile(r"^\s*(from|import) livt_hf\.recipes\.(paper|benchmarks)\b", re.MULTILINE)
    assert [path.name for path in shipped if pattern.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git says what belongs to the project")
def test_the_sdist_holds_the_project_and_the_wheel_what_runs(tmp_path):
    pytest.importorskip("build")
    pytest.importorskip("twine")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT], check=True, capture_output=True
    )
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *tmp_path.iterdir()], check=True)
    name = f"livt_hf-{__version__}"
    with tarfile.open(tmp_path / f"{name}.tar.gz") as archive:
        source = {member.name.removeprefix(f"{name}/") for member in archive if member.isfile()}
    assert {path for path in tracked if not path.startswith((".git", ".pre-commit"))} <= source
    with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl") as archive:
        wheel = {path for path in archive.namelist() if not path.startswith(f"{name}.dist-info")}
    run = [path for path in tracked if path.startswith("livt_hf/")]
    run += [f"livt_hf/{path}" for path in tracked if re.match(r"recipes/([^/]+\.py|configs/.*\.yaml)$", path)]
    assert wheel == set(run)
