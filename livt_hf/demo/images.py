"""Images of the data a run was trained on, for the demo to show: examples, wrong images, their neighbours."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from datasets import DatasetDict
from torch import Tensor

from livt_hf.data import load_data
from livt_hf.data.decoding import some_images
from livt_hf.data.labels import labels_of
from livt_hf.demo.serving import ServedClassifier
from livt_hf.errors import LiVTError
from livt_hf.evaluation.models import lent_by_run
from livt_hf.runs import Run
from livt_hf.settings import EvalSettings

COMPARED = 400  # training images, at most, that an image is compared with: a few seconds on a laptop


def data_of_run(path: str) -> DatasetDict:
    """The data a finished run was trained on; any other model is refused, and a stream, which may not fit."""
    run = Run(Path(path))
    if not run.finished:
        raise LiVTError(f"{path} is not the folder of a finished run; show other images with --images FOLDER.")
    if run.arguments.get("streaming"):
        raise LiVTError(f"{path} was trained on a stream, which is not read as a whole; show images with --images.")
    return load_data(EvalSettings.parse([path], inherit=lent_by_run))


def example_rows(data: DatasetDict, count: int) -> list[int]:
    """Test images from head to tail: one of each of `count` classes that are spread evenly over the frequencies."""
    train, test = labels_of(data["train"]), labels_of(data["test"])
    classes = np.unique(test.values)
    by_frequency = classes[np.argsort(-np.bincount(train.values, minlength=classes.max() + 1)[classes], kind="stable")]
    places = np.linspace(0, len(by_frequency) - 1, min(count, len(by_frequency))).astype(int)
    first = [np.flatnonzero(test.values == label)[0] for label in by_frequency[places]]
    return test.images[first].tolist()


def nearest(served: ServedClassifier, data: DatasetDict, image: Tensor, labels: Sequence[int], count: int) -> list:
    """The training images of some classes most like an image, as (row, label, cosine), the nearest first."""
    train = labels_of(data["train"]).values
    share = max(1, COMPARED // len(labels))
    rows = np.concatenate([np.flatnonzero(train == label)[:share] for label in labels])
    if not len(rows):
        return []
    features = [served.features(some_images(data["train"], rows[i : i + 64])) for i in range(0, len(rows), 64)]
    cosines = torch.cat(features) @ served.features([image])[0]
    best = cosines.argsort(descending=True)[:count].tolist()
    return [(int(rows[i]), int(train[rows[i]]), cosines[i].item()) for i in best]
