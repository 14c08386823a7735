"""Checkpoints to be measured or served: how they are loaded, what they know, and what a run lends to a command."""

from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from transformers import AutoImageProcessor, AutoModelForImageClassification, BaseImageProcessor, PreTrainedModel

from livt_hf.data import class_counts as counts_of
from livt_hf.data import load_long_tailed
from livt_hf.data.division import is_carved
from livt_hf.data.labels import class_feature, digest_of, first_names
from livt_hf.data.labels import is_multi_label as has_several_labels
from livt_hf.data.split_names import SPLIT_FOLDER, SPLIT_OF_WORD
from livt_hf.errors import LiVTError
from livt_hf.long_tail.balance import BalancedClassifier, balance
from livt_hf.long_tail.head import UNKNOWN_PRIOR, LongTailHead
from livt_hf.long_tail.priors import read_numbers
from livt_hf.modeling_livit import LiViTForImageClassification
from livt_hf.modeling_livit_mae import LiViTForPreTraining
from livt_hf.pretrained import explain_load_errors, format_names, hide_load_report, read_config
from livt_hf.results import Results
from livt_hf.runs import Run, lent_data, lent_plugin, newest_finished, place_of, runs_folder
from livt_hf.settings import DataSettings, FinetuneSettings
from livt_hf.text import format_error


def load_checkpoint(path: str) -> PreTrainedModel:
    """A LiViT in either of its forms, a ViTMAE, or any other image classifier, balanced again where it was so."""
    config = read_config(path)
    kind = config.get("model_type")
    with explain_load_errors(path):
        if kind is None and Run(Path(path)).fold(1).folder.is_dir():
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
        with hide_load_report():
            model, info = reader.from_pretrained(path, **options)
        if info["missing_keys"]:
            raise LiVTError(
                f"{path} lacks weights of a classifier ({format_names(info['missing_keys'])}); fine-tune it first, or "
                "measure its features (livt eval --probe)."
            )
        return balance(model.eval()) if config.get("long_tail") else model.eval()


def balanced_by_counts(model: PreTrainedModel, class_counts: str, trained_with: str | None) -> PreTrainedModel:
    """A classifier trained elsewhere, balanced by its class counts: those of its training folder or of a file.

    A LiViT without counts, such as the authors', has a loss of its own; of any other model it is `trained_with`, or
    "ce".
    """
    if known_counts(model) is not None:
        raise LiVTError(f"{model.name_or_path} knows its class counts already; leave --class_counts out.")
    if is_multi_label(model):
        raise LiVTError("class counts balance a model of one label per image; leave --class_counts out.")
    own = None if head_of(model) is None else head_of(model).settings.loss
    if None not in (own, trained_with) and own != trained_with:
        raise LiVTError(f"{model.name_or_path} was trained with loss {own!r}; leave --trained_with out.")
    if Path(class_counts).is_dir():
        train = load_long_tailed(class_counts)["train"]
        check_classes_match(model, train)
        counts = counts_of(train).tolist()
    else:
        counts = read_numbers(class_counts, class_names(model), "class counts")
    return balance(model, class_counts=counts, loss=own or trained_with or "ce")


def is_pretraining(path: str) -> bool:
    return read_config(path).get("model_type") == "vit_mae"


def load_classifier(path: str, class_counts: str | None = None, trained_with: str | None = None) -> PreTrainedModel:
    """A classifier; one that was trained elsewhere is balanced by its class counts, if they are told."""
    if is_pretraining(path):
        raise LiVTError(f"{path} is a pretraining, which knows no classes; fine-tune it first.")
    model = load_checkpoint(path)
    return model if class_counts is None else balanced_by_counts(model, class_counts, trained_with)


def load_processor(path: str) -> BaseImageProcessor:
    """The image processor that was saved beside a checkpoint."""
    try:
        return AutoImageProcessor.from_pretrained(path)
    except Exception as error:  # as of `explain_load_errors`
        raise LiVTError(
            f"{path} has no image processor (preprocessor_config.json) that can be read, so it is unknown how its "
            f"images are prepared; save the one it was trained with beside it ({format_error(error)})."
        ) from error


def class_names(model: PreTrainedModel) -> list[str]:
    """In the order of the model's outputs."""
    return [model.config.id2label[label] for label in range(model.config.num_labels)]


def is_multi_label(model: PreTrainedModel) -> bool:
    return model.config.problem_type == "multi_label_classification"


def head_of(model: PreTrainedModel) -> LongTailHead | None:
    """The head that knows the class prior, or None for a model without one."""
    return model.head if isinstance(model, BalancedClassifier) else None


def training_counts(model: PreTrainedModel, train: Dataset) -> np.ndarray:
    """The class counts that shot groups go by: of the images a model was trained on, where it knows them.

    A training split may have more: those that were held out to calibrate.
    """
    known = known_counts(model)
    return counts_of(train) if known is None else np.array(known)


def known_counts(model: PreTrainedModel) -> list[int] | None:
    """The class counts of the images a model was trained on, or None where it does not know them."""
    head = head_of(model)
    return None if head is None else head.settings.class_counts


def why_no_posterior(model: PreTrainedModel) -> str | None:
    """Why a checkpoint gives no class probabilities under a prior, or None where it does."""
    head = head_of(model)
    return UNKNOWN_PRIOR if head is None else head.no_posterior


def is_calibrated(model: PreTrainedModel) -> bool:
    return why_no_posterior(model) is None and head_of(model).settings.calibration is not None


def why_uncalibrated(model: PreTrainedModel) -> str | None:
    """What made the posteriors of a model unsure that no calibration has corrected, or None where nothing is known."""
    if why_no_posterior(model) is not None or is_calibrated(model):
        return None
    settings = head_of(model).settings
    softened = (settings.trained_with or {}) | {"label_smoothing": settings.label_smoothing}
    named = ", ".join(f"{name} {value:g}" for name, value in softened.items() if value)
    return f"it was trained with {named}, which leaves its posteriors unsure, and is not calibrated" if named else None


def check_posterior(model: PreTrainedModel) -> None:
    """Refuse a prior for a model that has no use for it."""
    why = why_no_posterior(model)
    if why is not None:
        raise LiVTError(
            f"{model.name_or_path} gives no probabilities under a prior ({why}); without one it ranks by its logits."
        )


def check_classes_match(model: PreTrainedModel, dataset: Dataset) -> None:
    """Refuse to measure a model on classes that are not its own, or on another number of labels per image."""
    if is_multi_label(model) != has_several_labels(dataset):
        words = {False: "one label", True: "several labels"}
        raise LiVTError(
            f"an image has {words[is_multi_label(model)]} to the model and {words[has_several_labels(dataset)]} in "
            "the data; fine-tune it on them first, or name data of its kind."
        )
    names, known = class_feature(dataset).names, class_names(model)
    if len(names) != len(known):
        odd = sorted(set(names) ^ set(known)) if set(names) & set(known) else []
        which = f" (only one of them has {first_names(odd)})" if odd else ""
        raise LiVTError(
            f"the model has {len(known)} classes and the data {len(names)}{which}; fine-tune it on them first, or "
            "measure its features (livt eval --probe)."
        )
    unnamed = known == [f"LABEL_{i}" for i in range(len(known))]
    if not unnamed and known != names:
        first = next(i for i in range(len(names)) if names[i] != known[i])
        raise LiVTError(
            f"class {first} is {known[first]!r} to the model and {names[first]!r} in the data; "
            "bring the classes into the order of the model's id2label."
        )


def was_trained_on(model: str, dataset: str) -> bool:
    """Whether a model is a run here, and images of its training are among all those of a dataset, as paths tell.

    A folder for testing or validation in that of the training has none of them.
    """
    run = Run(Path(model))
    if not run.started:
        return False
    one, other = place_of(run.arguments.get("dataset", DataSettings.dataset)), place_of(dataset)
    if one == other or not (isinstance(one, Path) and isinstance(other, Path)):
        return one == other
    if not other.is_relative_to(one):
        return one.is_relative_to(other)
    split = SPLIT_FOLDER.fullmatch(other.relative_to(one).parts[0])
    return split is None or SPLIT_OF_WORD[split[1].lower()] == "train"


def choose_device(asked: str | None) -> torch.device:
    """The device that was asked for, or the fastest one that is there."""
    numbers = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available()), "cpu": 1}
    there = [name for name, number in numbers.items() if number]
    numbered = [f"{name}:{index}" for name, number in numbers.items() for index in range(number)]
    if asked is not None and asked not in there + numbered:
        raise LiVTError(f"there is no device {asked!r} here; choose one of {', '.join(there)}.")
    return torch.device(asked or there[0])


def lent_by_run(asked: dict) -> dict:
    """What an evaluation takes from a run where it was not told: the model, its data, its plugin.

    Named or not, the run's own data are divided as they were in training.
    """
    lent = {}
    if asked.get("model", "auto") == "auto":
        run = newest_finished(FinetuneSettings, folds=None)  # a cross-validation has no model of its own
        if run is None:
            raise LiVTError(f"there is no finished fine-tuning under {runs_folder()}; name a checkpoint with --model.")
        lent["model"] = str(run.folder)
    else:
        run = Run(Path(asked["model"]))
    if "dataset" not in asked:
        if run.folder.is_dir() and not run.started and not (run.folder / "config.json").exists():
            raise LiVTError(f"{run.folder} holds no model: it has no config.json; name a run or a checkpoint.")
        if not run.finished:
            raise LiVTError(f"{run.folder} is not a finished run here; say what to measure it on with --dataset.")
    if "dataset" not in asked or run.started:
        lent |= lent_data(run, asked)
    if "plugin" not in asked:
        lent["plugin"] = lent_plugin(run.folder)
    return lent


def check_set_aside(settings, data: DatasetDict) -> None:
    """Refuse a split that was set aside from images that should not be divided, or no longer in the same way.

    `settings` name the model and the split. Which images are set aside depends on all of them.
    """
    if not is_carved(data, settings.split):
        return
    run, stored = Run(Path(settings.model)), SPLIT_OF_WORD.get(str(data["train"].split))
    asked = set(DataSettings.names()) - set(DataSettings.names("may_change_on_resume"))
    lent = run.finished and all(run.arguments.get(name) == getattr(settings, name) for name in asked)
    if not lent and stored in ("validation", "test"):
        raise LiVTError(
            f"{settings.dataset} has no other split than {stored}, of which a part would be set aside as in training: "
            "pass --split all to measure on all its images."
        )
    if lent and _has_changed(run.results, data["train"]):
        raise LiVTError(
            f"{settings.dataset} has changed since {settings.model} was trained on it, so training images may be in "
            f"its {settings.split} split: put its images back as they were, measure on others with --dataset OTHER "
            "--split all, or train again."
        )


def _has_changed(results: Results, train: Dataset) -> bool:
    """Whether a run was trained on other images. One from before there were digests tells their number alone."""
    if results.trained_on is None:
        return results.num_train_images not in (None, len(train))
    return results.trained_on != digest_of(train)
