"""Estimate the class prior of a record's images, without their labels."""

import numpy as np
import torch

from livt_hf.errors import LiVTError
from livt_hf.long_tail.label_shift import PriorEstimate, estimate_prior
from livt_hf.predictions.blocks import Source, iterate_blocks, stack_on_disk
from livt_hf.predictions.record import Predictions, read_parts


def estimate_record_prior(source: Source, rows: np.ndarray | None = None) -> PriorEstimate:
    """Estimate the class prior of a record's images by EM on their training posteriors, without their labels.

    Args:
        source: a record of one model, or its folder.
        rows: a mask of the images to use; by default all.

    Returns:
        The estimate. Posteriors go through a temporary file; memory holds one block of them at a time.
    """
    info = source.info if isinstance(source, Predictions) else next(read_parts(source)).info
    (head,) = info.heads
    if head is None:
        raise LiVTError(f"no prior can be estimated: {info.no_posterior}.", argument="class_counts")
    blocks = (torch.from_numpy(block.logits.copy()) for block in iterate_blocks(source, rows))
    posteriors = stack_on_disk((head.training_posterior(block).softmax(-1) for block in blocks), info.num_classes)
    return estimate_prior(posteriors, head.prior, head.calibration)
