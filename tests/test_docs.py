"""The pages of docs/ name things that exist."""

import importlib
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
DOTTED = re.compile(r"`((?:cli|data|training|predictions|reports|hub|runs|specs)(?:\.\w+)+)(?:\(|`)")


def named_objects() -> list[str]:
    return sorted({name for page in DOCS.glob("*.md") for name in DOTTED.findall(page.read_text())})


def test_the_pages_name_objects():
    assert len(named_objects()) > 20


@pytest.mark.parametrize("name", named_objects())
def test_a_name_in_the_docs_exists(name):
    module, rest = "livt_hf", name.split(".")
    while rest:
        try:
            importlib.import_module(f"{module}.{rest[0]}")
        except ModuleNotFoundError:
            break
        module, rest = f"{module}.{rest[0]}", rest[1:]
    found = importlib.import_module(module)
    for attribute in rest:
        found = getattr(found, attribute)
