"""How frequent classes are in the world where a model serves: as a slider, a table and a file say it.

Frequencies are numbers of images out of as many as there were in training, one per class. Their shares are the serving
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
from livt_hf.predictions.shot_groups import GROUPS, shot_groups

ROWS = 200  # of a table: a browser shows them at once, and nobody reads more
COLUMNS = ("id", "class", "training images", "frequency", "share (%)")


@dataclass(frozen=True, eq=False)
class Classes:
    """The classes of a model, each with its training images; of one image, or of `several` labels per image."""

    names: list[str]
    counts: np.ndarray  # (C,)
    images: int
    several: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Classes":
        """Of a model whose head knows its class counts."""
        settings = model.config.long_tail
        counts = np.array(settings.class_counts, dtype=np.float64)
        return cls(class_names(model), counts, settings.num_images, is_multi_label(model))

    @cached_property
    def groups(self) -> list[str]:
        """many, medium or few of each class."""
        return [GROUPS[group] for group in shot_groups(torch.from_numpy(self.counts)).tolist()]

    def tilted(self, t: float) -> np.ndarray:
        """Frequencies of q ~ pi^t: t = 1 is the training prior, 0 makes all classes equal, -1 makes the tail the head.

        Where an image may have several labels, only the training prior is one of these.
        """
        if self.several:
            return self.counts
        logs = t * np.log(self.counts)
        weights = np.exp(logs - logs.max())
        return self.images * weights / weights.sum()

    def prior(self, frequencies: np.ndarray) -> Tensor:
        """Their shares, as the posterior rule takes them. (C,)"""
        total = self.images if self.several else frequencies.sum()
        return as_prior(frequencies / total, len(self.names), multi_label=self.several, what="the prior")

    def rows(self, frequencies: np.ndarray, search: str = "") -> list[list]:
        """The table of frequencies: classes whose name contains `search`, those frequent in training first."""
        wanted = search.strip().casefold()
        found = [i for i in np.argsort(-self.counts, kind="stable").tolist() if wanted in self.names[i].casefold()]
        shares = 100 * self.prior(frequencies).numpy()
        return [
            [i, self.names[i], int(self.counts[i]), _shown(frequencies[i]), _shown(shares[i])] for i in found[:ROWS]
        ]

    def edited(self, frequencies: np.ndarray, rows: Sequence[Sequence]) -> np.ndarray:
        """The frequencies after somebody has typed into a table of `rows`; other classes keep theirs."""
        result = frequencies.copy()
        for label, name, _, cell, _ in rows:
            number = _number(cell)
            if not 0 <= number < np.inf:
                raise LiVTError(f"the frequency of {name} is {cell!r}; it must be a number, 0 or more.")
            if number != _shown(frequencies[int(label)]):
                result[int(label)] = number
        if result.sum() <= 0:
            raise LiVTError("all frequencies are 0; leave at least one class.")
        if self.several and result.max() > self.images:
            raise LiVTError(f"a frequency of {result.max():g} is more than the {self.images:,} images it is out of.")
        return result

    def to_json(self, frequencies: np.ndarray) -> str:
        """The file that `--prior` takes: the share of each class."""
        shares = numbers_by_name(self.prior(frequencies).tolist(), self.names)
        return json.dumps(shares, indent=2, ensure_ascii=False) + "\n"

    def read(self, path: str | Path) -> np.ndarray:
        """Frequencies from such a file."""
        return self.images * np.array(read_prior(str(path), self.names, multi_label=self.several))


def _shown(number: float) -> float:
    """As a cell of the table shows it."""
    return float(f"{number:.6g}")


def _number(cell) -> float:
    """As somebody typed it; NaN where it is none."""
    try:
        return float(cell)
    except (TypeError, ValueError):
        return np.nan
