"""The Gradio app: its pages, and a server on this machine that contacts no other."""

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
from livt_hf.data.decoding import read_images
from livt_hf.data.labels import labels_of
from livt_hf.demo import serving, tabs
from livt_hf.demo.serving import ServedClassifier, ServedPretraining
from livt_hf.demo.tabs import DemoModel, private_folder
from livt_hf.errors import LiVTError
from livt_hf.hub.names import shorten_path
from livt_hf.predictions.predict import find_images
from livt_hf.predictions.record import FOLDER
from livt_hf.reports.mistakes import Mistakes, find_newest_predictions, load_predictions

EXAMPLES = 12
# The browser refuses to load or send anything elsewhere. Gradio needs inline parts and evaluated functions.
POLICY = "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'"
THEME = gr.themes.Default(
    primary_hue="blue", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
)


def show(
    path: str,
    images: str | None = None,
    report: str | None = None,
    device: str | None = None,
    *,
    data: DatasetDict | None = None,
    private: bool = True,
) -> DemoModel:
    """Load a model with what can be shown beside it; its notes name what was not found.

    Args:
        path: run folder, checkpoint or Hub id.
        images: folder of example images; default: test images of `data`.
        report: folder of a report with a prediction record; default: the newest record of the run.
        device: "cuda", "mps" or "cpu"; default: the first that is available.
        data: the dataset of the run, for examples and for the Errors tab.
        private: show the path of the model; False for a public link.

    Returns:
        What `start` takes.
    """
    served = (ServedPretraining if is_pretraining(path) else ServedClassifier)(path, device)
    is_shown = private or not Path(path).exists()
    demo = DemoModel(served, path if is_shown else shorten_path(str(Path(path).resolve())), data=data)
    if images is not None:
        demo.examples = _copy_examples(images)
    elif data is not None:
        demo.examples = _write_examples(data)
    if isinstance(served, ServedClassifier):
        _add_predictions(demo, path, report)
    return demo


def _add_predictions(demo: DemoModel, path: str, report: str | None) -> None:
    """Add the mistakes of the run's prediction record by decision rule, the default rule first."""
    try:
        folder = find_newest_predictions(Path(path)) if report is None else Path(report, FOLDER)
        predictions = load_predictions(folder, demo.served.names)
    except LiVTError as error:
        demo.notes.append(f"There is no tab Errors: {error}")
        return
    rules = list(dict.fromkeys([predictions.info.default_rule, *predictions.info.rules]))
    demo.predictions = {rule.label: Mistakes.of(predictions, rule) for rule in rules}
    if demo.data is not None and not demo.predictions[rules[0].label].belong_to(demo.data):
        demo.data = None
        demo.notes.append(f"The tab Errors shows no images: {folder} was computed on other data.")


def _copy_examples(folder: str) -> list[Path]:
    """Copy image files of a folder, so that nothing else of it is served."""
    found = [path for path in find_images([folder]) if path.is_file()][:EXAMPLES]
    if not found:
        raise LiVTError(f"there is no image in {folder}; name a folder with images, or leave --images out.", "images")
    return [Path(shutil.copy(path, private_folder())) for path in found]


def _write_examples(data: DatasetDict) -> list[Path]:
    """Write test images as files: one of each of some classes, spread evenly from head to tail."""
    train, test = labels_of(data["train"]), labels_of(data["test"])
    classes = np.unique(test.values)
    counts = np.bincount(train.values, minlength=classes.max() + 1)[classes]
    ranks = np.linspace(0, len(classes) - 1, min(EXAMPLES, len(classes))).astype(int)
    chosen = classes[np.argsort(-counts, kind="stable")][ranks]
    rows = test.images[[np.flatnonzero(test.values == label)[0] for label in chosen]].tolist()
    folder = private_folder()
    paths = [folder / f"test-{row}.png" for row in rows]
    for path, image in zip(paths, read_images(data["test"], rows), strict=True):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return paths


def build(models: Sequence[DemoModel]) -> gr.Blocks:
    """Build the pages: one tab per model where there are several."""
    with gr.Blocks(title="livt demo", analytics_enabled=False) as blocks:
        if len(models) == 1:
            _build_page(models[0])
        else:
            with gr.Tabs():
                for demo in models:
                    with gr.Tab(demo.name):
                        _build_page(demo)
    return blocks


def _build_page(demo: DemoModel) -> None:
    gr.Markdown(f"## {demo.name}")
    if demo.served.warning:
        gr.Markdown(demo.served.warning)
    with gr.Tabs():
        if isinstance(demo.served, ServedPretraining):
            with gr.Tab("Reconstruction"):
                tabs.reconstruction_tab(demo)
            return
        with gr.Tab("Try"):
            tried = tabs.TryTab(demo)
        if demo.served.classes is not None and not demo.served.classes.multi_label:
            with gr.Tab("Deployment prior"):
                tabs.deployment_tab(demo, tried)
        if demo.predictions is not None:
            with gr.Tab("Errors"):
                tabs.ErrorsTab(demo)


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Keep uploaded and written files in one folder of this process, and delete it at the end."""
    with tempfile.TemporaryDirectory(prefix="livt-demo-") as folder:
        os.environ["GRADIO_TEMP_DIR"] = folder
        yield


def check_port(port: int) -> None:
    """Raise an error if a port is taken, before a model is loaded."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was left a moment ago is free
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", error)
            raise LiVTError(f"port {port} cannot be used ({reason}); choose another --port.", "port") from error


def start(
    models: Sequence[DemoModel], port: int | None = None, share: bool = False, browser: bool = False
) -> gr.Blocks:
    """Serve in the background, on the first free port from 7860 on where none is given."""
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
    """Serve until Ctrl-C."""
    print(f"Open {blocks.share_url or blocks.local_url} in a browser. Ctrl-C ends the demo.", flush=True)
    blocks.block_thread()


def same_origin_only(app: ASGIApp) -> ASGIApp:
    """Add the content security policy to every response of an app."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"content-security-policy", POLICY.encode())]
            await send(message)

        await app(scope, receive, with_policy)

    return answer
