"""Balanced fine-tuning (BFT), the second stage of LiVT.

    accelerate launch recipes/finetune.py                               # the newest finished pretraining under runs/
    accelerate launch recipes/finetune.py --dataset FOLDER --pretrained runs/pretrain-FOLDER-base/1
    accelerate launch recipes/finetune.py --dataset cifar100-lt --source FOLDER --pretrained none --loss ce

The run folder ends up holding a LiViT checkpoint, its image processor, log.jsonl and results.json. `--help` lists the
options.
"""

import sys
from pathlib import Path

import torch

from livt_hf.commands import accuracy_line, launch_line, load_data, publish_if_asked, resume_message, run_command
from livt_hf.data import class_counts
from livt_hf.data.labels import number_of_classes
from livt_hf.data.loading import train_loader
from livt_hf.data.transforms import DeviceTransform
from livt_hf.finetuning import (
    BestWeights,
    build_classifier,
    check_options,
    finetune_augmentation,
    inherited_options,
    measure,
    resolve_pretrained,
    results_of,
    serving_processor,
)
from livt_hf.runs import parse_training
from livt_hf.settings import FinetuneArguments
from livt_hf.training.loop import Interrupted, Loop, finish_run, make_accelerator, open_run

CONFIGS = Path(__file__).parent / "configs"


def main():
    argv = inherited_options(sys.argv[1:]) + sys.argv[1:]
    arguments = parse_training(FinetuneArguments, argv, configs=CONFIGS)
    resolve_pretrained(arguments)
    accelerator = make_accelerator(arguments)
    with accelerator.main_process_first():
        data = load_data(arguments)
    check_options(arguments, data)
    torch.manual_seed(arguments.seed)

    counts = class_counts(data["train"])
    model = build_classifier(arguments, data["train"])
    processor = serving_processor(arguments, data["train"], model.config.image_size)
    loader = train_loader(
        data["train"],
        finetune_augmentation(arguments, processor),
        batch_size=arguments.batch_size,
        accumulation=arguments.accumulation,
        seed=arguments.seed,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        num_workers=arguments.num_workers,
    )
    transform = DeviceTransform(
        processor.image_mean,
        processor.image_std,
        erase=arguments.erase,
        mixup=arguments.mixup,
        cutmix=arguments.cutmix,
        num_classes=number_of_classes(data["train"]),
        seed=arguments.seed,
    )
    run = open_run(accelerator, arguments)  # only now: what was refused above leaves no folder behind
    loop = Loop(
        accelerator,
        arguments,
        run,
        model,
        loader,
        lambda model, batch, epoch: model(batch["pixel_values"], labels=batch["labels"]).loss,
        transform,
    )
    loop.resume()
    best = BestWeights(loop) if arguments.select == "best" else None
    watched = data["validation"] if "validation" in data else data["test"]

    def before_epoch(epoch):
        loop.bare_model.head.set_epoch(epoch, arguments.epochs)

    def after_epoch(epoch):
        if (epoch + 1) % arguments.eval_epochs and loop.progress.update != loop.total:
            return None
        metrics = measure(loop.final_model, watched, processor, accelerator, arguments)["metrics"]
        if best is not None:
            best.consider(epoch + 1, metrics.get("accuracy", metrics.get("map")))
        return metrics

    try:
        loop.fit(before_epoch, after_epoch)
    except Interrupted:
        accelerator.print(resume_message(run, "finetune.py"))
        raise

    if best is not None:
        best.restore()
    measured = measure(loop.final_model, data["test"], processor, accelerator, arguments)
    results = results_of(arguments, loop, counts, measured)
    finish_run(loop, run, processor, results)
    start = "scratch" if arguments.pretrained == "none" else arguments.pretrained
    accelerator.print(
        f"\nFine-tuned {arguments.model_size} with {arguments.loss} on {loader.num_images:,} images of "
        f"{arguments.dataset}, from {start}, in {loop.progress.seconds / 60:.1f} minutes.\n"
        f"  test        {accuracy_line(results['metrics'])}, {results['selection']}\n"
        f"  checkpoint  {run.folder}\n"
        f"Next, look closer:\n  {launch_line('eval.py', '--model', run)}"
    )
    if accelerator.is_main_process:
        publish_if_asked(arguments, run)


if __name__ == "__main__":
    run_command(main)
