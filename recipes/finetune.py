"""Balanced fine-tuning (BFT), the second stage of LiVT.

    livt finetune                                                      # the newest finished pretraining under runs/
    livt finetune FOLDER --pretrained runs/pretrain-FOLDER-base/1
    livt finetune FOLDER --pretrained org/any-classifier --tune head
    livt finetune labels.csv --group_column patient --folds 5
    livt finetune cifar100-lt --source FOLDER --pretrained none --loss ce

The run folder ends up holding the checkpoint, its image processor, log.jsonl and results.json. `--help` lists the
options.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from datasets import Dataset, DatasetDict
from tqdm.auto import tqdm

from livt_hf.commands import accuracy_line, check_publishing, publish_if_asked, run_command, what_next
from livt_hf.crossvalidation import examine_folds, fold_settings, say_what_was_seen, write_fold, write_whole
from livt_hf.data import Batches, class_counts, load_data
from livt_hf.data.benchmarks import PUBLIC
from livt_hf.data.decoding import copies_in_words
from livt_hf.data.labels import digest_of
from livt_hf.data.sources import load_images
from livt_hf.errors import LiVTError
from livt_hf.evaluation.estimation import calibrate
from livt_hf.evaluation.tables import ANSWERS
from livt_hf.processors import read_input_spec
from livt_hf.reports import markdown_table
from livt_hf.reports.evaluation import fold_rows
from livt_hf.results import Results
from livt_hf.runs import Run, check_same_images, find_pretraining, keep_settled, parse_training
from livt_hf.settings import FinetuneSettings
from livt_hf.text import format_duration
from livt_hf.training import autotune
from livt_hf.training.autotune import resolve_auto_options
from livt_hf.training.finetune import (
    BestCheckpoint,
    FinetuneTask,
    build_finetune_task,
    build_results,
    check_options,
    choose_selection_metric,
    measure,
)
from livt_hf.training.loop import TrainingLoop, TrainingTask, claim_run_folder, finish_run, make_accelerator, open_run
from livt_hf.training.results import limit_epochs
from livt_hf.training.start import build_classifier, build_processor, inherit_from_checkpoint

logger = logging.getLogger(__name__)
CONFIGS = Path(__file__).parent / "configs"


def main(argv: Sequence[str] | None = None) -> None:
    began = autotune.clock()
    settings, resumed = parse_training(FinetuneSettings, argv, CONFIGS, inherit=inherit_from_checkpoint)
    settings.pretrained = find_pretraining(settings)
    check_publishing(settings)
    if settings.folds is not None:
        cross_validate(settings, resumed)
        return
    accelerator = make_accelerator(settings)
    with accelerator.main_process_first():
        data = load_data(settings)
    say_copies(settings, data, accelerator)

    def opened(task: TrainingTask) -> Run:
        if resumed is None:
            resolve_auto_options(settings, accelerator, began, task)
        return open_run(accelerator, settings, resumed)

    run, results = finetune(settings, data, accelerator, opened)
    accelerator.end_training()
    start = "scratch" if settings.pretrained == "none" else settings.pretrained
    accelerator.print(
        f"\nFine-tuned {settings.model_size} with {settings.loss} on {results.num_train_images:,} images of "
        f"{settings.dataset}, from {start}, in {format_duration(results.seconds)}; {results.selection}.\n"
        + "".join(f"  test, {rule}: {accuracy_line(metrics)}\n" for rule, metrics in results.rules.items())
        + f"  checkpoint: {run.folder}"
        + what_next("Next, look closer", "eval", run.folder)
    )
    if accelerator.is_main_process:
        publish_if_asked(settings, run)


def say_copies(settings: FinetuneSettings, splits: Mapping[str, Dataset], accelerator: Accelerator) -> None:
    """Warn of identical images on both sides of a split; those of benchmarks are what they are."""
    if accelerator.is_main_process and settings.dataset not in PUBLIC:
        words = copies_in_words(splits)
        if words is not None:
            logger.warning(words)


def finetune(
    settings: FinetuneSettings, data: DatasetDict, accelerator: Accelerator, opened: Callable[[TrainingTask], Run]
) -> tuple[Run, Results]:
    """One model from its start to its results. `opened` gives the run's folder once all is ready to train."""
    began = autotune.clock()
    fill_batch(settings, len(data["train"]), accelerator)
    check_options(settings, data)
    limit_epochs(settings, Batches(settings.batch_size).updates(len(data["train"])))
    torch.manual_seed(settings.seed)
    model = build_classifier(settings, data["train"])
    processor = build_processor(settings, data["train"], model)
    task = build_finetune_task(settings, data, model, processor, accelerator)
    prepared = autotune.clock()
    run = opened(task)  # only now: what was refused above leaves no folder behind
    loop = TrainingLoop(accelerator, settings, run, task)
    loop.resume(digest_of(data["train"]))
    fit(loop, task, data)
    if "validation" in data and loop.final_model.head.no_posterior is None:
        calibrate(loop.final_model, task.eval_batches("validation"), accelerator)
    measured = measure(loop.final_model, task.eval_batches("test"), accelerator, class_counts(data["train"]))
    if settings.fold is not None:
        write_fold(run, loop.final_model, task.eval_batches("test"), data, accelerator)
    published = task.published(loop.final_model)
    results = build_results(settings, data, loop, published, measured)
    results.image_size, results.preparation_seconds = read_input_spec(processor).size, prepared - began
    finish_run(loop, published, processor, results)
    return run, results


def fill_batch(settings: FinetuneSettings, num_images: int, accelerator: Accelerator) -> None:
    """The configs of `--tune` are for any number of images: those that do not fill their batch make a smaller one."""
    if settings.tune is None or settings.batch_size <= num_images:
        return
    if settings.batch_size == FinetuneSettings.merged({"tune": settings.tune}, CONFIGS).batch_size:  # not asked for
        settings.batch_size = autotune.choose_batch_size(num_images)
        said = f"there are only {num_images} training images: an update takes {settings.batch_size} of them"
        accelerator.print(said, file=sys.stderr)


def fit(loop: TrainingLoop, task: FinetuneTask, data: DatasetDict) -> None:
    """Train, with a look at the validation split now and then."""
    settings, accelerator, counts = loop.settings, loop.accelerator, class_counts(data["train"])
    best = BestCheckpoint(loop) if settings.select == "best" else None
    watched = "validation" if "validation" in data else "test"

    def before_epoch(epoch):
        loop.bare_model.head.set_epoch(epoch, settings.epochs)

    def after_epoch(epoch):
        if (epoch + 1) % settings.eval_epochs and loop.progress.update != loop.total:
            return None
        metrics = measure(loop.final_model, task.eval_batches(watched), accelerator, counts)["metrics"]
        if best is not None:
            best.consider(epoch + 1, metrics[choose_selection_metric(settings, loop.final_model.head.multi_label)])
        if accelerator.is_main_process:
            tqdm.write(f"epoch {epoch + 1}  {accuracy_line(metrics)}", file=sys.stderr)  # above the progress bar
        return metrics

    loop.fit(before_epoch, after_epoch)
    if best is not None:
        best.restore()


def cross_validate(settings: FinetuneSettings, run: Run | None) -> None:
    """One model for each fold, in a folder of its own below the run's; then the numbers of all folds together."""
    if settings.push_to_hub:
        raise LiVTError("a cross-validation has no model of its own to publish; leave --push_to_hub out.")
    if settings.hours is not None:
        raise LiVTError("--hours fits the epochs of one model to a time; with --folds give --epochs instead.")
    if settings.fold is not None:
        raise LiVTError(f"--folds {settings.folds} goes through all folds; leave --fold {settings.fold} out.")
    started, accelerator = time.monotonic(), make_accelerator(settings)
    with accelerator.main_process_first():
        images = load_images(fold_settings(settings, 1))
    say_copies(settings, images.by_fold(), accelerator)
    if accelerator.is_main_process:
        say_what_was_seen(settings)
    folds = [fold_settings(settings, number) for number in range(1, settings.folds + 1)]
    for number, fold in enumerate(folds, 1):
        if run is not None and (done := run.fold(number)).finished:
            check_same_images(done, done.results.trained_on, digest_of(images.divided(fold)["train"]))
            continue
        accelerator = make_accelerator(settings)  # a new one: it keeps the models that it has seen
        if settings.max_hours is not None:
            fold.max_hours = max(0.0, settings.max_hours - (time.monotonic() - started) / 3600)

        def opened(task, fold=fold, number=number, accelerator=accelerator):
            nonlocal run
            run = run or claim_run_folder(accelerator, settings, None)
            own = run.fold(number)
            fold.output_dir = str(own.folder)
            begun = own.started
            if begun:
                keep_settled(fold, own)
            else:
                resolve_auto_options(fold, accelerator, autotune.clock(), task)
            return open_run(accelerator, fold, own if begun else None)

        accelerator.print(f"Fold {number} of {settings.folds}", file=sys.stderr)
        finetune(fold, images.divided(fold), accelerator, opened)
    own = run.fold(1).settings_of(FinetuneSettings)["batch_size"]
    batch = "" if own == settings.batch_size else f", with --batch_size {own} as here"
    found, tested = examine_folds(run, [images.divided(fold) for fold in folds], accelerator)
    if accelerator.is_main_process:
        report = write_whole(run, settings, found, tested)
        print(
            f"\nCross-validated {settings.model_size} with {settings.loss} on {settings.dataset}, in percent, by the "
            f"rule “{next(iter(found.summary['rules']))}”; many, medium and few by the training images of a fold:\n"
            f"{markdown_table(fold_rows(found.summary))}"
            f"Report: {report}\nPredictions: {run.folder / ANSWERS}\n"
            f"Next, train the model to use: the same command without --folds{batch}."
        )
    accelerator.end_training()


if __name__ == "__main__":
    run_command(main)
