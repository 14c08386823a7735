"""Estimate the class prior of unlabelled images, its uncertainty, and which predictions it changes."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from livt_hf.classifiers import get_head
from livt_hf.data.decoding import image_suffixes
from livt_hf.demo.classes import ROWS
from livt_hf.demo.serving import ServedClassifier
from livt_hf.errors import LiVTError
from livt_hf.files import is_hidden
from livt_hf.long_tail.label_shift import estimate_prior
from livt_hf.predictions.record import Predictions

PRIOR_COLUMNS = ("class", "share in training (%)", "share here (%)", "90 % interval")
CHANGE_COLUMNS = ("file", "class (uniform prior)", "probability", "class (estimated prior)", "probability", "changed")
UNUSABLE = (
    "This estimate is not reliable: the images do not show clearly that their classes are neither equally frequent "
    "nor as in training. It cannot be used below. Calibrate the model with more images (livt calibrate) or "
    "count some images by hand."
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
