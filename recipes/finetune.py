"""Balanced fine-tuning (BFT), the second stage of LiVT.

    livt finetune                                                      # the newest finished pretraining under runs/
    livt finetune FOLDER --pretrained runs/pretrain-FOLDER-base/1
    livt finetune FOLDER --pretrained org/any-classifier --tune head
    livt finetune labels.csv --group_column patient --folds 5
    livt finetune cifar100-lt --source FOLDER --pretrained none --loss ce

The run folder ends up holding the checkpoint, its image processor, log.jsonl and results.json. `--help` lists the
options.
"""

import functools
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from datasets import Dataset, DatasetDict, concatenate_datasets

from livt_hf.cli.console import format_next_command, run_command
from livt_hf.cli.inherit import find_pretraining, settings_from_run
from livt_hf.cli.options import CONFIGS
from livt_hf.cli.publish import check_publishing, publish_run
from livt_hf.cli.resume import keep_automatic_options, resolve_training, start_run
from livt_hf.cli.training_settings import FinetuneSettings
from livt_hf.data import class_counts, load_dataset
from livt_hf.data.benchmarks import PUBLIC
from livt_hf.data.decoding import describe_copies
from livt_hf.data.labels import digest_of
from livt_hf.data.load import load_pool
from livt_hf.errors import LiVTError
from livt_hf.predictions.calibrate import calibrate
from livt_hf.predictions.evaluate import EvaluationReport
from livt_hf.predictions.record import FOLDER
from livt_hf.predictions.rules import LABELS
from livt_hf.reports import markdown_table
from livt_hf.reports.evaluation import fold_rows, write_report
from livt_hf.runs import Run, check_same_images
from livt_hf.text import format_accuracy, format_duration
from livt_hf.training import autotune
from livt_hf.training.finetune import (
    EpochEvaluator,
    build_finetune_results,
    build_finetune_task,
    check_finetune_options,
    compute_metrics,
    keep_predictions,
)
from livt_hf.training.folds import (
    evaluate_cross_validation,
    join_fold_results,
    predict_missing_folds,
    warn_about_seen_images,
)
from livt_hf.training.loop import TrainingLoop, finish_run, make_accelerator, open_run
from livt_hf.training.results import build_common_results
from livt_hf.training.start import build_classifier, build_processor

logger = logging.getLogger(__name__)


def finetune(
    settings: FinetuneSettings,
    dataset: DatasetDict,
    accelerator: Accelerator,
    resumed: Run | None = None,
    create_run: Callable[[FinetuneSettings], Run] = start_run,
    began: float | None = None,
) -> Run:
    """Fine-tune one classifier and return its finished run.

    Args:
        settings: the options; with `hours` the time counts from `began`.
        dataset: splits "train", "test" and perhaps "validation".
        accelerator: processes and devices.
        resumed: the run to resume.
        create_run: creates the folder of a new run.
        began: value of `autotune.clock()` at the start of the command.
    """
    prepared = autotune.clock()
    train = dataset["train"]
    settings = fit_batch_size(settings, len(train))
    check_finetune_options(
        dataset, settings.model, settings.optimization, settings.loss, settings.augmentation, settings.checkpoints
    )
    optimization = autotune.limit_epochs(settings.optimization, len(train) // settings.optimization.batch_size)
    torch.manual_seed(optimization.seed)
    model = build_classifier(train, settings.model, settings.loss, optimization, settings.augmentation)
    processor = build_processor(model, train, settings.model, settings.data.dataset)
    task = build_finetune_task(
        model,
        processor,
        dataset,
        settings.model,
        optimization,
        settings.augmentation,
        accelerator,
        settings.data.num_workers,
    )
    prepared = autotune.clock() - prepared
    if resumed is None:
        optimization = autotune.resolve_auto_options(optimization, task, accelerator, began or autotune.clock())
    settings = settings.replace(optimization=optimization)
    # Only now: what raised an error above leaves no folder behind.
    run = open_run(accelerator, lambda: resumed or create_run(settings), settings.to_dict())
    loop = TrainingLoop(task, optimization, settings.checkpoints, accelerator, run)
    loop.resume(digest_of(train))
    evaluator = EpochEvaluator(task, dataset, settings.checkpoints)
    loop.fit(evaluator)
    evaluator.restore_best(loop)
    if "validation" in dataset and loop.final_model.head.no_posterior is None:
        calibrate(loop.final_model, task.eval_batches("validation"), accelerator)
    store = keep_predictions(run.folder, dataset["test"], accelerator)
    metrics = compute_metrics(loop.final_model, task.eval_batches("test"), accelerator, class_counts(train), store)
    model = task.final_model(loop.final_model)
    fields = build_common_results(settings.stage, settings.data, settings.model.model_size, loop, model) | metrics
    fields["preparation_seconds"] = prepared
    results = build_finetune_results(fields, loop, evaluator, model, processor, settings.model.pretrained)
    finish_run(loop, model, processor, results)
    return run


def main(argv: Sequence[str] | None = None) -> None:
    """Fine-tune one classifier, or one for each fold."""
    began = autotune.clock()
    settings, resumed = resolve_training(FinetuneSettings, argv)
    settings = settings.replace(pretrained=find_pretraining(settings))
    check_publishing(settings)
    if settings.folds is not None:
        cross_validate(settings, resumed)
        return
    accelerator = make_accelerator(settings.optimization, settings.checkpoints.trackers)
    with accelerator.main_process_first():
        dataset = load_dataset(settings.data)
    if accelerator.is_main_process:
        warn_about_duplicates(dataset, settings.data.dataset)
    run = finetune(settings, dataset, accelerator, resumed, began=began)
    accelerator.end_training()
    if accelerator.is_main_process:
        print(format_summary(settings, run))
        publish_run(settings, run)


def warn_about_duplicates(splits: Mapping[str, Dataset], name: str) -> None:
    """Warn about identical images on both sides of a split; those of benchmarks are known."""
    if name not in PUBLIC and (message := describe_copies(splits)):
        logger.warning(message)


def format_summary(settings: FinetuneSettings, run: Run) -> str:
    """Return what was trained, its accuracy, its folder and the next command."""
    results = run.results
    start = "scratch" if settings.model.pretrained == "none" else settings.model.pretrained
    name = f"{settings.model.model_size} with {settings.loss.loss}"
    return (
        f"\nFine-tuned {name} on {results.num_train_images:,} images of "
        f"{settings.data.dataset}, from {start}, in {format_duration(results.seconds)}; {results.selection}.\n"
        + "".join(f"  test, {LABELS[rule]}: {format_accuracy(metrics)}\n" for rule, metrics in results.rules.items())
        + f"  checkpoint: {run.folder}"
        + format_next_command("Next, look closer", "eval", run.folder)
    )


def fit_batch_size(settings: FinetuneSettings, num_images: int) -> FinetuneSettings:
    """Reduce the batch size of a `tune` config, which is for any number of images, to what the images fill."""
    if settings.model.tune is None or settings.optimization.batch_size <= num_images:
        return settings
    if (
        settings.optimization.batch_size
        != FinetuneSettings.resolve({"tune": settings.model.tune}, CONFIGS).optimization.batch_size
    ):
        return settings  # asked for, so it raises an error
    batch_size = autotune.choose_batch_size(num_images)
    logger.info("there are only %d training images: an update takes %d of them", num_images, batch_size)
    return settings.replace(batch_size=batch_size)


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
    single = {
        "push_to_hub": settings.hub.push_to_hub,
        "hours": settings.optimization.hours,
        "fold": settings.data.fold,
    }
    for name, value in single.items():
        if value:
            message = f"{name} {value} is for one model and folds trains several; leave {name} out."
            raise LiVTError(message, argument=name)
    started, accelerator = time.monotonic(), make_accelerator(settings.optimization, settings.checkpoints.trackers)
    with accelerator.main_process_first():
        images = load_pool(fold_settings(settings, 1).data)
    if accelerator.is_main_process:
        warn_about_duplicates(images.fold_datasets(), settings.data.dataset)
        warn_about_seen_images(settings.model.pretrained, settings.data.dataset, settings.folds)
    folds = [fold_settings(settings, number) for number in range(1, settings.folds + 1)]
    for number, fold in enumerate(folds, 1):
        dataset, own = images.split(fold.data), None if run is None else run.fold(number)
        if own is not None and own.finished:
            check_same_images(own, own.results.trained_on, digest_of(dataset["train"]))
            continue
        accelerator = make_accelerator(
            settings.optimization, settings.checkpoints.trackers
        )  # a new one: it keeps the models that it has seen
        accelerator.print(f"Fold {number} of {settings.folds}", file=sys.stderr)
        if settings.checkpoints.max_hours is not None:
            fold = fold.replace(
                max_hours=max(0.0, settings.checkpoints.max_hours - (time.monotonic() - started) / 3600)
            )
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
        f"percent (decision rule: {report.default_label}); many, medium and few by the training images of a fold:\n"
        f"{markdown_table(fold_rows(report.summary))}"
        f"Report: {page}\nPredictions: {run.folder / FOLDER}\n"
        f"Next, train the model to use: the same command without --folds{batch}."
    )


def start_fold(settings: FinetuneSettings, run: Run | None, number: int, fold: FinetuneSettings) -> Run:
    """Create the run of a fold, and that of the cross-validation with the first."""
    run = run or start_run(settings)
    run.lock()
    return start_run(fold.replace(output_dir=str(run.fold(number).folder)))


if __name__ == "__main__":
    run_command(main)
