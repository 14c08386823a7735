"""The Gradio app: its pages, and a server on this machine that tells nobody else."""

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import gradio as gr
import numpy as np
from datasets import DatasetDict
from PIL import Image
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from livt_hf.classifiers import is_pretraining
from livt_hf.data import load_dataset
from livt_hf.data.decoding import read_images
from livt_hf.data.labels import labels_of
from livt_hf.demo import serving, tabs
from livt_hf.demo.serving import ServedClassifier, ServedPretraining
from livt_hf.demo.tabs import Shown, private_folder
from livt_hf.errors import LiVTError
from livt_hf.hub.names import shorten_path
from livt_hf.predictions.predict import find_images
from livt_hf.predictions.record import FOLDER
from livt_hf.reports.mistakes import Mistakes, find_newest_predictions, load_predictions
from livt_hf.run_data import data_spec_from_run
from livt_hf.runs import Run

EXAMPLES = 12
# The browser itself refuses to load or send anything elsewhere. Gradio needs its inline parts and evaluated functions.
POLICY = "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'"
THEME = gr.themes.Default(
    primary_hue="blue", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
)


def show(
    path: str,
    images: str | None = None,
    report: str | None = None,
    device: str | None = None,
    private: bool = True,
) -> Shown:
    """A model with everything that is found for it; what is missing is said in its notes.

    For a public link, where not everybody may see `private` things, it comes without images of its dataset and
    without the folder it lies in.
    """
    served = (ServedPretraining if is_pretraining(path) else ServedClassifier)(path, device)
    shown = Shown(served, path if private or not Path(path).exists() else shorten_path(str(Path(path).resolve())))
    try:
        shown.data = data_of_run(path) if private else None
    except LiVTError as error:
        shown.notes.append(f"No images of its dataset are shown: {error}")
    if not private and images is None:
        shown.notes.append("No images of its dataset go to a public link; choose examples with --images FOLDER.")
    if images is not None:
        shown.examples = _copied_examples(images)
    elif shown.data is not None:
        shown.examples = _written_examples(shown.data)
    if isinstance(shown.served, ServedClassifier):
        _add_predictions(shown, path, report)
    return shown


def data_of_run(path: str) -> DatasetDict:
    """The data a finished run was trained on; any other model is refused, and a stream, which may not fit."""
    run = Run(Path(path))
    if not run.finished:
        raise LiVTError(f"{path} is not the folder of a finished run; show other images with --images FOLDER.")
    if run.arguments.get("streaming"):
        raise LiVTError(f"{path} was trained on a stream, which is not read as a whole; show images with --images.")
    return load_dataset(data_spec_from_run(run))


def _add_predictions(shown: Shown, path: str, report: str | None) -> None:
    try:
        folder = find_newest_predictions(Path(path)) if report is None else Path(report, FOLDER)
        predictions = load_predictions(folder, shown.served.names)
    except LiVTError as error:
        shown.notes.append(f"There is no tab Errors: {error}")
        return
    info = predictions.info
    shown.predictions = {rule.label: Mistakes.of(predictions, rule) for rule in info.rules}
    if shown.data is not None and not shown.predictions[info.default_rule.label].belong_to(shown.data):
        shown.data = None
        shown.notes.append(f"The tab Errors shows no images: {folder} is about other data than the run's.")


def _copied_examples(folder: str) -> list[Path]:
    """Image files of a folder. Copies, so that nothing else of the folder is served."""
    found = [path for path in find_images([folder]) if path.is_file()][:EXAMPLES]
    if not found:
        raise LiVTError(f"there is no image in {folder}; name a folder with images, or leave --images out.")
    return [Path(shutil.copy(path, private_folder())) for path in found]


def _written_examples(data: DatasetDict) -> list[Path]:
    """Test images from head to tail, as files: one of each of some classes, spread evenly over the frequencies."""
    train, test = labels_of(data["train"]), labels_of(data["test"])
    classes = np.unique(test.values)
    counts = np.bincount(train.values, minlength=classes.max() + 1)[classes]
    places = np.linspace(0, len(classes) - 1, min(EXAMPLES, len(classes))).astype(int)
    chosen = classes[np.argsort(-counts, kind="stable")][places]
    rows = test.images[[np.flatnonzero(test.values == label)[0] for label in chosen]].tolist()
    folder = private_folder()
    paths = [folder / f"test-{row}.png" for row in rows]
    for path, image in zip(paths, read_images(data["test"], rows), strict=True):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return paths


def build(models: Sequence[Shown]) -> gr.Blocks:
    """The pages: one tab per model where there are several, and inside it one per question."""
    with gr.Blocks(title="livt demo", analytics_enabled=False) as blocks:
        if len(models) == 1:
            _page(models[0])
        else:
            with gr.Tabs():
                for shown in models:
                    with gr.Tab(shown.name):
                        _page(shown)
    return blocks


def _page(shown: Shown) -> None:
    gr.Markdown(f"## {shown.name}")
    if shown.served.caveat:
        gr.Markdown(shown.served.caveat)
    with gr.Tabs():
        if isinstance(shown.served, ServedPretraining):
            with gr.Tab("Reconstruction"):
                tabs.reconstruction_tab(shown)
            return
        with gr.Tab("Try"):
            tried = tabs.TryTab(shown)
        if shown.served.classes is not None and not shown.served.classes.several:
            with gr.Tab("Your world"):
                tabs.world_tab(shown, tried)
        if shown.predictions is not None:
            with gr.Tab("Errors"):
                tabs.ErrorsTab(shown)


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """What is uploaded or made goes to one folder of this process, which is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="livt-demo-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        yield


def check_port(port: int) -> None:
    """Refuse a port that is taken, before a model is loaded."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was left a moment ago is free
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", error)
            raise LiVTError(f"port {port} cannot be used ({why}); choose another --port.") from error


def start(models: Sequence[Shown], port: int | None = None, share: bool = False, browser: bool = False) -> gr.Blocks:
    """Serve in the background. Without a port the first free one from 7860 on is taken."""
    blocks = build(models)
    blocks.launch(
        server_port=port,
        share=share,
        inbrowser=browser,
        quiet=True,
        prevent_thread_lock=True,
        _frontend=False,  # no check that a page comes within 3 seconds: on a busy machine it may not
        show_error=True,
        ssr_mode=False,
        run_history=False,
        footer_links=[],
        theme=THEME,
        css=serving.STYLE + tabs.STYLE,
        app_kwargs={"middleware": [Middleware(same_origin_only)]},
    )
    return blocks


def serve(blocks: gr.Blocks) -> None:
    """Until Ctrl-C."""
    print(f"Open {blocks.share_url or blocks.local_url} in a browser. Ctrl-C ends the demo.", flush=True)
    blocks.block_thread()


def same_origin_only(app: ASGIApp) -> ASGIApp:
    """Sends the policy with every answer of an app."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"content-security-policy", POLICY.encode())]
            await send(message)

        await app(scope, receive, with_policy)

    return answer
