"""Try a model in the browser, on this machine.

    livt demo RUN                                # a run, a checkpoint or a model of the Hub; several are tabs
    livt demo RUN --images FOLDER --port 8000    # own images as examples
    livt demo PRETRAINING_RUN                    # mask patches of an image and see the reconstruction

Nothing is sent anywhere: no analytics, and no public link without `--share`, which shows no images of the dataset.
Files are served only from a temporary folder that is deleted at the end. Needs `pip install livt-hf[demo]`.
"""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from datasets import DatasetDict

from livt_hf.cli.console import run_command
from livt_hf.cli.inherit import inherit_plugin
from livt_hf.cli.settings import DemoSettings
from livt_hf.data import load_dataset
from livt_hf.errors import LiVTError
from livt_hf.plugins import load_plugin
from livt_hf.run_data import data_spec_from_run
from livt_hf.runs import Run


def main(argv: Sequence[str] | None = None) -> None:
    settings = DemoSettings.parse(argv)
    if importlib.util.find_spec("gradio") is None:
        raise LiVTError("the demo needs Gradio; install it with: pip install 'livt-hf[demo]'")
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    from livt_hf.demo.app import check_port, private_files, serve, show, start

    if settings.port is not None:
        check_port(settings.port)
    for path in settings.models if settings.plugin is None else ():
        load_plugin(inherit_plugin(Path(path)))
    with private_files():
        models = []
        for path in settings.models:
            data = load_run_data(path, settings.images is not None, settings.share)
            options = {"data": data, "private": not settings.share}
            models.append(show(path, settings.images, settings.report, settings.device, **options))
        for note in (note for model in models for note in model.notes):
            print(note)
        serve(start(models, settings.port, settings.share, settings.browser))


def load_run_data(path: str, has_examples: bool, is_public: bool) -> DatasetDict | None:
    """Load the dataset of a finished run; print why where there is none, or where it must not be shown."""
    run, hint = Run(Path(path)), "" if has_examples else "; choose examples with --images FOLDER"
    if is_public:
        reason = "" if has_examples else f"No images of the dataset are shown on a public link{hint}."
    elif not run.finished:
        reason = f"No images of the dataset are shown: {path} is not the folder of a finished run{hint}."
    elif run.arguments.get("streaming"):
        reason = f"No images of the dataset are shown: {path} was trained on a stream{hint}."
    else:
        try:
            return load_dataset(data_spec_from_run(run))
        except LiVTError as error:
            reason = f"No images of the dataset are shown: {error}"
    print(reason, end="\n" if reason else "")
    return None


if __name__ == "__main__":
    run_command(main)
