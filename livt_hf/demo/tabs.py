"""The tabs of the demo: their components, and the functions that they call."""

import functools
import html
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gradio as gr
import numpy as np
from datasets import DatasetDict
from gradio.utils import get_upload_folder

from livt_hf.data.decoding import read_images
from livt_hf.demo import classes, serving
from livt_hf.demo.serving import ServedClassifier, ServedPretraining
from livt_hf.errors import LiVTError
from livt_hf.reports import mistakes, reliability_diagram
from livt_hf.reports.page import escape_markdown

MAX_ERRORS = 24  # misclassified images shown of a class
NEIGHBOURS = 6
AT_ONCE = {"show_progress": "hidden", "queue": False}
STYLE = """
.image-frame img { width: 100%; height: 100%; object-fit: contain; }
#tilt .tab-like-container, #tilt .min_value, #tilt .max_value { display: none; }
.legend { display: flex; gap: .5rem; font-size: .85rem; padding: 0 .5rem; margin-top: -.75rem; }
.legend span { flex: 1; text-align: center; }
.legend span:first-child { text-align: left; }
.legend span:last-child { text-align: right; }
.grid-wrap.fixed-height { min-height: 0; }
.grid-wrap .grid-container {
    grid-template-columns: repeat(auto-fill, minmax(4rem, 1fr)); grid-template-rows: none; grid-auto-rows: auto;
}
#wrong .grid-container, #near .grid-container { grid-template-columns: repeat(auto-fill, minmax(7rem, 1fr)); }
.grid-wrap .caption-label { left: 0; right: 0; bottom: 0; max-width: 100%; white-space: normal; }
"""


@dataclass
class DemoModel:
    """A model with what is shown beside it: example files, the dataset of its run, and its mistakes by rule."""

    served: ServedClassifier | ServedPretraining
    name: str
    examples: list[Path] = field(default_factory=list)
    data: DatasetDict | None = None
    predictions: dict[str, mistakes.Mistakes] | None = None
    notes: list[str] = field(default_factory=list)  # what is missing, and why


def show_errors(handler: Callable) -> Callable:
    """Show a `LiVTError` of a handler as a message in the browser; any other error keeps its traceback."""

    @functools.wraps(handler)
    def wrapper(*arguments):
        try:
            return handler(*arguments)
        except LiVTError as error:
            raise gr.Error(html.escape(str(error)), print_exception=False) from error

    return wrapper


def private_folder() -> Path:
    """Create a folder among the files that Gradio may serve."""
    Path(get_upload_folder()).mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(dir=get_upload_folder()))


def write_download(text: str, name: str) -> str:
    """Write a file to be downloaded under this name, and return its path."""
    path = private_folder() / name
    path.write_text(text, encoding="utf-8")
    return str(path)


class ImageChoice:
    """Components to upload an image file or pick an example, with a preview.

    Gradio's own component opens the file, and raises its own error for one that is not an image.
    """

    def __init__(self, demo: DemoModel):
        self.path = gr.State(None)
        self.file = gr.File(label="Image", file_types=["image"], height=120, elem_id="image")
        self.preview = gr.Image(interactive=False, show_label=False, height=240, buttons=[], elem_id="preview")
        self.files = list(map(str, demo.examples))
        self.examples = gr.Gallery(
            self.files, show_label=False, height="auto", allow_preview=False, interactive=False,
            visible=bool(self.files), buttons=[], elem_id="examples",
        )  # fmt: skip

    def then(self, handler: Callable[..., tuple], inputs: list, outputs: list) -> None:
        """Call `handler(path, *inputs)` when the image changes, and show the image unless that raises an error."""

        @show_errors
        def dropped(path, *values):
            return path, path, *handler(path, *values)

        @show_errors
        def picked(event: gr.SelectData, *values):
            return dropped(self.files[event.index], *values)

        outputs, quiet = [self.path, self.preview, *outputs], {"show_progress": "hidden"}
        self.file.upload(dropped, [self.file, *inputs], outputs, **quiet)
        self.file.clear(dropped, [self.file, *inputs], outputs, **quiet)
        self.examples.select(picked, inputs, outputs, **quiet)


class TryTab:
    """One image under each decision rule, with a deployment prior that a slider or a table sets."""

    def __init__(self, demo: DemoModel):
        self.served, self.classes = demo.served, demo.served.classes
        self.logits = gr.State(None)
        self.frequencies = gr.State(None if self.classes is None else self.classes.tilt(1))
        with gr.Row():
            with gr.Column(scale=2, min_width=260):
                image = ImageChoice(demo)
            with gr.Column(scale=5, min_width=320):
                has_slider = self.classes is not None and not self.classes.multi_label
                slider = self._build_slider() if has_slider else None
                self.bars = gr.HTML(self.served.panels(None, None), elem_id="bars")
        image.then(self.see, [self.frequencies], [self.logits, self.bars])
        if self.classes is not None:
            self._build_table()
        if slider is not None:
            inputs = [slider, self.search, self.logits]
            slider.input(self.tilt, inputs, self.outputs, trigger_mode="always_last", **AT_ONCE)

    def _build_slider(self) -> gr.Slider:
        label = "Deployment prior: how frequent are the classes where the model is used?"
        slider = gr.Slider(-1, 1, value=-1, step=0.02, label=label, buttons=[], elem_id="tilt")
        marks = ("as in training", "uniform", "reversed: rare classes are frequent")
        gr.HTML(f'<div class="legend">{"".join(f"<span>{mark}</span>" for mark in marks)}</div>', padding=False)
        return slider

    def _build_table(self) -> None:
        known = self.classes
        with gr.Accordion("Frequency of each class", open=len(known.names) <= 20):
            gr.Markdown(
                "Edit a frequency: a number of images, in any unit; the shares follow. `--prior` takes the "
                f"saved file. The table shows up to {classes.ROWS} classes; search for others."
            )
            self.search = gr.Textbox("", label="Search a class", elem_id="search")
            self.table = gr.Dataframe(
                known.rows(known.tilt(1)), headers=list(classes.COLUMNS), interactive=True, type="array",
                datatype=["number", "str", "number", "number", "number"], static_columns=[0, 1, 2, 4],
                column_count=5, max_height=460, elem_id="frequencies", buttons=[],
            )  # fmt: skip
            with gr.Row():
                kinds = [".json", ".yaml", ".yml"]
                opened = gr.File(label="Open a JSON or YAML file", file_types=kinds, height=160, elem_id="open")
                with gr.Column():
                    save = gr.Button("Save as prior.json", elem_id="save")
                    saved = gr.File(label="Deployment prior as a file", interactive=False, height=100, elem_id="saved")
        self.outputs = [self.frequencies, self.bars, self.table]
        state = [self.frequencies, self.search, self.logits]
        self.table.input(self.edit, [self.table, *state], self.outputs, show_progress="hidden")
        self.search.input(known.rows, [self.frequencies, self.search], self.table, **AT_ONCE)
        opened.upload(self.open, [opened, self.search, self.logits], self.outputs)
        save.click(
            lambda frequencies: write_download(known.to_json(frequencies), "prior.json"), self.frequencies, saved
        )

    def see(self, path, frequencies):
        logits = None if path is None else self.served.logits(path)
        return logits, self.served.panels(logits, frequencies)

    def show(self, frequencies: np.ndarray, search: str, logits) -> tuple:
        """Return the values of `outputs` under these frequencies."""
        return frequencies, self.served.panels(logits, frequencies), self.classes.rows(frequencies, search)

    def tilt(self, position, search, logits):
        return self.show(self.classes.tilt(-position), search, logits)

    def edit(self, rows, frequencies, search, logits):
        try:
            frequencies = self.classes.apply_edits(frequencies, rows)
        except LiVTError as error:
            gr.Warning(html.escape(str(error)))  # a warning, so that the table returns to its previous state
        return self.show(frequencies, search, logits)

    @show_errors
    def open(self, path, search, logits):
        return self.show(self.classes.read_file(path), search, logits)


def deployment_tab(demo: DemoModel, tried: TryTab) -> None:
    """Estimate the prior of unlabelled images, and show which predictions it changes."""
    gr.Markdown(
        "Upload unlabelled images from the deployment. Their class frequencies (the deployment prior) are estimated "
        "from the images alone."
    )
    with gr.Row():
        files = gr.File(file_count="multiple", label="Images", height=140, elem_id="deployment-files")
        folder = gr.File(file_count="directory", label="A folder", height=140, elem_id="deployment-folder")
    summary = gr.Markdown(elem_id="deployment-words")
    estimated = gr.State(None)
    plain = {"interactive": False, "max_height": 300, "buttons": [], "wrap": True}
    # Narrow columns, so that a phone shows more than the first.
    prior, changes = (
        gr.Dataframe(headers=list(headers), column_widths=widths, elem_id=name, **plain)
        for name, headers, widths in (
            ("prior", serving.PRIOR_COLUMNS, [150, 110, 100, 130]),
            ("changes", serving.CHANGE_COLUMNS, [180, 150, 110, 150, 110, 90]),
        )
    )
    with gr.Row():
        downloads = gr.File(
            label="Downloads", interactive=False, file_count="multiple", elem_id="deployment-downloads"
        )
        use = gr.Button("Use this prior in the tab Try", elem_id="use")

    @show_errors
    def estimate(paths):
        found = serving.read_unlabelled(demo.served, paths or [])
        usable, files = found.estimate.reliable, [write_download(found.to_csv(), "predictions.csv")]
        if usable:
            files.append(write_download(demo.served.classes.to_json(found.frequencies), "prior.json"))
        rows = found.prior_rows(), found.change_rows()[: classes.ROWS]
        return found.frequencies if usable else None, found.describe(), *rows, files

    @show_errors
    def use_estimate(frequencies, search, logits):
        if frequencies is None:
            raise LiVTError("there is no reliable estimate to use; upload other images first.")
        return tried.show(frequencies, search, logits)

    for source in (files, folder):
        source.upload(estimate, source, [estimated, summary, prior, changes, downloads])
    use.click(use_estimate, [estimated, tried.search, tried.logits], tried.outputs)


def make_gallery(data: DatasetDict, split: str, rows: Sequence[int], captions: list[str]) -> list[tuple]:
    """Return images of a split with their captions."""
    pictures = (picture.permute(1, 2, 0).numpy() for picture in read_images(data[split], rows))
    return list(zip(pictures, captions, strict=True))


class ErrorsTab:
    """A table of classes; of the selected one, its misclassified images and similar training images."""

    def __init__(self, demo: DemoModel):
        self.demo, self.served = demo, demo.served
        rules = list(demo.predictions)
        rule = gr.Dropdown(rules, value=rules[0], label="Decision rule", visible=len(rules) > 1)
        gr.Markdown("Select a class to see its misclassified images; click a column to sort by it.")
        rows = self.rows(rules[0])
        table = gr.Dataframe(
            rows, headers=list(mistakes.COLUMNS), interactive=False, max_height=400, show_search="search",
            elem_id="errors", buttons=[],
        )  # fmt: skip
        chosen = gr.State(None)  # decision rule and class
        summary = gr.Markdown(elem_id="errors-words")
        plain = {"show_label": False, "buttons": []}
        with gr.Row():
            with gr.Column(scale=3, min_width=320, visible=demo.data is not None):
                gr.Markdown("Misclassified images with their predicted class, the most confident first. Select one.")
                wrong = gr.Gallery(height="auto", allow_preview=False, elem_id="wrong", **plain)
                gr.Markdown(
                    "The most similar training images of its class and of the predicted class (cosine similarity)."
                )
                near = gr.Gallery(height="auto", allow_preview=False, elem_id="near", **plain)
            reliability = gr.Image(interactive=False, scale=2, min_width=320, elem_id="reliability", **plain)
        rule.change(self.rows, rule, table)
        table.select(self.choose, [rule, table], [chosen, summary, wrong, reliability, near])
        wrong.select(self.neighbours, chosen, near)

    def rows(self, rule: str) -> list[list]:
        known = self.served.classes
        counts = None if known is None else known.counts
        return self.demo.predictions[rule].class_rows(self.served.names, counts)

    def choose(self, rule, _table, event: gr.SelectData):
        label = int(event.row_value[0])
        chosen = rule, label
        predictions, names, data = self.demo.predictions[rule], self.served.names, self.demo.data
        others = ", ".join(f"{names[other]} ({images})" for other, images in predictions.predicted_as(label)[:8])
        text = f"Misclassified as {others}." if others else "Every test image is classified correctly."
        summary = f"### {escape_markdown(names[label])}\n\n{escape_markdown(text)}"
        picture = private_folder() / "reliability.png"
        diagram = reliability_diagram(predictions.bins(label), picture, f"Images of {names[label]}")
        if data is None:
            return chosen, summary + "\n\nIts images are not available.", [], diagram, []
        rows = predictions.errors_of(label)[:MAX_ERRORS]
        captions = [names[predictions.predicted[row]] for row in rows]
        wrong = make_gallery(data, predictions.split, predictions.index[rows], captions)
        return chosen, summary, wrong, diagram, self._near(*chosen, 0) if len(rows) else []

    def neighbours(self, chosen, event: gr.SelectData):
        return self._near(*chosen, event.index)

    def _near(self, rule: str, label: int, number: int) -> list[tuple]:
        """Return the training images of the true and the predicted class most similar to a misclassified image."""
        predictions, data, names = self.demo.predictions[rule], self.demo.data, self.served.names
        row = predictions.errors_of(label)[number]
        [image] = read_images(data[predictions.split], [predictions.index[row]])
        classes = [label, int(predictions.predicted[row])]
        found = self.served.nearest(data["train"], image, classes, NEIGHBOURS)
        captions = [f"{cosine:.2f} {names[label]}" for _, label, cosine in found]
        return make_gallery(data, "train", [index for index, _, _ in found], captions)


def reconstruction_tab(demo: DemoModel) -> None:
    """Mask patches of an image and let a pretrained model reconstruct them."""
    with gr.Row():
        with gr.Column(scale=2, min_width=260):
            image = ImageChoice(demo)
            default = demo.served.model.config.mask_ratio
            ratio = gr.Slider(0.1, 0.95, default, step=0.05, label="Mask ratio", buttons=[], elem_id="ratio")
            seed = gr.Number(0, label="Seed of the mask", precision=0, elem_id="seed")
        with gr.Column(scale=5, min_width=320), gr.Row(elem_id="pictures"):
            titles = ("Processed image", "Visible patches", "Reconstruction")
            pictures = [gr.Image(label=title, interactive=False, buttons=[], min_width=200) for title in titles]

    def reconstruct(path, ratio, seed):
        return tuple([None] * 3 if path is None else demo.served.reconstruct(path, ratio, seed))

    image.then(reconstruct, [ratio, seed], pictures)
    for part in (ratio, seed):
        part.change(show_errors(reconstruct), [image.path, ratio, seed], pictures, show_progress="hidden")
