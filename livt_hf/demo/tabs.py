"""The tabs of the demo: each draws its parts and ties them to the functions behind it."""

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
from livt_hf.demo import classes, unlabelled
from livt_hf.demo.serving import ServedClassifier, ServedPretraining
from livt_hf.errors import LiVTError
from livt_hf.reports import mistakes, reliability_diagram
from livt_hf.reports.page import escape_markdown

SHOWN = 24  # wrong images of a class
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
class Shown:
    """A model of the demo, and what can be shown beside it: image files to pick, its data, saved predictions."""

    served: ServedClassifier | ServedPretraining
    name: str
    examples: list[Path] = field(default_factory=list)
    data: DatasetDict | None = None
    predictions: dict[str, mistakes.Mistakes] | None = None
    notes: list[str] = field(default_factory=list)  # what was not found, and why


def refusing(handler: Callable) -> Callable:
    """What the package refuses becomes a message in the browser; anything else is a bug and keeps its traceback."""

    @functools.wraps(handler)
    def said(*arguments):
        try:
            return handler(*arguments)
        except LiVTError as error:
            raise gr.Error(html.escape(str(error)), print_exception=False) from error

    return said


def private_folder() -> Path:
    """A new folder among the files that Gradio keeps, and nobody else."""
    Path(get_upload_folder()).mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(dir=get_upload_folder()))


def written(text: str, name: str) -> str:
    """A file of this name, to be downloaded."""
    path = private_folder() / name
    path.write_text(text, encoding="utf-8")
    return str(path)


class ImageChoice:
    """Where an image file is dropped or an example is picked, and the image itself.

    Not Gradio's own component for both: that opens the file, and fails in its own words on one that is no image.
    """

    def __init__(self, shown: Shown):
        self.path = gr.State(None)
        self.file = gr.File(label="Image", file_types=["image"], height=120, elem_id="image")
        self.preview = gr.Image(interactive=False, show_label=False, height=240, buttons=[], elem_id="preview")
        self.files = list(map(str, shown.examples))
        self.examples = gr.Gallery(
            self.files, show_label=False, height="auto", allow_preview=False, interactive=False,
            visible=bool(self.files), buttons=[], elem_id="examples",
        )  # fmt: skip

    def then(self, handler: Callable[..., tuple], inputs: list, outputs: list) -> None:
        """Call `handler(path, *inputs)` when the image changes; it is shown unless it is refused."""

        @refusing
        def dropped(path, *values):
            return path, path, *handler(path, *values)

        @refusing
        def picked(event: gr.SelectData, *values):
            return dropped(self.files[event.index], *values)

        outputs, quiet = [self.path, self.preview, *outputs], {"show_progress": "hidden"}
        self.file.upload(dropped, [self.file, *inputs], outputs, **quiet)
        self.file.clear(dropped, [self.file, *inputs], outputs, **quiet)
        self.examples.select(picked, inputs, outputs, **quiet)


class TryTab:
    """One image under the paper's rule, under equal classes, and in the world of a slider or a table."""

    def __init__(self, shown: Shown):
        self.served, self.classes = shown.served, shown.served.classes
        self.logits = gr.State(None)
        self.frequencies = gr.State(None if self.classes is None else self.classes.tilted(1))
        with gr.Row():
            with gr.Column(scale=2, min_width=260):
                image = ImageChoice(shown)
            with gr.Column(scale=5, min_width=320):
                tilted = self.classes is not None and not self.classes.several
                slider = self._slider() if tilted else None
                self.bars = gr.HTML(self.served.panels(None, None), elem_id="bars")
        image.then(self.see, [self.frequencies], [self.logits, self.bars])
        if self.classes is not None:
            self._table()
        if slider is not None:
            inputs = [slider, self.search, self.logits]
            slider.input(self.tilt, inputs, self.outputs, trigger_mode="always_last", **AT_ONCE)

    def _slider(self) -> gr.Slider:
        words = "How common are rare things where the model serves?"
        slider = gr.Slider(-1, 1, value=-1, step=0.02, label=words, buttons=[], elem_id="tilt")
        places = ("as in training", "all equal", "rare things are common")
        gr.HTML(f'<div class="legend">{"".join(f"<span>{place}</span>" for place in places)}</div>', padding=False)
        return slider

    def _table(self) -> None:
        known = self.classes
        with gr.Accordion("How frequent each class is in your world", open=len(known.names) <= 20):
            gr.Markdown(
                "Type a frequency: a number of images, in any unit. Shares follow. The file is the one that "
                f"`--prior` takes. The table shows up to {classes.ROWS} classes; search for others."
            )
            self.search = gr.Textbox("", label="Search a class", elem_id="search")
            self.table = gr.Dataframe(
                known.rows(known.tilted(1)), headers=list(classes.COLUMNS), interactive=True, type="array",
                datatype=["number", "str", "number", "number", "number"], static_columns=[0, 1, 2, 4],
                column_count=5, max_height=460, elem_id="frequencies", buttons=[],
            )  # fmt: skip
            with gr.Row():
                kinds = [".json", ".yaml", ".yml"]
                opened = gr.File(label="Open a JSON or YAML file", file_types=kinds, height=160, elem_id="open")
                with gr.Column():
                    save = gr.Button("Save as prior.json", elem_id="save")
                    saved = gr.File(label="Your world as a file", interactive=False, height=100, elem_id="saved")
        self.outputs = [self.frequencies, self.bars, self.table]
        state = [self.frequencies, self.search, self.logits]
        self.table.input(self.edit, [self.table, *state], self.outputs, show_progress="hidden")
        self.search.input(known.rows, [self.frequencies, self.search], self.table, **AT_ONCE)
        opened.upload(self.open, [opened, self.search, self.logits], self.outputs)
        save.click(lambda frequencies: written(known.to_json(frequencies), "prior.json"), self.frequencies, saved)

    def see(self, path, frequencies):
        logits = None if path is None else self.served.logits(path)
        return logits, self.served.panels(logits, frequencies)

    def show(self, frequencies: np.ndarray, search: str, logits) -> tuple:
        """What `outputs` are to be in this world."""
        return frequencies, self.served.panels(logits, frequencies), self.classes.rows(frequencies, search)

    def tilt(self, place, search, logits):
        return self.show(self.classes.tilted(-place), search, logits)

    def edit(self, rows, frequencies, search, logits):
        try:
            frequencies = self.classes.edited(frequencies, rows)
        except LiVTError as error:
            gr.Warning(html.escape(str(error)))  # not an error, so that the table goes back to what it was
        return self.show(frequencies, search, logits)

    @refusing
    def open(self, path, search, logits):
        return self.show(self.classes.read(path), search, logits)


def world_tab(shown: Shown, tried: TryTab) -> None:
    """Many images without labels: their prior, and what it changes."""
    gr.Markdown(
        "Drop images from the place where the model is to serve. Their class frequencies are estimated from the "
        "images alone, without labels."
    )
    with gr.Row():
        files = gr.File(file_count="multiple", label="Images", height=140, elem_id="world-files")
        folder = gr.File(file_count="directory", label="A folder", height=140, elem_id="world-folder")
    words = gr.Markdown(elem_id="world-words")
    found = gr.State(None)
    plain = {"interactive": False, "max_height": 300, "buttons": []}
    prior = gr.Dataframe(headers=list(unlabelled.PRIOR_COLUMNS), elem_id="prior", **plain)
    changes = gr.Dataframe(headers=list(unlabelled.CHANGE_COLUMNS), elem_id="changes", **plain)
    with gr.Row():
        downloads = gr.File(label="Downloads", interactive=False, file_count="multiple", elem_id="world-downloads")
        use = gr.Button("Try an image in this world", elem_id="use")

    @refusing
    def look(paths):
        world = unlabelled.read_world(shown.served, paths or [])
        usable, files = world.estimate.reliable, [written(world.to_csv(), "predictions.csv")]
        if usable:
            files.append(written(shown.served.classes.to_json(world.frequencies), "prior.json"))
        rows = world.prior_rows(), world.change_rows()[: classes.ROWS]
        return world.frequencies if usable else None, world.words(), *rows, files

    @refusing
    def take_over(frequencies, search, logits):
        if frequencies is None:
            raise LiVTError("there is no estimate to be used; drop other images first.")
        return tried.show(frequencies, search, logits)

    for source in (files, folder):
        source.upload(look, source, [found, words, prior, changes, downloads])
    use.click(take_over, [found, tried.search, tried.logits], tried.outputs)


def gallery(data: DatasetDict, split: str, rows: Sequence[int], captions: list[str]) -> list[tuple]:
    pictures = (picture.permute(1, 2, 0).numpy() for picture in read_images(data[split], rows))
    return list(zip(pictures, captions, strict=True))


class ErrorsTab:
    """The classes from worst to best; of the one that is clicked, its wrong images beside training images."""

    def __init__(self, shown: Shown):
        self.shown, self.served = shown, shown.served
        rules = list(shown.predictions)
        rule = gr.Dropdown(rules, value=rules[0], label="Decision rule", visible=len(rules) > 1)
        gr.Markdown("Click a class to see its wrong images; click a column to sort by it.")
        rows = self.rows(rules[0])
        table = gr.Dataframe(
            rows, headers=list(mistakes.COLUMNS), interactive=False, max_height=400, show_search="search",
            elem_id="errors", buttons=[],
        )  # fmt: skip
        chosen = gr.State(None)  # the rule and the class whose wrong images are shown
        words = gr.Markdown(elem_id="errors-words")
        plain = {"show_label": False, "buttons": []}
        with gr.Row():
            with gr.Column(scale=3, min_width=320, visible=shown.data is not None):
                gr.Markdown("Its wrong images with what they were taken for, the surest first. Click one.")
                wrong = gr.Gallery(height="auto", allow_preview=False, elem_id="wrong", **plain)
                gr.Markdown("The training images most like it, of its class and of the one it was taken for (cosine).")
                near = gr.Gallery(height="auto", allow_preview=False, elem_id="near", **plain)
            reliability = gr.Image(interactive=False, scale=2, min_width=320, elem_id="reliability", **plain)
        rule.change(self.rows, rule, table)
        table.select(self.choose, [rule, table], [chosen, words, wrong, reliability, near])
        wrong.select(self.neighbours, chosen, near)

    def rows(self, rule: str) -> list[list]:
        known = self.served.classes
        counts = None if known is None else known.counts
        return self.shown.predictions[rule].class_rows(self.served.names, counts)

    def choose(self, rule, _table, event: gr.SelectData):
        label = int(event.row_value[0])
        chosen = rule, label
        predictions, names, data = self.shown.predictions[rule], self.served.names, self.shown.data
        taken = ", ".join(f"{names[other]} ({images})" for other, images in predictions.predicted_as(label)[:8])
        said = f"Taken for {taken}." if taken else "Every test image is right."
        words = f"### {escape_markdown(names[label])}\n\n{escape_markdown(said)}"
        picture = private_folder() / "reliability.png"
        diagram = reliability_diagram(predictions.bins(label), picture, f"Images of {names[label]}")
        if data is None:
            return chosen, words + "\n\nIts images are not shown here.", [], diagram, []
        rows = predictions.errors_of(label)[:SHOWN]
        captions = [names[predictions.predicted[row]] for row in rows]
        wrong = gallery(data, predictions.split, predictions.index[rows], captions)
        return chosen, words, wrong, diagram, self._near(*chosen, 0) if len(rows) else []

    def neighbours(self, chosen, event: gr.SelectData):
        return self._near(*chosen, event.index)

    def _near(self, rule: str, label: int, place: int) -> list[tuple]:
        """Training images of the true and of the predicted class nearest to a wrong image."""
        predictions, data, names = self.shown.predictions[rule], self.shown.data, self.served.names
        row = predictions.errors_of(label)[place]
        [image] = read_images(data[predictions.split], [predictions.index[row]])
        classes = [label, int(predictions.predicted[row])]
        found = self.served.nearest(data["train"], image, classes, NEIGHBOURS)
        captions = [f"{cosine:.2f} {names[label]}" for _, label, cosine in found]
        return gallery(data, "train", [index for index, _, _ in found], captions)


def reconstruction_tab(shown: Shown) -> None:
    """Hide patches of an image and let a pretrained model fill them in."""
    with gr.Row():
        with gr.Column(scale=2, min_width=260):
            image = ImageChoice(shown)
            usual = shown.served.model.config.mask_ratio
            ratio = gr.Slider(
                0.1, 0.95, usual, step=0.05, label="Share of hidden patches", buttons=[], elem_id="ratio"
            )
            seed = gr.Number(0, label="Seed of the mask", precision=0, elem_id="seed")
        with gr.Column(scale=5, min_width=320), gr.Row(elem_id="pictures"):
            titles = ("As the model sees it", "Visible patches", "Reconstruction")
            pictures = [gr.Image(label=title, interactive=False, buttons=[], min_width=200) for title in titles]

    def reconstruct(path, ratio, seed):
        return tuple([None] * 3 if path is None else shown.served.reconstruct(path, ratio, seed))

    image.then(reconstruct, [ratio, seed], pictures)
    for part in (ratio, seed):
        part.change(refusing(reconstruct), [image.path, ratio, seed], pictures, show_progress="hidden")
