"""Load image classifiers and their processors, to serve, measure or convert them."""

from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoImageProcessor, AutoModelForImageClassification, BaseImageProcessor, PreTrainedModel

from livt_hf.data.labels import class_counts as counts_of
from livt_hf.data.labels import class_feature, format_class_names
from livt_hf.data.labels import is_multi_label as has_several_labels
from livt_hf.errors import LiVTError
from livt_hf.long_tail.balance import BalancedClassifier, balance, drop_stale_settings
from livt_hf.long_tail.head import UNKNOWN_PRIOR, LongTailHead
from livt_hf.long_tail.priors import read_numbers
from livt_hf.modeling_livit import LiViTForImageClassification
from livt_hf.modeling_livit_mae import LiViTForPreTraining
from livt_hf.pretrained import (
    NO_REMOTE_CODE,
    explain_load_errors,
    format_names,
    hide_load_report,
    load_config,
    read_config,
)
from livt_hf.processors import check_side
from livt_hf.text import format_error


def load_model(path: str) -> PreTrainedModel:
    """Load a LiViT in either of its forms, a ViTMAE, or any other image classifier with the head it was saved with."""
    config = read_config(path)
    kind = config.get("model_type")
    with explain_load_errors(path):
        if kind is None and Path(path, "fold-1").is_dir():
            raise LiVTError(f"{path} is a cross-validation; its models are in fold-1, fold-2 and so on.")
        if kind is None:
            within = sorted(config.parent for config in Path(path).glob("*/config.json"))
            hint = f"; did you mean {within[0]}?" if within else "."
            raise LiVTError(f"{path} holds no model: it has no config.json with a model_type{hint}")
        if kind == "vit_mae":
            return LiViTForPreTraining.from_pretrained(path, dtype=torch.float32).eval()
        livit = kind == "livit" or "livit" in config
        reader = LiViTForImageClassification if livit else AutoModelForImageClassification
        options = dict(dtype=torch.float32, use_safetensors=True, output_loading_info=True)
        options |= {} if livit else {"config": load_config(path)} | NO_REMOTE_CODE
        with hide_load_report():
            model, info = reader.from_pretrained(path, **options)
        if info["missing_keys"]:
            raise LiVTError(
                f"{path} lacks weights of a classifier ({format_names(info['missing_keys'])}); fine-tune it first, or "
                "measure its features (livt eval --probe)."
            )
        if not livit:
            drop_stale_settings(model)
        return balance(model.eval()) if getattr(model.config, "long_tail", None) else model.eval()


def balance_by_counts(model: PreTrainedModel, class_counts: str, trained_with: str | None) -> PreTrainedModel:
    """Attach a long-tail head to a classifier trained elsewhere, by class counts of its training folder or of a file.

    A LiViT without counts, such as the authors', has a loss of its own; of any other model it is `trained_with`, or
    "ce". Counts that the model knows are replaced where no fingerprint says that they belong to its classifier.
    """
    head = get_head(model)
    if head is not None and None not in (head.settings.class_counts, head.settings.fingerprint):
        raise LiVTError(f"{model.name_or_path} knows its class counts already; leave --class_counts out.")
    if is_multi_label(model):
        raise LiVTError("class counts balance a model of one label per image; leave --class_counts out.")
    own = None if head is None else head.settings.loss
    is_known = head is not None and head.settings.class_counts is None and head.definition.balanced
    if trained_with is not None and is_known:
        raise LiVTError(f"{model.name_or_path} was trained with loss {own!r}; leave --trained_with out.")
    if Path(class_counts).is_dir():
        from livt_hf.data import load_long_tailed  # the readers of datasets, which serving does not need

        train = load_long_tailed(class_counts)["train"]
        check_classes_match(model, train)
        counts = counts_of(train).tolist()
    else:
        counts = read_numbers(class_counts, class_names(model), "class counts")
    return balance(model, class_counts=counts, loss=trained_with or own or "ce")


def is_pretraining(path: str) -> bool:
    """Return True if a checkpoint is a pretraining, which has no classifier."""
    return read_config(path).get("model_type") == "vit_mae"


def load_classifier(path: str, class_counts: str | None = None, trained_with: str | None = None) -> PreTrainedModel:
    """Load a classifier; one that was trained elsewhere gets a head by its class counts, where they are given."""
    if is_pretraining(path):
        raise LiVTError(f"{path} is a pretraining, which knows no classes; fine-tune it first.")
    model = load_model(path)
    return model if class_counts is None else balance_by_counts(model, class_counts, trained_with)


def load_processor(path: str) -> BaseImageProcessor:
    """Load the image processor that was saved beside a checkpoint."""
    try:
        processor = AutoImageProcessor.from_pretrained(path, **NO_REMOTE_CODE)
    except Exception as error:  # as of `explain_load_errors`
        raise LiVTError(
            f"{path} has no image processor (preprocessor_config.json) that can be read, so it is unknown how its "
            f"images are prepared; save the one it was trained with beside it ({format_error(error)})."
        ) from error
    check_side(processor)
    return processor


def class_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the classes in the order of the model's outputs."""
    return [model.config.id2label[label] for label in range(model.config.num_labels)]


def is_multi_label(model: PreTrainedModel) -> bool:
    """Return True if images of a model may have several labels."""
    return model.config.problem_type == "multi_label_classification"


def get_head(model: PreTrainedModel) -> LongTailHead | None:
    """Return the head that knows the class prior, or None for a model without one."""
    return model.head if isinstance(model, BalancedClassifier) else None


def training_counts(model: PreTrainedModel, train: Dataset) -> np.ndarray:
    """Return the class counts that shot groups go by: those of a model's own training data, where it knows them."""
    known = known_counts(model)
    return counts_of(train) if known is None else np.array(known)


def known_counts(model: PreTrainedModel) -> list[int] | None:
    """Return the class counts of a model's training data, with what was held out, or None where they are unknown."""
    head = get_head(model)
    return None if head is None else head.settings.shot_counts or head.settings.class_counts


def check_posterior(model: PreTrainedModel) -> None:
    """Raise an error where a model gives no probabilities under a prior."""
    head = get_head(model)
    reason = UNKNOWN_PRIOR if head is None else head.no_posterior
    if reason is not None:
        raise LiVTError(
            f"{model.name_or_path} gives no probabilities under a prior ({reason}); leave it out to rank by logits.",
            argument="prior",
        )


def check_classes_match(model: PreTrainedModel, dataset: Dataset) -> None:
    """Raise an error where data have other classes than a model, or another number of labels per image."""
    if is_multi_label(model) != has_several_labels(dataset):
        words = {False: "one label", True: "several labels"}
        raise LiVTError(
            f"an image has {words[is_multi_label(model)]} to the model and {words[has_several_labels(dataset)]} in "
            "the data; fine-tune it on them first, or name data of its kind."
        )
    names, known = class_feature(dataset).names, class_names(model)
    if len(names) != len(known):
        odd = sorted(set(names) ^ set(known)) if set(names) & set(known) else []
        which = f" (only one of them has {format_class_names(odd)})" if odd else ""
        raise LiVTError(
            f"the model has {len(known)} classes and the data {len(names)}{which}; fine-tune it on them first, or "
            "measure its features (livt eval --probe)."
        )
    if known in (names, [f"LABEL_{i}" for i in range(len(known))]):
        return
    first = next(i for i in range(len(names)) if names[i] != known[i])
    raise LiVTError(
        f"class {first} is {known[first]!r} to the model and {names[first]!r} in the data; "
        "bring the classes into the order of the model's id2label."
    )


def choose_device(name: str | None) -> torch.device:
    """Return the named device, or the fastest one that is there."""
    numbers = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available()), "cpu": 1}
    there = [kind for kind, number in numbers.items() if number]
    numbered = [f"{kind}:{index}" for kind, number in numbers.items() for index in range(number)]
    if name is not None and name not in there + numbered:
        raise LiVTError(f"there is no device {name!r} here; choose one of {', '.join(there)}.", argument="device")
    return torch.device(name or there[0])
