"""Balanced fine-tuning (BFT), the second stage of LiVT.

    livt finetune                                                      # the newest finished pretraining under runs/
    livt finetune FOLDER --pretrained runs/pretrain-FOLDER-base/1
    livt finetune FOLDER --pretrained org/any-classifier --tune head
    livt finetune labels.csv --group_column patient --folds 5
    livt finetune cifar100-lt --source FOLDER --pretrained none --loss ce

The run folder ends up holding the checkpoint, its image processor, log.jsonl and results.json. `--help` lists the
options.
"""

from collections.abc import Callable

import torch
from accelerate import Accelerator
from datasets import DatasetDict

from livt_hf.cli.console import format_next_command, run_command
from livt_hf.cli.copies import warn_about_copies
from livt_hf.cli.inherit import CommandLine
from livt_hf.cli.publish import publish_run
from livt_hf.cli.resume import resolve_training, start_run
from livt_hf.cli.training_settings import FinetuneSettings
from livt_hf.data import load_dataset
from livt_hf.data.labels import digest_of, is_multi_label
from livt_hf.predictions.calibrate import calibrate_if_possible
from livt_hf.results import format_rules
from livt_hf.runs import Run
from livt_hf.text import format_duration
from livt_hf.training import autotune
from livt_hf.training.finetune import (
    EpochEvaluator,
    build_finetune_results,
    build_finetune_task,
    check_finetune_options,
    choose_objective,
    write_framing_trial,
)
from livt_hf.training.loop import TrainingLoop, finish_run, make_accelerator, open_run
from livt_hf.training.solve import solve_head
from livt_hf.training.start import build_model_and_processor


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
        create_run: creates the folder of a new run; that of a fold lies in the one of its cross-validation.
        began: value of `autotune.clock()` at the start of the command.
    """
    preparation_began = autotune.clock()
    train = dataset["train"]
    settings = settings.reduce_batch_size(len(train))
    check_finetune_options(
        dataset, settings.model, settings.optimization, settings.loss, settings.augmentation, settings.checkpoints
    )
    updates_per_epoch = len(train) // settings.optimization.batch_size
    settings = settings.replace(optimization=autotune.limit_epochs(settings.optimization, updates_per_epoch))
    objective = choose_objective(settings.loss, settings.data, is_multi_label(train))
    torch.manual_seed(settings.optimization.seed)
    model, processor, trial = build_model_and_processor(
        dataset,
        settings.model,
        settings.loss,
        settings.data,
        settings.optimization,
        settings.augmentation,
        objective,
        accelerator,
    )
    if settings.model.framing == "auto":
        settings = settings.replace(framing=trial.chosen if trial else "own")  # a resumed run tries none again
    task = build_finetune_task(
        model,
        processor,
        dataset,
        settings.model,
        settings.optimization,
        settings.augmentation,
        accelerator,
        settings.data.num_workers,
    )
    if settings.model.tune == "head":
        settings = settings.replace(precision=task.precision)
    preparation_seconds = autotune.clock() - preparation_began
    if resumed is None and not settings.solvable:
        optimization = autotune.resolve_auto_options(
            settings.optimization, task, accelerator, began or autotune.clock()
        )
        settings = settings.replace(optimization=optimization)
    # Only now: what raised an error above leaves no folder behind.
    run = open_run(accelerator, lambda: resumed or create_run(settings), settings.to_dict())
    if trial is not None and accelerator.is_main_process:
        write_framing_trial(run.folder, trial)
    optimization = settings.optimization
    if settings.solvable:
        optimization = optimization.replace(ema_decay=None)  # there are no steps to average
    loop = TrainingLoop(task, optimization, settings.checkpoints, accelerator, run)
    loop.resume(digest_of(train))
    evaluator = EpochEvaluator(task, dataset, settings.checkpoints)
    if settings.solvable:
        evaluator.solution = solve_head(loop, objective)  # which calibrates on out-of-fold logits
    else:
        loop.fit(evaluator)
        evaluator.restore_best(loop)
        if "validation" in dataset:
            images, batches = dataset["validation"], task.eval_batches("validation")
            calibrate_if_possible(loop.final_model, images, batches, accelerator, "validation", objective)
    metrics = evaluator.evaluate_test(loop)
    model = task.assemble_model(loop.final_model)  # LoRA merged, or the classifier back on its backbone
    results = build_finetune_results(
        loop, evaluator, model, processor, metrics, settings.data, settings.model, preparation_seconds
    )
    finish_run(loop, model, processor, results)
    return run


def main(argv: CommandLine = None) -> None:
    """Fine-tune one classifier, or one for each fold."""
    began = autotune.clock()
    settings, resumed = resolve_training(FinetuneSettings, argv)
    if settings.folds is not None:
        from livt_hf.recipes.cross_validate import cross_validate  # which calls `finetune` for each fold

        cross_validate(settings, resumed)
        return
    accelerator = make_accelerator(settings.optimization, settings.checkpoints.trackers)
    with accelerator.main_process_first():
        dataset = load_dataset(settings.data)
    if accelerator.is_main_process:
        warn_about_copies(dataset, settings.data)
    run = finetune(settings, dataset, accelerator, resumed, began=began)
    accelerator.end_training()
    if accelerator.is_main_process:
        print(format_summary(settings, run))
        publish_run(settings, run)


def format_summary(settings: FinetuneSettings, run: Run) -> str:
    """Return what was trained, its accuracy, its folder and the next command."""
    results = run.results
    few = autotune.describe_few_epochs(results.epochs, settings.optimization.hours)
    start = "scratch" if settings.model.pretrained == "none" else settings.model.pretrained
    name = f"{settings.model.model_size} with {settings.loss.loss}"
    return (
        f"\nFine-tuned {name} on {results.num_train_images:,} images of "
        f"{settings.data.dataset}, from {start}, in {format_duration(results.seconds)}; {results.selection}.\n"
        + format_rules(results)
        + (f"{few}\n" if few else "")
        + f"  checkpoint: {run.folder}"
        + format_next_command("Next, look closer", "eval", run.folder)
    )


if __name__ == "__main__":
    run_command(main)
