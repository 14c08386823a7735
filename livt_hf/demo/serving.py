"""The models behind the demo: a classifier, what it says of unlabelled images, and a pretrained encoder and decoder.

A classifier sees an image once, and every prior after that costs a softmax.
"""

import csv
import html
import io
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from livt_hf.classifiers import choose_device, get_head, is_multi_label, load_model, load_processor
from livt_hf.data import read_rgb
from livt_hf.data.decoding import BrokenImageError, image_suffixes, read_images
from livt_hf.data.labels import labels_of
from livt_hf.demo.classes import ROWS, Classes
from livt_hf.errors import LiVTError
from livt_hf.files import is_hidden
from livt_hf.long_tail.label_shift import estimate_prior
from livt_hf.long_tail.priors import Prior
from livt_hf.long_tail.structure import extract_features
from livt_hf.predictions.predict import Predictor
from livt_hf.predictions.record import Predictions
from livt_hf.reports.style import GROUP_COLOURS

TOP = 5
COMPARED = 400  # training images, at most, to search for neighbours: a few seconds on a laptop
SIDE = 256  # pixels that a small image is enlarged to
GREY = "#777777"  # bars of a model without class counts
STYLE = """
.panels { display: flex; flex-wrap: wrap; gap: 1rem; }
.panel { flex: 1 1 12rem; min-width: 0; }
.panel h4 { margin: 0; font-size: 1rem; }
.panel p { margin: 0 0 .4rem; font-size: .8rem; line-height: 1.4; opacity: .75; min-height: 2.8em; }
.bar { margin: .35rem 0; }
.bar .words { display: flex; justify-content: space-between; gap: .5rem; font-size: .9rem; }
.bar .words span { white-space: nowrap; }
.bar .name { overflow: hidden; text-overflow: ellipsis; }
.bar .track { background: rgba(128, 128, 128, .18); border-radius: 3px; }
.bar .fill { height: .6rem; border-radius: 3px; min-width: 1px; }
.bar .note { font-size: .75rem; opacity: .75; }
@media (max-width: 600px) { .panel:last-child { order: -1; } }  /* a phone shows first what the slider moves */
"""
ARGMAX, UNIFORM, DEPLOYMENT = "Largest logit", "Uniform prior", "Deployment prior"
DESCRIPTIONS = {
    ARGMAX: "Classes ranked by their logits z. The bars show softmax(z), a score and not a probability.",
    UNIFORM: "Probabilities if all classes are equally frequent.",
    DEPLOYMENT: "Probabilities under the class frequencies set here.",
}
PRIOR_COLUMNS = ("class", "share in training (%)", "share here (%)", "90 % interval")
CHANGE_COLUMNS = ("file", "class (uniform prior)", "probability", "class (estimated prior)", "probability", "changed")
UNUSABLE = (
    "This estimate is not reliable: the images do not show clearly that their classes are neither equally frequent "
    "nor as in training. It cannot be used below. Calibrate the model with more images (livt calibrate) or "
    "count some images by hand."
)


class ServedClassifier:
    """A classifier with its image processor, and its classes where it gives probabilities under a prior."""

    def __init__(self, path: str, device: str | None = None):
        self.predictor = Predictor(path, device=device)
        self.model, self.names = self.predictor.model, self.predictor.labels
        missing, self.uncalibrated_because = self.predictor.info.no_posterior, self.predictor.info.uncalibrated_because
        self.warning = None  # shown on the page of a model that lacks something
        if missing:
            self.warning = f"No prior can be chosen: the scores are not class probabilities, because {missing}."
        elif self.uncalibrated_because:
            self.warning = f"The probabilities are not reliable: {self.uncalibrated_because}; run `livt calibrate`."
        self.classes = None if missing else Classes.from_model(self.model)

    def logits(self, path: str | Path) -> Tensor:
        """Compute the logits of one image file. (C,)"""
        pixels = self.predictor.read(Path(path))
        if isinstance(pixels, str):
            raise BrokenImageError(f"{Path(path).name} is not an image that can be read ({pixels}); choose another.")
        return self.predictor.logits([pixels])[0]

    @torch.inference_mode()
    def features(self, images: Sequence[Tensor]) -> Tensor:
        """Compute the features of decoded images, normalised to length 1. (B, D)"""
        pixels = self.predictor.processor(list(images), return_tensors="pt")["pixel_values"]
        seen = extract_features(self.model, pixels.to(self.predictor.device))
        return torch.nn.functional.normalize(seen.float(), dim=-1).cpu()

    def nearest(self, train: Dataset, image: Tensor, labels: Sequence[int], count: int) -> list[tuple]:
        """Return the training images of some classes most similar to an image, as (row, label, cosine)."""
        known, share = labels_of(train).values, max(1, COMPARED // len(labels))
        rows = np.concatenate([np.flatnonzero(known == label)[:share] for label in labels])
        if not len(rows):
            return []
        features = [self.features(read_images(train, rows[i : i + 64])) for i in range(0, len(rows), 64)]
        cosines = torch.cat(features) @ self.features([image])[0]
        best = cosines.argsort(descending=True)[:count].tolist()
        return [(int(rows[i]), int(known[rows[i]]), cosines[i].item()) for i in best]

    def posterior(self, logits: Tensor, prior: Prior) -> Tensor:
        """Compute class probabilities (B, C) of logits (B, C) under a prior."""
        return get_head(self.model).posterior(logits.to(self.predictor.device), prior).cpu()

    def training_posterior(self, logits: Tensor) -> Tensor:
        """Compute class probabilities under the training prior. (B, C)"""
        return get_head(self.model).training_posterior(logits.to(self.predictor.device)).exp().cpu()

    def scores(self, logits: Tensor, frequencies: np.ndarray | None) -> dict[str, Tensor]:
        """Return the scores of each decision rule for logits (C,); without classes only those of the largest logit."""
        multi_label, row = is_multi_label(self.model), logits[None]
        scores = {ARGMAX: row.sigmoid() if multi_label else row.softmax(-1)}
        if self.classes is not None:
            if not multi_label:
                scores[UNIFORM] = self.posterior(row, "uniform")
            scores[DEPLOYMENT] = self.posterior(row, self.classes.prior(frequencies))
        return {rule: answer[0] for rule, answer in scores.items()}

    def panels(self, logits: Tensor | None, frequencies: np.ndarray | None) -> str:
        """Return the top classes of an image as HTML, one panel of bars per decision rule."""
        if logits is None:
            return "<p>Drop an image, or pick one of the examples.</p>"
        panels = []
        for rule, scores in self.scores(logits, frequencies).items():
            best = scores.topk(min(TOP, len(scores)))
            bars = "".join(map(self._bar, best.indices.tolist(), best.values.tolist()))
            panels.append(f'<div class="panel"><h4>{rule}</h4><p>{DESCRIPTIONS[rule]}</p>{bars}</div>')
        return f'<div class="panels">{"".join(panels)}</div>'

    def _bar(self, label: int, score: float) -> str:
        """Return the bar of a class in the colour of its shot group."""
        name, colour, note = html.escape(self.names[label]), GREY, ""
        if self.classes is not None:
            group = self.classes.groups[label]
            colour, note = GROUP_COLOURS[group], f"{group}: {int(self.classes.counts[label]):,} in training"
        return (
            f'<div class="bar" data-value="{score:.6f}"><div class="words"><span class="name" title="{name}">{name}'
            f'</span><span>{100 * score:.1f} %</span></div><div class="track"><div class="fill" '
            f'style="width: {100 * score:.2f}%; background: {colour}"></div></div>'
            f'<div class="note">{note}</div></div>'
        )


class UnlabelledImages:
    """Unlabelled images, their estimated prior, and their predictions under the uniform and that prior."""

    def __init__(self, served: ServedClassifier, files: Sequence[Path], logits: Tensor, broken: dict[Path, str]):
        self.served, self.files, self.broken = served, files, broken
        self.source = get_head(served.model).prior.cpu()
        posterior = served.training_posterior(logits)
        self.estimate = estimate_prior(posterior, self.source, get_head(served.model).calibration)
        self.before = served.posterior(logits, "uniform").max(-1)
        self.after = served.posterior(logits, self.estimate.prior).max(-1)

    @property
    def frequencies(self) -> np.ndarray:
        return self.served.classes.images * self.estimate.prior.numpy()

    @property
    def changed(self) -> Tensor:
        """Return for each image whether the estimated prior changes its prediction. (B,)"""
        return self.before.indices != self.after.indices

    def describe(self) -> str:
        """Return a summary in Markdown."""
        changed = f"{int(self.changed.sum()):,} predictions change under the estimated prior"
        lines = [f"**{len(self.files):,} images**, {changed}."]
        if self.broken:
            first = next(iter(self.broken))
            lines.append(f"{len(self.broken):,} files could not be read, the first is {first.name}.")
        if len(self.files) < len(self.served.names):
            lines.append(f"Few images for {len(self.served.names):,} classes: look at how wide the intervals are.")
        if not self.estimate.reliable:
            lines.append(f"⚠️ **{UNUSABLE}**")
        return "\n\n".join(lines)

    def prior_rows(self) -> list[list]:
        """Return the classes with the largest estimated shares, in percent."""
        parts = (self.source, self.estimate.prior, *self.estimate.bounds)
        order = self.estimate.prior.argsort(descending=True, stable=True)[:ROWS]
        columns = [self.served.names[i] for i in order.tolist()], *((100 * part[order]).tolist() for part in parts)
        return [
            [name, round(trained, 2), round(share, 2), f"{low:.2f} to {high:.2f}"]
            for name, trained, share, low, high in zip(*columns, strict=True)
        ]

    def change_rows(self) -> list[list]:
        """Return every image with its class under both priors; those that change come first."""
        names, changed = self.served.names, self.changed.tolist()
        answers = [zip(top.indices.tolist(), top.values.tolist(), strict=True) for top in (self.before, self.after)]
        rows = [
            [file.name, names[old], round(old_score, 4), names[new], round(new_score, 4), "yes" if differs else ""]
            for file, (old, old_score), (new, new_score), differs in zip(self.files, *answers, changed, strict=True)
        ]
        return sorted(rows, key=lambda row: row[-1] != "yes")

    def to_csv(self) -> str:
        text = io.StringIO()
        csv.writer(text).writerows([CHANGE_COLUMNS, *self.change_rows()])
        return text.getvalue()


def read_unlabelled(served: ServedClassifier, files: Sequence[str | Path]) -> UnlabelledImages:
    """Classify image files with a model that gives class probabilities, and estimate their prior.

    Files without an image suffix are left out; those that cannot be read are left out and counted.
    """
    if served.uncalibrated_because:
        raise LiVTError(f"no prior can be estimated: {served.uncalibrated_because}; calibrate it (livt calibrate).")
    suffixes = image_suffixes()
    files = [path for path in map(Path, files) if path.suffix.lower() in suffixes and not is_hidden(path.name)]
    if not files:
        raise LiVTError("there is no image among these files; choose a folder with images.")
    predictions = Predictions.concatenate(list(served.predictor.predict(files)))
    errors = predictions.column("error")
    readable = np.array([error is None for error in errors])
    broken = {path: error for path, error in zip(files, errors, strict=True) if error is not None}
    if not readable.any():
        raise LiVTError(f"none of the {len(files)} files can be read ({errors[0]}); choose others.")
    logits = torch.from_numpy(predictions.logits[readable])
    return UnlabelledImages(served, [path for path in files if path not in broken], logits, broken)


class ServedPretraining:
    """A ViTMAE checkpoint with its image processor, which reconstructs masked patches."""

    warning = None

    def __init__(self, path: str, device: str | None = None):
        self.device = choose_device(device)
        self.model, self.processor = load_model(path).to(self.device), load_processor(path)
        self._one_ratio = threading.Lock()  # the mask ratio is a setting of the model

    def reconstruct(self, path: str | Path, ratio: float, seed: int | None) -> list[np.ndarray]:
        """Return the processed image, the same with masked patches, and its reconstruction; (H, W, 3) in 0..1."""
        if seed is None or not 0 <= seed < 2**63:
            raise LiVTError("the seed must be a whole number from 0 to 2^63 - 1; type one into its box.")
        visible = int(self.model.num_patches * (1 - ratio))
        if not 0 < visible < self.model.num_patches:
            raise LiVTError(f"a mask ratio of {ratio:g} leaves {visible} of {self.model.num_patches} patches visible.")
        pixels = self.processor(read_rgb(path), return_tensors="pt")["pixel_values"].to(self.device)
        noise = torch.rand(1, self.model.num_patches, generator=torch.Generator().manual_seed(seed))
        with self._one_ratio:
            self.model.config.mask_ratio = ratio
            masked, reconstruction = self.model.reconstruct(pixels, noise.to(self.device))
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (self.processor.image_mean, self.processor.image_std))
        pictures = [(tensor[0].cpu() * std + mean).clamp(0, 1) for tensor in (pixels, masked, reconstruction)]
        times = max(1, SIDE // pixels.shape[-1])  # small images are enlarged with their pixels left visible
        return [picture.permute(1, 2, 0).numpy().repeat(times, 0).repeat(times, 1) for picture in pictures]
