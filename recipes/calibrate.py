"""Calibrate a classifier on labelled images that it was not trained on.

    livt calibrate RUN                                     # on the validation split of the data it was trained on
    livt calibrate RUN --objective macro_f1                # serve it for macro F1 from now on
    livt calibrate RUN --dataset FOLDER --split all        # on all images of another folder
    livt calibrate MODEL --dataset FOLDER --split all --class_counts counts.json    # one trained elsewhere

Fits a temperature and one offset per class by maximum likelihood (livt_hf/long_tail/calibration.py) and writes them
into the config of the model, where `probabilities`, `livt eval` and `livt predict` use them. With them comes the
exponent t of the deployment prior pi^t for each objective (livt_hf/long_tail/objectives.py). Weights stay as they are.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from datasets import Dataset
from transformers import PreTrainedModel

from livt_hf.classifiers import (
    check_classes_match,
    check_posterior,
    is_multi_label,
    known_counts,
    load_classifier,
    load_processor,
)
from livt_hf.cli.console import run_command
from livt_hf.cli.inherit import inherit_from_run, resolve_settings
from livt_hf.cli.settings import CalibrateSettings, EvalSettings
from livt_hf.data import eval_loader, load_dataset, load_evaluation_data
from livt_hf.data.batches import build_eval_batches
from livt_hf.data.labels import digest_of, image_paths
from livt_hf.errors import LiVTError
from livt_hf.files import read_record, write_values
from livt_hf.predictions.calibrate import calibrate, set_objective
from livt_hf.predictions.record import FOLDER, PredictionsInfo, read_parts, replace_info
from livt_hf.predictions.rules import ARGMAX, PER_LABEL, TEST_PRIOR, UNIFORM
from livt_hf.results import Results, format_rules
from livt_hf.run_data import check_split_unseen, was_trained_on
from livt_hf.runs import Run
from livt_hf.text import shell_line
from livt_hf.threads import configure_threads
from livt_hf.training.finetune import compute_metrics, compute_record_metrics


def main(argv: Sequence[str] | None = None) -> None:
    settings = resolve_settings(CalibrateSettings, argv)
    accelerator = Accelerator()
    configure_threads(accelerator.device, settings.threads)
    config = Path(settings.model) / "config.json"
    if not config.is_file():
        raise LiVTError(f"{settings.model} is no folder with a config.json to write to; download the model first.")
    model = load_classifier(settings.model, **settings.foreign.to_dict())
    model.to(accelerator.device)
    check_posterior(model)
    if settings.objective is not None and is_multi_label(model):
        raise LiVTError("objective chooses one class per image; leave it out of images with several.", "objective")
    if settings.split is None and settings.objective is not None and model.config.long_tail.trade_off is not None:
        set_objective(model, settings.objective)
        results = serve_again(settings, model)
        done = f"{settings.model} is served for objective {settings.objective}, without looking at an image.\n"
    else:
        settings = settings.replace(split=settings.split or "validation")
        images = load_images(settings, model)
        batches = build_eval_batches(settings.batch_size, accelerator, settings.data.num_workers)
        loader = eval_loader(images, load_processor(settings.model), batches)
        objective = settings.objective or model.config.long_tail.objective
        calibration = calibrate(model, loader, accelerator, images, settings.split, objective)
        results = measure_again(settings, model, images, accelerator)
        low, high = min(calibration.offsets), max(calibration.offsets)
        done = (
            f"Calibrated {settings.model} on {calibration.num_images:,} images of {settings.data.dataset} "
            f"({settings.split}): scale {calibration.scale:.2f}, odds {calibration.odds:.2f}, offsets from {low:+.2f} "
            f"to {high:+.2f}.\n"
        )
    write_calibration(config, model)
    if results is not None:
        Run(Path(settings.model)).write_results(results)
        done += format_rules(results)
    print(f"{done}Next, measure it again:\n  {shell_line(['livt', 'eval', '--model', settings.model])}")
    if settings.split == "test":
        print("Measured on these same images, its probabilities will look better than they are; use others.")


def load_images(settings: CalibrateSettings, model: PreTrainedModel) -> Dataset:
    """Load the images to calibrate on, which the model must not have been trained on."""
    if settings.split == "train" or settings.split == "all" and was_trained_on(settings.model, settings.data.dataset):
        raise LiVTError("a model is too sure of the images it was trained on; calibrate it on others.")
    data = load_evaluation_data(settings.data, settings.split)
    check_split(settings, list(data))
    check_split_unseen(settings.model, settings.data, settings.split, data)
    check_classes_match(model, data[settings.split])
    return data[settings.split]


def serve_again(settings: CalibrateSettings, model: PreTrainedModel) -> Results | None:
    """Return the results of a finished run whose predictions are decided anew for another objective."""
    run = Run(Path(settings.model))
    if not run.finished:
        return None
    info, kept = PredictionsInfo.from_model(model, str(run.folder)), run.folder / FOLDER
    results = update_results(run.results, model)
    if not kept.is_dir():
        others = {rule: metrics for rule, metrics in results.rules.items() if rule != TEST_PRIOR}
        return dataclasses.replace(results, rules=others)
    replace_info(kept, info)
    if UNIFORM not in results.rules:  # its test images are those it was calibrated on
        return results
    return dataclasses.replace(results, rules=compute_record_metrics(kept, np.asarray(known_counts(model))))


def update_results(results: Results, model: PreTrainedModel) -> Results:
    """Return results with what they say of the calibration and of the objective."""
    calibration = model.config.long_tail.calibration
    return dataclasses.replace(
        results,
        default_rule=PredictionsInfo.from_model(model).default_rule.name,
        calibrated_on=calibration["num_images"],
        calibration_split=calibration["split"],
        trade_off=model.config.long_tail.trade_off,
    )


def check_split(settings: CalibrateSettings, splits: list[str]) -> None:
    if settings.split not in splits:
        raise LiVTError(
            f"{settings.data.dataset} has no split {settings.split!r}; it has {', '.join(splits)}. Name one with "
            "--split "
            "that the model was not trained on, and that its results are not measured on; or give such images with "
            "--dataset FOLDER --split all; or train again with --validation_fraction 0.1, which holds such images "
            "out and calibrates on them."
        )


def measure_again(
    settings: CalibrateSettings, model: PreTrainedModel, images: Dataset, accelerator: Accelerator
) -> Results | None:
    """Return the results of a finished run with the numbers of its calibrated model: they are what its card will say.

    They are decided anew from the predictions that the run kept. A run of 0.2 kept none and is measured on its images.
    Where these are gone, or the calibration was fitted on them, the numbers stay that a calibration does not change:
    those of the order of the logits.
    """
    run = Run(Path(settings.model))
    if not run.finished:
        return None
    info, counts = PredictionsInfo.from_model(model, str(run.folder)), np.asarray(known_counts(model))
    results = update_results(run.results, model)
    named = {"model": settings.model, "plugin": settings.plugin}
    own = EvalSettings.resolve(named, inherited=inherit_from_run(named))
    kept = run.folder / FOLDER
    seen = settings.split == own.split and settings.data == own.data or has_images_of(kept, images)
    try:
        if seen:
            raise LiVTError("its test images are among those it was calibrated on.")
        if kept.is_dir():
            replace_info(kept, info)
            return dataclasses.replace(results, rules=compute_record_metrics(kept, counts))
        data = load_dataset(own.data)
        check_split_unseen(own.model, own.data, own.split, data)
        if digest_of(data["test"]) == digest_of(images):
            raise LiVTError("its test images are those it was calibrated on.")
    except LiVTError as error:
        print(f"It is not measured again, and its results keep only what calibration does not change: {error}")
        if kept.is_dir():
            replace_info(kept, info)
        decided = ("macro_precision", "macro_recall", "macro_f1") if info.multi_label else ()
        rule = PER_LABEL if info.multi_label else ARGMAX
        metrics = {name: value for name, value in results.rules.get(rule, {}).items() if name not in decided}
        return dataclasses.replace(results, metrics=metrics, rules={rule: metrics} if metrics else {})
    batches = build_eval_batches(own.batch_size, accelerator, own.data.num_workers)
    loader = eval_loader(data["test"], load_processor(settings.model), batches)
    return dataclasses.replace(results, rules=compute_metrics(model, loader, accelerator, counts))


def has_images_of(record: Path, images: Dataset) -> bool:
    """Return True if a record of predictions has an image of a dataset, by the paths of their files."""
    if not record.is_dir():
        return False
    paths = {str(Path(path).resolve()) for path in image_paths(images).to_pylist() if path}
    recorded = (part.column("path") for part in read_parts(record))
    return any(
        str(Path(path).resolve()) in paths for column in recorded if column is not None for path in column if path
    )


def write_calibration(path: Path, model: PreTrainedModel) -> None:
    """Replace the settings of the head alone: whatever form the checkpoint has, it keeps it."""
    config = read_record(path)
    config["long_tail"] = dict(model.config.long_tail)
    write_values(path, config)


if __name__ == "__main__":
    run_command(main)
