"""Cross-validation of fine-tuning: a run of its own for each fold, and the results of all folds together."""

import dataclasses
import logging
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from datasets import DatasetDict

from livt_hf.classifiers import load_classifier, load_processor
from livt_hf.data import eval_loader, shot_counts
from livt_hf.data.batches import build_eval_batches
from livt_hf.data.benchmarks import locate_dataset
from livt_hf.predictions.evaluate import EvaluationReport, evaluate_folds, join_folds
from livt_hf.predictions.predict import describe_images, predict
from livt_hf.predictions.record import FOLDER, PredictionsInfo
from livt_hf.results import Results, provenance
from livt_hf.runs import Run
from livt_hf.training.results import summarize_class_counts

logger = logging.getLogger(__name__)

SUMMED = ("updates", "seconds", "preparation_seconds")  # fields of `Results` that are those of all folds together


def warn_about_seen_images(pretrained: str, dataset: str, num_folds: int) -> None:
    """Warn of a pretraining on the images that are tested."""
    start = Run(Path(pretrained))
    if start.finished and locate_dataset(start.arguments["dataset"]) == locate_dataset(dataset):
        logger.warning(
            "the pretraining has seen test images of all folds, though not their labels; to rule that out, pretrain "
            "and fine-tune one by one with fold 1/%d and so on",
            num_folds,
            extra={"arguments": ("fold",)},
        )


def predict_missing_folds(run: Run, data: Sequence[DatasetDict], accelerator: Accelerator) -> None:
    """Write the predictions of folds that were trained by version 0.2, which kept no prediction record."""
    for number, part in enumerate(data, 1):
        folder = run.fold(number).folder
        if not (folder / FOLDER).is_dir():
            model, images = load_classifier(str(folder)).to(accelerator.device), describe_images(part["test"], "test")
            loader = eval_loader(part["test"], load_processor(str(folder)), build_eval_batches(256, accelerator))
            info = PredictionsInfo.from_model(model, str(folder))
            predict(model, loader, accelerator, folder / FOLDER, info, images)


def evaluate_cross_validation(run: Run, dataset: str, datasets: Sequence[DatasetDict]) -> EvaluationReport:
    """Join the predictions of all folds, keep them in the run's folder, and evaluate them."""
    predictions = join_folds([run.fold(number).folder / FOLDER for number in range(1, len(datasets) + 1)])
    for folder in (run.folder / FOLDER, run.folder / "report"):  # of a run that was killed before it had results
        shutil.rmtree(folder, ignore_errors=True)
    predictions.save(run.folder / FOLDER)
    summary = {"model": str(run.folder), "split": f"{len(datasets)} folds"}
    summary |= provenance() | {"dataset": dataset}
    return evaluate_folds(predictions, shot_counts(datasets[0]), **summary)


def join_fold_results(run: Run, report: EvaluationReport, num_folds: int) -> Results:
    """Return the results of a whole cross-validation."""
    folds = [run.fold(number).results for number in range(1, num_folds + 1)]
    summary, rules = report.summary, report.summary["rules"]
    counts = np.array([row["count"] for row in report.per_class])
    return dataclasses.replace(
        folds[0],
        default_rule=summary["default_rule"],
        rules=rules,
        folds=summary["folds"],
        split=summary["split"],
        num_images=rules[summary["default_rule"]]["num_images"],
        trained_on=None,  # by all folds together on all images
        num_train_images=round(statistics.mean(fold.num_train_images for fold in folds)),
        class_counts=summarize_class_counts(counts),
        **{name: sum(getattr(fold, name) or 0 for fold in folds) for name in SUMMED},
    )
