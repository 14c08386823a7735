"""Cross-validation of fine-tuning, `livt finetune --folds 5`: one run of `finetune` per fold, evaluated together."""

import functools
import sys
import time
from pathlib import Path

from datasets import concatenate_datasets

from livt_hf.cli.copies import warn_about_copies
from livt_hf.cli.inherit import settings_from_run
from livt_hf.cli.resume import keep_automatic_options, start_run
from livt_hf.cli.training_settings import FinetuneSettings
from livt_hf.data.labels import digest_of
from livt_hf.data.load import load_pool
from livt_hf.errors import LiVTError
from livt_hf.predictions.evaluate import EvaluationReport
from livt_hf.predictions.record import FOLDER
from livt_hf.recipes.finetune import finetune
from livt_hf.reports import markdown_table
from livt_hf.reports.report import fold_rows, write_report
from livt_hf.runs import Run, check_same_images
from livt_hf.training.folds import (
    evaluate_cross_validation,
    join_fold_results,
    predict_missing_folds,
    warn_about_seen_images,
)
from livt_hf.training.loop import make_accelerator


def fold_settings(settings: FinetuneSettings, number: int) -> FinetuneSettings:
    """Return the settings of one fold from those of the whole cross-validation."""
    fold = f"{number}/{settings.folds}"
    return settings.replace(folds=None, fold=fold, push_to_hub=False, output_dir=None, resume=None)


def cross_validate(settings: FinetuneSettings, run: Run | None) -> None:
    """Fine-tune one model per fold, each in a folder below the run's, and evaluate their predictions together.

    Args:
        settings: the options of all folds.
        run: the cross-validation to resume.
    """
    for name in ("push_to_hub", "hours", "fold"):
        if value := settings.to_dict()[name]:
            message = f"{name} {value} is for one model and folds trains several; leave {name} out."
            raise LiVTError(message, argument=name)
    if run is not None and run.fold(1).started:
        first = settings_from_run(FinetuneSettings, run.fold(1))  # whose precision all folds have
        settings = settings.replace(mixed_precision=first["mixed_precision"])
    started, accelerator = time.monotonic(), make_accelerator(settings.optimization, settings.checkpoints.trackers)
    with accelerator.main_process_first():
        images = load_pool(fold_settings(settings, 1).data)
    if accelerator.is_main_process:
        warn_about_copies(images.fold_datasets(), settings.data, made=True)
        warn_about_seen_images(settings.model.pretrained, settings.data.dataset, settings.folds)
    folds = [fold_settings(settings, number) for number in range(1, settings.folds + 1)]
    for number, fold in enumerate(folds, 1):
        dataset, own = images.split(fold.data), None if run is None else run.fold(number)
        if own is not None and own.finished:
            check_same_images(own, own.results.trained_on, digest_of(dataset["train"]))
            continue
        if number > 1:
            fold = fold.replace(mixed_precision=accelerator.mixed_precision)
        # A new one: it keeps the models that it has seen.
        accelerator = make_accelerator(fold.optimization, settings.checkpoints.trackers)
        accelerator.print(f"Fold {number} of {settings.folds}", file=sys.stderr)
        if settings.checkpoints.max_hours is not None:
            left = settings.checkpoints.max_hours - (time.monotonic() - started) / 3600
            fold = fold.replace(max_hours=max(0.0, left))
        resumed = own if own is not None and own.started else None
        if resumed is not None:
            fold = keep_automatic_options(fold.replace(output_dir=str(own.folder)), own)
        create = functools.partial(start_fold, settings, run, number)
        run = finetune(fold, dataset, accelerator, resumed, create).cross_validation
    datasets = [images.split(fold.data) for fold in folds]
    predict_missing_folds(run, datasets, accelerator)
    if accelerator.is_main_process:
        report = evaluate_cross_validation(run, settings.data.dataset, datasets)
        page = write_report(run.folder / "report", report, concatenate_datasets([part["test"] for part in datasets]))
        run.write_results(join_fold_results(run, report, len(folds)))  # last of all: it marks the run as finished
        print(format_folds(settings, run, report, page))
    accelerator.end_training()


def format_folds(settings: FinetuneSettings, run: Run, report: EvaluationReport, page: Path) -> str:
    """Return the table of all folds and where their report and predictions are."""
    batch_size = settings_from_run(FinetuneSettings, run.fold(1))["batch_size"]
    batch = "" if batch_size == settings.optimization.batch_size else f", with --batch_size {batch_size} as here"
    return (
        f"\nCross-validated {settings.model.model_size} with {settings.loss.loss} on {settings.data.dataset}, in "
        f"percent, each image tested by the model of another fold (decision rule: {report.default_label}):\n"
        f"{markdown_table(fold_rows(report.summary))}"
        f"Report: {page}\nPredictions: {run.folder / FOLDER}\n"
        f"Next, train the model to use: the same command without --folds{batch}."
    )


def start_fold(settings: FinetuneSettings, run: Run | None, number: int, fold: FinetuneSettings) -> Run:
    """Create the run of a fold, and that of the cross-validation with the first."""
    run = run or start_run(settings)
    run.lock()
    return start_run(fold.replace(output_dir=str(run.fold(number).folder)))
