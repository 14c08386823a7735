"""Balanced fine-tuning (BFT), the second stage of LiVT.

    livt finetune                                                      # the newest finished pretraining under runs/
    livt finetune FOLDER --pretrained runs/pretrain-FOLDER-base/1
    livt finetune FOLDER --pretrained org/any-classifier --tune head
    livt finetune labels.csv --group_column patient --folds 5
    livt finetune cifar100-lt --source FOLDER --pretrained none --loss ce

The run folder ends up holding the checkpoint, its image processor, log.jsonl and results.json. `--help` lists the
options.
"""

import dataclasses
import functools
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from datasets import Dataset, DatasetDict, concatenate_datasets

from livt_hf.commands import check_publishing, publish_if_asked, run_command, what_next
from livt_hf.data import class_counts, load_dataset
from livt_hf.data.benchmarks import PUBLIC
from livt_hf.data.decoding import copies_in_words
from livt_hf.data.labels import digest_of
from livt_hf.data.load import load_pool
from livt_hf.errors import LiVTError
from livt_hf.predictions.calibrate import calibrate
from livt_hf.predictions.evaluate import EvaluationReport
from livt_hf.predictions.record import FOLDER
from livt_hf.predictions.rules import LABELS
from livt_hf.reports import markdown_table
from livt_hf.reports.evaluation import fold_rows, write_report
from livt_hf.runs import Run, check_same_images, find_pretraining, keep_settled, parse_training, start_run
from livt_hf.settings import FinetuneSettings
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
    fold_settings,
    join_fold_results,
    predict_missing_folds,
    warn_about_seen_images,
)
from livt_hf.training.loop import TrainingLoop, finish_run, make_accelerator, open_run
from livt_hf.training.results import build_common_results
from livt_hf.training.start import build_classifier, build_processor, inherit_from_checkpoint

logger = logging.getLogger(__name__)
CONFIGS = Path(__file__).parent / "configs"


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
    check_finetune_options(dataset, settings, settings, settings, settings, settings)
    settings = autotune.limit_epochs(settings, len(train) // settings.batch_size)
    torch.manual_seed(settings.seed)
    model = build_classifier(train, settings, settings, settings, settings)
    processor = build_processor(model, train, settings, settings.dataset)
    task = build_finetune_task(
        model, processor, dataset, settings, settings, settings, accelerator, settings.num_workers
    )
    prepared = autotune.clock() - prepared
    if resumed is None:
        settings = autotune.resolve_auto_options(settings, task, accelerator, began or autotune.clock())
    # Only now: what raised an error above leaves no folder behind.
    run = open_run(accelerator, lambda: resumed or create_run(settings), dataclasses.asdict(settings))
    loop = TrainingLoop(task, settings, settings, accelerator, run)
    loop.resume(digest_of(train))
    evaluator = EpochEvaluator(task, dataset, settings)
    loop.fit(evaluator)
    evaluator.restore_best(loop)
    if "validation" in dataset and loop.final_model.head.no_posterior is None:
        calibrate(loop.final_model, task.eval_batches("validation"), accelerator)
    store = keep_predictions(run.folder, dataset["test"], accelerator)
    metrics = compute_metrics(loop.final_model, task.eval_batches("test"), accelerator, class_counts(train), store)
    model = task.final_model(loop.final_model)
    fields = build_common_results(settings.stage, settings, settings.model_size, loop, model) | metrics
    fields["preparation_seconds"] = prepared
    results = build_finetune_results(fields, loop, evaluator, model, processor, settings.pretrained)
    finish_run(loop, model, processor, results)
    return run


def main(argv: Sequence[str] | None = None) -> None:
    """Fine-tune one classifier, or one for each fold."""
    began = autotune.clock()
    settings, resumed = parse_training(FinetuneSettings, argv, CONFIGS, inherit=inherit_from_checkpoint)
    settings = settings.replace(pretrained=find_pretraining(settings))
    check_publishing(settings)
    if settings.folds is not None:
        cross_validate(settings, resumed)
        return
    accelerator = make_accelerator(settings, settings.trackers)
    with accelerator.main_process_first():
        dataset = load_dataset(settings)
    if accelerator.is_main_process:
        warn_about_duplicates(dataset, settings.dataset)
    run = finetune(settings, dataset, accelerator, resumed, began=began)
    accelerator.end_training()
    if accelerator.is_main_process:
        print(format_summary(settings, run))
        publish_if_asked(settings, run)


def warn_about_duplicates(splits: Mapping[str, Dataset], name: str) -> None:
    """Warn about identical images on both sides of a split; those of benchmarks are known."""
    if name not in PUBLIC and (message := copies_in_words(splits)):
        logger.warning(message)


def format_summary(settings: FinetuneSettings, run: Run) -> str:
    """Return what was trained, its accuracy, its folder and the next command."""
    results = run.results
    start = "scratch" if settings.pretrained == "none" else settings.pretrained
    return (
        f"\nFine-tuned {settings.model_size} with {settings.loss} on {results.num_train_images:,} images of "
        f"{settings.dataset}, from {start}, in {format_duration(results.seconds)}; {results.selection}.\n"
        + "".join(f"  test, {LABELS[rule]}: {format_accuracy(metrics)}\n" for rule, metrics in results.rules.items())
        + f"  checkpoint: {run.folder}"
        + what_next("Next, look closer", "eval", run.folder)
    )


def fit_batch_size(settings: FinetuneSettings, num_images: int) -> FinetuneSettings:
    """Reduce the batch size of a `tune` config, which is for any number of images, to what the images fill."""
    if settings.tune is None or settings.batch_size <= num_images:
        return settings
    if settings.batch_size != FinetuneSettings.merged({"tune": settings.tune}, CONFIGS).batch_size:
        return settings  # asked for, so it raises an error
    batch_size = autotune.choose_batch_size(num_images)
    logger.info("there are only %d training images: an update takes %d of them", num_images, batch_size)
    return settings.replace(batch_size=batch_size)


def cross_validate(settings: FinetuneSettings, run: Run | None) -> None:
    """Fine-tune one model per fold, each in a folder below the run's, and evaluate their predictions together.

    Args:
        settings: the options of all folds.
        run: the cross-validation to resume.
    """
    for name in ("push_to_hub", "hours", "fold"):
        if getattr(settings, name):
            message = f"{name} {getattr(settings, name)} is for one model and folds trains several; leave {name} out."
            raise LiVTError(message, argument=name)
    started, accelerator = time.monotonic(), make_accelerator(settings, settings.trackers)
    with accelerator.main_process_first():
        images = load_pool(fold_settings(settings, 1))
    if accelerator.is_main_process:
        warn_about_duplicates(images.fold_datasets(), settings.dataset)
        warn_about_seen_images(settings)
    folds = [fold_settings(settings, number) for number in range(1, settings.folds + 1)]
    for number, fold in enumerate(folds, 1):
        dataset, own = images.split(fold), None if run is None else run.fold(number)
        if own is not None and own.finished:
            check_same_images(own, own.results.trained_on, digest_of(dataset["train"]))
            continue
        accelerator = make_accelerator(settings, settings.trackers)  # a new one: it keeps the models that it has seen
        accelerator.print(f"Fold {number} of {settings.folds}", file=sys.stderr)
        if settings.max_hours is not None:
            fold = fold.replace(max_hours=max(0.0, settings.max_hours - (time.monotonic() - started) / 3600))
        resumed = own if own is not None and own.started else None
        if resumed is not None:
            fold = keep_settled(fold.replace(output_dir=str(own.folder)), own)
        create = functools.partial(start_fold, settings, run, number)
        run = finetune(fold, dataset, accelerator, resumed, create).whole
    datasets = [images.split(fold) for fold in folds]
    predict_missing_folds(run, datasets, accelerator)
    if accelerator.is_main_process:
        report = evaluate_cross_validation(run, settings.dataset, datasets)
        page = write_report(run.folder / "report", report, concatenate_datasets([part["test"] for part in datasets]))
        run.write_results(join_fold_results(run, report, len(folds)))  # last of all: it marks the run as finished
        print(format_folds(settings, run, report, page))
    accelerator.end_training()


def format_folds(settings: FinetuneSettings, run: Run, report: EvaluationReport, page: Path) -> str:
    """Return the table of all folds and where their report and predictions are."""
    batch_size = run.fold(1).settings_of(FinetuneSettings)["batch_size"]
    batch = "" if batch_size == settings.batch_size else f", with --batch_size {batch_size} as here"
    return (
        f"\nCross-validated {settings.model_size} with {settings.loss} on {settings.dataset}, in percent "
        f"(decision rule: {report.default_label}); many, medium and few by the training images of a fold:\n"
        f"{markdown_table(fold_rows(report.summary))}"
        f"Report: {page}\nPredictions: {run.folder / FOLDER}\n"
        f"Next, train the model to use: the same command without --folds{batch}."
    )


def start_fold(settings: FinetuneSettings, run: Run | None, number: int, fold: FinetuneSettings) -> Run:
    """Create the run of a fold, and that of the cross-validation with the first."""
    run = run or start_run(settings)
    run.hold()
    return start_run(fold.replace(output_dir=str(run.fold(number).folder)))


if __name__ == "__main__":
    run_command(main)
