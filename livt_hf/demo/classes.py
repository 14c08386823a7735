"""Class frequencies at deployment, set by a slider, a table or a file.

Frequencies are numbers of images per class, out of as many as there were in training. Their shares are the deployment
prior q of livt_hf/long_tail/priors.py.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from livt_hf.classifiers import class_names, is_multi_label
from livt_hf.errors import LiVTError
from livt_hf.long_tail.priors import as_prior, numbers_by_name, read_prior
from livt_hf.predictions.metrics import GROUPS, shot_groups

ROWS = 200  # at most, of a table in the browser
COLUMNS = ("id", "class", "training images", "frequency", "share (%)")


@dataclass(frozen=True, eq=False)
class Classes:
    """The classes of a model with their numbers of training images."""

    names: list[str]
    counts: np.ndarray  # (C,)
    images: int
    multi_label: bool

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> "Classes":
        """Return the classes of a model whose head knows its class counts."""
        settings = model.config.long_tail
        counts = np.array(settings.class_counts, dtype=np.float64)
        return cls(class_names(model), counts, settings.num_images, is_multi_label(model))

    @cached_property
    def groups(self) -> list[str]:
        """Return the shot group of each class."""
        return [GROUPS[group] for group in shot_groups(torch.from_numpy(self.counts)).tolist()]

    def tilt(self, t: float) -> np.ndarray:
        """Return frequencies of the prior pi^t: t = 1 is the training prior, 0 the uniform one, -1 the reversed one.

        Where an image may have several labels, it is always the training prior.
        """
        if self.multi_label:
            return self.counts
        logs = t * np.log(self.counts)
        weights = np.exp(logs - logs.max())
        return self.images * weights / weights.sum()

    def prior(self, frequencies: np.ndarray) -> Tensor:
        """Return the shares of frequencies, as the posterior rule takes them. (C,)"""
        total = self.images if self.multi_label else frequencies.sum()
        return as_prior(frequencies / total, len(self.names), multi_label=self.multi_label, what="the prior")

    def rows(self, frequencies: np.ndarray, search: str = "") -> list[list]:
        """Return the rows of classes whose name contains `search`, those frequent in training first."""
        wanted = search.strip().casefold()
        found = [i for i in np.argsort(-self.counts, kind="stable").tolist() if wanted in self.names[i].casefold()]
        shares = 100 * self.prior(frequencies).numpy()
        return [
            [i, self.names[i], int(self.counts[i]), _round(frequencies[i]), _round(shares[i])] for i in found[:ROWS]
        ]

    def apply_edits(self, frequencies: np.ndarray, rows: Sequence[Sequence]) -> np.ndarray:
        """Return the frequencies after edits in the rows of a table; other classes keep theirs."""
        result = frequencies.copy()
        for label, name, _, cell, _ in rows:
            number = _parse_number(cell)
            if not 0 <= number < np.inf:
                raise LiVTError(f"the frequency of {name} is {cell!r}; it must be a number, 0 or more.")
            if number != _round(frequencies[int(label)]):
                result[int(label)] = number
        if result.sum() <= 0:
            raise LiVTError("all frequencies are 0; leave at least one class.")
        if self.multi_label and result.max() > self.images:
            raise LiVTError(f"a frequency of {result.max():g} is more than the {self.images:,} images it is out of.")
        return result

    def to_json(self, frequencies: np.ndarray) -> str:
        """Return the share of each class as the JSON that `--prior` takes."""
        shares = numbers_by_name(self.prior(frequencies).tolist(), self.names)
        return json.dumps(shares, indent=2, ensure_ascii=False) + "\n"

    def read_file(self, path: str | Path) -> np.ndarray:
        """Read frequencies from a file that `--prior` takes."""
        return self.images * np.array(read_prior(str(path), self.names, multi_label=self.multi_label))


def _round(number: float) -> float:
    """Return a number with the digits of the table."""
    return float(f"{number:.6g}")


def _parse_number(cell) -> float:
    """Return the number in a cell; NaN where it holds none."""
    try:
        return float(cell)
    except (TypeError, ValueError):
        return np.nan
