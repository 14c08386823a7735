"""Calibrate a classifier on labelled images that it was not trained on.

    livt calibrate RUN                                     # on the validation split of the data it was trained on
    livt calibrate RUN --dataset FOLDER --split all        # on all images of another folder
    livt calibrate MODEL --dataset FOLDER --split all --class_counts counts.json    # one trained elsewhere

Fits a temperature and one offset per class by maximum likelihood (livt_hf/long_tail/calibration.py) and writes them
into the config of the model, where `probabilities`, `livt eval` and `livt predict` use them. Weights stay as they are.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from datasets import Dataset
from transformers import PreTrainedModel

from livt_hf.classifiers import check_classes_match, check_posterior, load_classifier, load_processor
from livt_hf.cli.console import run_command
from livt_hf.cli.inherit import inherit_from_run, resolve_settings
from livt_hf.cli.settings import CalibrateSettings, EvalSettings
from livt_hf.data import eval_loader, load_dataset, load_evaluation_data
from livt_hf.data.batches import build_eval_batches
from livt_hf.data.labels import digest_of, image_paths
from livt_hf.errors import LiVTError
from livt_hf.files import read_record, write_values
from livt_hf.predictions.calibrate import calibrate
from livt_hf.predictions.record import FOLDER, PredictionsInfo, read_parts, replace_info
from livt_hf.predictions.rules import LABELS
from livt_hf.results import Results
from livt_hf.run_data import check_split_unseen, was_trained_on
from livt_hf.runs import Run
from livt_hf.text import format_accuracy, shell_line
from livt_hf.threads import configure_threads
from livt_hf.training.finetune import compute_metrics, compute_record_metrics


def main(argv: Sequence[str] | None = None) -> None:
    settings = resolve_settings(CalibrateSettings, argv)
    accelerator = Accelerator()
    configure_threads(accelerator.device, settings.threads)
    config = Path(settings.model) / "config.json"
    if not config.is_file():
        raise LiVTError(f"{settings.model} is no folder with a config.json to write to; download the model first.")
    model, processor = load_classifier(settings.model, **settings.foreign.training), load_processor(settings.model)
    model.to(accelerator.device)
    check_posterior(model)
    check_not_trained_on(settings)
    data = load_evaluation_data(settings.data, settings.split)
    check_split(settings, list(data))
    check_split_unseen(settings.model, settings.data, settings.split, data)
    check_classes_match(model, data[settings.split])

    batches = build_eval_batches(settings.batch_size, accelerator, settings.data.num_workers)
    images = data[settings.split]
    loader = eval_loader(images, processor, batches)
    calibration = calibrate(model, loader, accelerator, settings.split, digest_of(images))
    results = measure_again(settings, model, images, accelerator)
    write_calibration(config, model)
    if results is not None:
        Run(Path(settings.model)).write_results(results)
    rules = {} if results is None else results.rules
    measured = "".join(f"  test, {LABELS[rule]}: {format_accuracy(metrics)}\n" for rule, metrics in rules.items())
    low, high = min(calibration.offsets), max(calibration.offsets)
    print(
        f"Calibrated {settings.model} on {calibration.num_images:,} images of {settings.data.dataset} "
        f"({settings.split}): "
        f"scale {calibration.scale:.2f}, odds {calibration.odds:.2f}, offsets from {low:+.2f} to {high:+.2f}.\n"
        f"{measured}"
        f"Next, measure it again:\n  {shell_line(['livt', 'eval', '--model', settings.model])}"
    )
    if settings.split == "test":
        print("Measured on these same images, its probabilities will look better than they are; use others.")


def check_not_trained_on(settings: CalibrateSettings) -> None:
    if settings.split == "train" or settings.split == "all" and was_trained_on(settings.model, settings.data.dataset):
        raise LiVTError("a model is too sure of the images it was trained on; calibrate it on others.")


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
    info, counts = PredictionsInfo.from_model(model, str(run.folder)), np.asarray(model.config.long_tail.class_counts)
    results = dataclasses.replace(
        run.results,
        default_rule=info.default_rule.name,
        calibrated_on=len(images),
        calibration_split=settings.split,
    )
    named = {"model": settings.model, "plugin": settings.plugin}
    own = EvalSettings.resolve(named, inherited=inherit_from_run(named))
    kept = run.folder / FOLDER
    seen = settings.split == own.split and settings.data == own.data or has_images_of(kept, images)
    try:
        if seen:
            raise LiVTError("its test images are among those it was calibrated on.")
        if kept.is_dir():
            replace_info(kept, info)
            return dataclasses.replace(results, **compute_record_metrics(kept, counts))
        data = load_dataset(own.data)
        check_split_unseen(own.model, own.data, own.split, data)
        if digest_of(data["test"]) == digest_of(images):
            raise LiVTError("its test images are those it was calibrated on.")
    except LiVTError as error:
        print(f"It is not measured again, and its results keep only what calibration does not change: {error}")
        if kept.is_dir():
            replace_info(kept, info)
        decided = ("macro_precision", "macro_recall", "macro_f1") if info.multi_label else ()
        metrics = {name: value for name, value in results.metrics.items() if name not in decided}
        return dataclasses.replace(results, metrics=metrics, posterior=None, own_prior=None)
    batches = build_eval_batches(own.batch_size, accelerator, own.data.num_workers)
    loader = eval_loader(data["test"], load_processor(settings.model), batches)
    return dataclasses.replace(results, **compute_metrics(model, loader, accelerator, counts))


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
