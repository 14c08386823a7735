"""Try a model in the browser, on this machine.

    livt demo RUN                                # a run, a checkpoint or a model of the Hub; several are tabs
    livt demo RUN --images FOLDER --port 8000    # own images as examples
    livt demo PRETRAINING_RUN                    # hide patches of an image and see the reconstruction

Nothing is sent anywhere: no analytics, and no public link unless `--share` asks for one, which shows no images of the
dataset. Files are served only from a temporary folder that is deleted at the end. Needs `pip install livt-hf[demo]`.
"""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from livt_hf.cli.console import run_command
from livt_hf.cli.inherit import inherit_plugin
from livt_hf.cli.settings import DemoSettings
from livt_hf.errors import LiVTError
from livt_hf.plugins import load_plugin


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
            load_plugin(inherit_plugin(Path(path)))
    with private_files():
        chosen = {"images": settings.images, "report": settings.report, "device": settings.device}
        models = [show(path, **chosen, private=not settings.share) for path in settings.models]
        for note in (note for shown in models for note in shown.notes):
            print(note)
        serve(start(models, settings.port, settings.share, settings.browser))


if __name__ == "__main__":
    run_command(main)
