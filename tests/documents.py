"""The README and the pages of docs/: their commands, code and links."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GUIDES = DOCS / "guides"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
COMMAND_PAGES = [*PAGES, ROOT / "recipes" / "README.md"]
LINKED_PAGES = [
    *COMMAND_PAGES,
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "AGENTS.md")),
]
LINKED_PAGES += [ROOT / "recipes" / folder / "README.md" for folder in ("configs", "results")]
GENERATED = {DOCS / "reference" / name for name in ("cli.md", "results.md")}  # by docs/hooks.py


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def inline_code(page: str) -> list[str]:
    prose = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


def shell_commands(page: str) -> list[str]:
    """Return every command of the shell blocks and of the inline code."""
    lines = [line for text in blocks(page, "bash") for line in text.splitlines()]
    commands = [part.strip() for line in lines for part in re.sub(r"(^|\s)#.*", "", line).split("&&") if part.strip()]
    commands = [command.replace(".venv/bin/", "") for command in commands]
    parts = [part for code in inline_code(page) for part in code.split("; ")]
    inline = [part for part in parts if re.match(r"(livt|python|accelerate launch) \S", part)]
    return list(dict.fromkeys(commands + [code for code in inline if " | " not in code]))


def python_block(page: str, heading: str | None = None, number: int = 0) -> str:
    """Return a block of Python, of a section where a heading is given."""
    section = page if heading is None else page[page.index(f"\n## {heading}\n") :]
    return blocks(section, "python")[number]
