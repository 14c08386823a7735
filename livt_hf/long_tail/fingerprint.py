"""Fingerprint of a classifier's weights: it tells whether saved long-tail settings still belong to them.

Other tools train a published model by another loss and save it with our settings, which they do not know.
"""

import logging
from collections.abc import Iterable, Mapping

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel

from livt_hf.long_tail.structure import get_classifier

logger = logging.getLogger(__name__)

OTHER_LABELS = "for another number of labels"
_WAVES = 8
# Relative change of a tensor that makes it another one. Rounding to bfloat16 changes it by .0011, to float16 by less.
_TOLERANCE = 0.005


def compute_fingerprint(tensors: Iterable[Tensor]) -> list[float]:
    """Project each tensor on eight fixed random directions.

    Unlike a hash it can be compared with weights that were rounded to half precision: the mean square of the
    differences estimates the squared length of the change.

    Args:
        tensors: the weight (C, D) of a classifier and its bias (C,), if it has one.

    Returns:
        Eight numbers per tensor.
    """
    return [float(f"{number:.7g}") for tensor in tensors for number in _project(tensor)]


def matches_fingerprint(tensors: Iterable[Tensor], fingerprint: list[float]) -> bool:
    """Return True if tensors are those of a fingerprint, up to rounding."""
    tensors = list(tensors)
    if len(fingerprint) != _WAVES * len(tensors):
        return False
    for tensor, saved in zip(tensors, np.reshape(fingerprint, (-1, _WAVES)), strict=True):
        change = np.sqrt(np.square(_project(tensor) - saved).mean())
        if not change <= _TOLERANCE * tensor.detach().double().norm().item():  # written this way so that NaN differs
            return False
    return True


def read_classifier(model: PreTrainedModel, state_dict: Mapping[str, Tensor] | None = None) -> list[Tensor] | None:
    """Return weight and bias of the classifier; None where they are quantised, sharded or not there yet.

    Args:
        model: an image classifier.
        state_dict: its whole tensors, where those of the model are sharded.
    """
    classifier = get_classifier(model)
    tensors = dict(classifier.named_parameters())
    if state_dict is not None:
        prefix = next(name for name, module in model.named_modules() if module is classifier)
        tensors = {name: state_dict.get(f"{prefix}.{name}") for name in tensors}
    plain = all(
        type(t) in (Tensor, nn.Parameter) and t.is_floating_point() and not t.is_meta for t in tensors.values()
    )
    return list(tensors.values()) if plain else None


def find_stale_reason(model: PreTrainedModel, long_tail: Mapping) -> str | None:
    """Return why saved settings are not those of a model's classifier, or None if they may be.

    Models of version 0.2 have no fingerprint.
    """
    fingerprint = long_tail.get("fingerprint")
    if has_other_labels(long_tail, model.config.num_labels):
        return OTHER_LABELS
    tensors = None if fingerprint is None else read_classifier(model)
    if tensors is None or matches_fingerprint(tensors, fingerprint):
        return None
    return "those of a classifier that was trained further by other tools"


def has_other_labels(long_tail: Mapping, num_labels: int) -> bool:
    """Return True if saved settings are for another number of labels."""
    counts = long_tail.get("class_counts")
    return isinstance(counts, list) and len(counts) != num_labels


def warn_about_stale_settings(name: str, reason: str) -> None:
    logger.warning(
        "the long-tail settings in %s are %s and ignored; pass class_counts and the loss it was trained with, "
        "such as 'ce' for plain cross-entropy.",
        name,
        reason,
    )


def _project(tensor: Tensor) -> np.ndarray:
    values = tensor.detach().cpu().double().numpy()
    generator = np.random.RandomState(0)  # numpy promises that its numbers never change
    rows, *columns = (generator.standard_normal((size, _WAVES)) for size in values.shape)
    return np.einsum("ck,ck->k", rows, values @ columns[0] if columns else values[:, None].repeat(_WAVES, 1))
