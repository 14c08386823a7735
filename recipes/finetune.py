"""Balanced fine-tuning (BFT), the second stage of LiVT.

    livt finetune                                                      # the newest finished pretraining under runs/
    livt finetune --dataset FOLDER --pretrained runs/pretrain-FOLDER-base/1
    livt finetune --dataset FOLDER --pretrained org/any-classifier --tune head
    livt finetune --dataset cifar100-lt --source FOLDER --pretrained none --loss ce

The run folder ends up holding the checkpoint, its image processor, log.jsonl and results.json. `--help` lists the
options.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm.auto import tqdm

from livt_hf import budget
from livt_hf.backbones import build_classifier, input_facts, lent_by_checkpoint, serving_processor
from livt_hf.commands import (
    accuracy_line,
    check_publishing,
    next_command,
    publish_if_asked,
    resume_message,
    run_command,
)
from livt_hf.data import class_counts, load_data
from livt_hf.errors import Interrupted
from livt_hf.evaluation.estimation import calibrate
from livt_hf.evaluation.rules import PAPER, UNIFORM
from livt_hf.finetuning import BestWeights, check_options, measure, plan_course, results_of
from livt_hf.runs import find_pretraining, parse_training
from livt_hf.settings import FinetuneSettings
from livt_hf.training.loop import Loop, finish_run, make_accelerator, open_run
from livt_hf.training.trial import settle

CONFIGS = Path(__file__).parent / "configs"


def main(argv: Sequence[str] | None = None) -> None:
    began = budget.clock()
    settings, resumed = parse_training(FinetuneSettings, argv, CONFIGS, inherit=lent_by_checkpoint)
    settings.pretrained = find_pretraining(settings)
    check_publishing(settings)
    accelerator = make_accelerator(settings)
    with accelerator.main_process_first():
        data = load_data(settings)
    check_options(settings, data)
    torch.manual_seed(settings.seed)

    counts = class_counts(data["train"])
    model = build_classifier(settings, data["train"])
    processor = serving_processor(settings, data["train"], model)
    course = plan_course(settings, data, model, processor, accelerator)
    if resumed is None:
        settle(settings, accelerator, began, course.module, course.loader, course.loss_of)
    run = open_run(accelerator, settings, resumed)  # only now: what was refused above leaves no folder behind
    loop = Loop(accelerator, settings, run, course.module, course.loader, course.loss_of)
    loop.resume()
    best = BestWeights(loop) if settings.select == "best" else None
    watched = "validation" if "validation" in data else "test"

    def before_epoch(epoch):
        loop.bare_model.head.set_epoch(epoch, settings.epochs)

    def after_epoch(epoch):
        if (epoch + 1) % settings.eval_epochs and loop.progress.update != loop.total:
            return None
        metrics = measure(loop.final_model, course.batches_of(watched), accelerator, counts)["metrics"]
        if best is not None:
            best.consider(epoch + 1, metrics.get("accuracy", metrics.get("map")))
        if accelerator.is_main_process:
            tqdm.write(f"epoch {epoch + 1}  {accuracy_line(metrics)}", file=sys.stderr)  # above the progress bar
        return metrics

    try:
        loop.fit(before_epoch, after_epoch)
    except Interrupted:
        accelerator.print(resume_message(run, "finetune"))
        raise

    if best is not None:
        best.restore()
    if "validation" in data and loop.final_model.head.no_posterior is None:
        calibrate(loop.final_model, course.batches_of("validation"), accelerator)
    measured = measure(loop.final_model, course.batches_of("test"), accelerator, counts)
    published = course.published(loop.final_model)
    results = results_of(settings, data, loop, published, measured)
    results.image_size = input_facts(processor).size
    finish_run(loop, published, processor, results)
    start = "scratch" if settings.pretrained == "none" else settings.pretrained
    accelerator.print(
        f"\nFine-tuned {settings.model_size} with {settings.loss} on {results.num_train_images:,} images of "
        f"{settings.dataset}, from {start}, in {loop.progress.seconds / 60:.1f} minutes.\n"
        f"  test, {PAPER}: {accuracy_line(results.metrics)}, {results.selection}\n"
        + (f"  test, {UNIFORM}: {accuracy_line(results.posterior)}\n" if results.posterior else "")
        + f"  checkpoint: {run.folder}\n"
        f"Next, look closer:\n  {next_command('eval', '--model', run)}"
    )
    if accelerator.is_main_process:
        publish_if_asked(settings, run)


if __name__ == "__main__":
    run_command(main)
