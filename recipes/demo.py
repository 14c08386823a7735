"""Try a model in the browser, on this machine.

    livt demo RUN                                # a run, a checkpoint or a model of the Hub; several are tabs
    livt demo RUN --images FOLDER --port 8000    # own images as examples
    livt demo PRETRAINING_RUN                    # hide patches of an image and see the reconstruction

Nothing is sent anywhere: no analytics, no public link unless `--share` asks for one, and files are served only from a
temporary folder that is deleted at the end. Needs `pip install livt-hf[demo]`.
"""

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from livt_hf.commands import run_command
from livt_hf.errors import LiVTError
from livt_hf.evaluation.models import lent_plugin
from livt_hf.plugins import load_plugin
from livt_hf.settings import REQUIRED, CommandSettings, option


@dataclass(kw_only=True)
class DemoSettings(CommandSettings):
    """Try models in the browser."""

    stage: ClassVar[str] = "demo"

    models: list[str] = option(REQUIRED, "run folders, checkpoints or Hub ids", positional="+", place=True)
    images: str | None = option(None, "folder of example images; default: images of the run's test split", place=True)
    report: str | None = option(
        None, "report folder with predictions.parquet; default: the newest one in the run's folder", place=True
    )
    port: int | None = option(None, "port on this machine; default: the first free one from 7860 on", at_least=1)
    share: bool = option(False, "also make a public link, through Gradio's servers")
    browser: bool = option(True, "open the page in the browser")
    device: str | None = option(None, "cuda, mps or cpu; default: the first of them that is there")

    def __post_init__(self):
        super().__post_init__()
        if self.report is not None and len(self.models) > 1:
            raise LiVTError(f"--report {self.report} belongs to one model; name only that one.")


def main(argv: Sequence[str] | None = None) -> None:
    settings = DemoSettings.parse(argv)
    if importlib.util.find_spec("gradio") is None:
        raise LiVTError("the demo needs Gradio; install it with: pip install 'livt-hf[demo]'")
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    from livt_hf.demo.app import check_port, private_files, serve, show, start

    if settings.port is not None:
        check_port(settings.port)
    for path in settings.models:
        if settings.plugin is None:
            load_plugin(lent_plugin(Path(path)))
    with private_files():
        models = [show(path, settings.images, settings.report, settings.device) for path in settings.models]
        for note in (note for shown in models for note in shown.notes):
            print(note)
        serve(start(models, settings.port, settings.share, settings.browser))


if __name__ == "__main__":
    run_command(main)
