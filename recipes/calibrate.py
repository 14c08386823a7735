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
    images = None
    if settings.split is None and settings.objective is not None and model.config.long_tail.trade_off is not None:
        set_objective(model, settings.objective)
        done = f"{settings.model} is served for objective {settings.objective}, without looking at an image.\n"
    else:
        settings = settings.replace(split=settings.split or "validation")
        images = load_images(settings, model)
        batches = build_eval_batches(settings.batch_size, accelerator, settings.data.num_workers)
        loader = eval_loader(images, load_processor(settings.model), batches)
        objective = settings.objective or model.config.long_tail.objective
        calibration = calibrate(model, loader, accelerator, images, settings.split, objective)
        low, high = min(calibration.offsets), max(calibration.offsets)
        done = (
            f"Calibrated {settings.model} on {calibration.num_images:,} images of {settings.data.dataset} "
            f"({settings.split}): scale {calibration.scale:.2f}, odds {calibration.odds:.2f}, offsets from {low:+.2f} "
            f"to {high:+.2f}.\n"
        )
    run = Run(Path(settings.model))
    results = update_results(settings, run, model, images, accelerator) if run.finished else None
    # The settings of the head alone are replaced: whatever form the checkpoint has, it keeps it.
    write_values(config, read_record(config) | {"long_tail": dict(model.config.long_tail)})
    if results is not None:
        run.write_results(results)
        done += format_rules(results)
    print(f"{done}Next, measure it again:\n  {shell_line(['livt', 'eval', '--model', settings.model])}")
    if settings.split == "test":
        print("Measured on these same images, its probabilities will look better than they are; use others.")


def load_images(settings: CalibrateSettings, model: PreTrainedModel) -> Dataset:
    """Load the images to calibrate on, which the model must not have been trained on."""
    if settings.split == "train" or settings.split == "all" and was_trained_on(settings.model, settings.data.dataset):
        raise LiVTError("a model is too sure of the images it was trained on; calibrate it on others.")
    data = load_evaluation_data(settings.data, settings.split)
    if settings.split not in data:
        raise LiVTError(
            f"{settings.data.dataset} has no split {settings.split!r}; it has {', '.join(data)}. Name one with "
            "--split that the model was not trained on, and that its results are not measured on; or give such images "
            "with --dataset FOLDER --split all; or train again with --validation_fraction 0.1, which holds such "
            "images out and calibrates on them."
        )
    check_split_unseen(settings.model, settings.data, settings.split, data)
    check_classes_match(model, data[settings.split])
    return data[settings.split]


def update_results(
    settings: CalibrateSettings, run: Run, model: PreTrainedModel, images: Dataset | None, accelerator: Accelerator
) -> Results:
    """Return the results of a run with the numbers of its model as it is served now: they are what its card will say.

    They are decided anew from the predictions that the run kept. A run of 0.2 kept none and is measured on its images.
    Where these are gone, or the calibration was fitted on them, the numbers stay that a calibration does not change:
    those of the order of the logits. Without `images` the objective alone has changed.
    """
    info, kept = PredictionsInfo.from_model(model, str(run.folder)), run.folder / FOLDER
    counts, head = np.asarray(known_counts(model)), model.config.long_tail
    results = dataclasses.replace(
        run.results,
        default_rule=info.default_rule.name,
        calibrated_on=head.calibration["num_images"],
        calibration_split=head.calibration["split"],
        trade_off=head.trade_off,
    )
    named = {"model": settings.model, "plugin": settings.plugin}
    own = EvalSettings.resolve(named, inherited=inherit_from_run(named))
    if kept.is_dir():
        replace_info(kept, info)
    elif images is None:
        others = {rule: metrics for rule, metrics in results.rules.items() if rule != TEST_PRIOR}
        return dataclasses.replace(results, rules=others)
    if images is None and UNIFORM not in results.rules:  # its test images are those it was calibrated on
        return results
    try:
        is_test = settings.split == own.split and settings.data == own.data
        if images is not None and (is_test or has_images_of(kept, images)):
            raise LiVTError("its test images are among those it was calibrated on.")
        if kept.is_dir():
            return dataclasses.replace(results, rules=compute_record_metrics(kept, counts))
        data = load_dataset(own.data)
        check_split_unseen(own.model, own.data, own.split, data)
        if digest_of(data["test"]) == digest_of(images):
            raise LiVTError("its test images are those it was calibrated on.")
    except LiVTError as error:
        print(f"It is not measured again, and its results keep only what calibration does not change: {error}")
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


if __name__ == "__main__":
    run_command(main)
