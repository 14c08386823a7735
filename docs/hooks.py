"""Pages of the documentation that are made from the code and from documents elsewhere in the repository."""

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from livt_hf.cli.options import GROUPS, read_examples
from livt_hf.cli.settings import COMMANDS, settings_class
from livt_hf.results import Results
from livt_hf.specs import REQUIRED, Option

ROOT = Path(__file__).parents[1]
INCLUDED = {  # documents outside of docs/ that are pages
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "recipes/configs/README.md": "research/configs.md",
    "recipes/results/README.md": "results/tables.md",
}
SHIM = "https://unpkg.com/iframe-worker/shim"  # of the offline plugin
SOURCES = {page: source for source, page in INCLUDED.items()}
LINK = re.compile(r'(?P<start>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)|(?P<image><img src=")(?P<file>[^"]+)')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here, and the images outside of docs/ that pages show."""
    generated = {"reference/cli.md": render_commands(), "reference/results.md": render_results()}
    for page, lines in generated.items():
        files.append(File.generated(config, page, content="\n".join(lines)))
    for source, page in INCLUDED.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for folder in ("recipes/results", "model_cards"):
        for image in sorted((ROOT / folder).rglob("*.png")):
            files.append(File.generated(config, image.relative_to(ROOT).as_posix(), abs_src_path=str(image)))
    return files


def on_page_markdown(markdown: str, page: Page, **_) -> str:
    """Point links that leave docs/ at the page or image they have here; other files of the repository are named."""
    here = page.file.src_uri
    folder = Path(SOURCES.get(here, f"docs/{here}")).parent

    def resolve(match: re.Match) -> str:
        target, _, anchor = (match["target"] or match["file"]).partition("#")
        if not target or ":" in target:
            return match[0]
        path = os.path.normpath(folder / target)
        if path.startswith("docs/"):
            found = path.removeprefix("docs/")
        elif path in INCLUDED or path.endswith(".png"):
            found = INCLUDED.get(path, path)
        else:
            return f"{match['text']} (`{path}`)" if match["text"].strip("`") not in path else f"`{path}`"
        found = os.path.relpath(found, Path(here).parent) + (f"#{anchor}" if anchor else "")
        if match["image"]:  # pages are not in folders of their own, so images in HTML are where Markdown has them
            return f"{match['image']}{found}"
        return f"{match['start']}[{match['text']}]({found})"

    return LINK.sub(resolve, markdown)


def on_post_template(output_content: str, **_) -> str:
    """Load nothing from elsewhere."""
    return output_content.replace(SHIM, "scripts/worker.js")


def on_post_page(output: str, page: Page, **_) -> str:
    """Load nothing from elsewhere."""
    return output.replace(SHIM, os.path.relpath("scripts/worker.js", Path(page.file.dest_uri).parent))


def render_commands() -> Iterator[str]:
    """Yield the lines of the reference of the command line."""
    yield "# Command line\n"
    yield "`livt COMMAND --help` prints the common options, here in bold; `--help_all` all of them. Hyphens and"
    yield "underscores are alike. `--config FILE` reads any options from a YAML file.\n"
    for name in COMMANDS:
        cls = settings_class(name)
        yield f"## livt {name}\n\n{cls.__doc__}\n"
        if examples := read_examples(cls.stage):
            yield "```bash\n" + "\n".join(examples) + "\n```\n"
        options = list(cls.options().values())
        own = [one for one in options if one.part is None]
        parts = {title: [one for one in options if one.part and find_title(one) == title] for title in GROUPS}
        for title, group in {"Options": own, **parts}.items():
            if group:
                yield f'??? info "{title}"\n'
                yield "    | option | default | meaning |\n    | --- | --- | --- |"
                yield from (f"    {render_option(one)}" for one in group)
                yield ""


def find_title(declared: Option) -> str:
    """Return the group of an option."""
    return declared.facts["group"] or (declared.spec.__doc__ or "").partition(":")[0]


def render_option(declared: Option) -> str:
    """Return the row of an option."""
    default = "required" if declared.default is REQUIRED else f"`{declared.default}`"
    name = f"`--{declared.name}`"
    meaning = declared.facts["help"].replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")
    if declared.choices:
        meaning += f" ({', '.join(declared.choices)})"
    name = f"**{name}**" if declared.facts["common"] else name
    return f"| {name} | {'' if default == '`None`' else default} | {meaning} |"


def render_results() -> Iterator[str]:
    """Yield the lines of the reference of results.json."""
    yield f"# results.json\n\n{Results.__doc__}\n"
    yield "| field | type |\n| --- | --- |"
    for field in dataclasses.fields(Results):
        kind = str(field.type).replace("<class '", "").replace("'>", "").replace("|", "\\|")
        yield f"| `{field.name}` | {kind} |"
