"""Masked generative pretraining (MGP), the first stage of LiVT.

    accelerate launch recipes/pretrain.py                               # the embedded glyphs, two minutes on two cores
    accelerate launch recipes/pretrain.py --dataset cifar100-lt --source FOLDER
    accelerate launch recipes/pretrain.py --config recipes/configs/pretrain-imagenet-lt.yaml --source FOLDER

The run folder ends up holding a stock ViTMAE checkpoint, its image processor, log.jsonl, results.json and
reconstructions.png. `--help` lists the options.
"""

from pathlib import Path

import torch

from livt_hf import LiViTForPreTraining, pretraining_config
from livt_hf.commands import (
    counts_summary,
    image_size,
    is_native,
    launch_line,
    load_data,
    local_places,
    publish_if_asked,
    resume_message,
    run_command,
)
from livt_hf.data import class_counts, normalization
from livt_hf.data.labels import number_of_classes
from livt_hf.data.loading import eval_loader, train_loader
from livt_hf.data.transforms import DeviceTransform, PretrainAugmentation, eval_processor
from livt_hf.pretraining import held_out_images, mask_noise, reconstruction_loss, reconstruction_rows
from livt_hf.reports import reconstruction_sheet
from livt_hf.runs import parse_training, provenance
from livt_hf.settings import FinetuneArguments, PretrainArguments, parse
from livt_hf.training.loop import Interrupted, Loop, finish_run, make_accelerator, open_run

CONFIGS = Path(__file__).parent / "configs"


def main():
    arguments = parse_training(PretrainArguments, configs=CONFIGS)
    accelerator = make_accelerator(arguments)
    torch.manual_seed(arguments.seed)

    size = image_size(arguments)
    with accelerator.main_process_first():
        data = load_data(arguments, streaming=arguments.streaming)
    on_broken = arguments.on_broken if arguments.streaming else "error"  # stored data was cleaned when it was loaded
    held_out = held_out_images(data, 2000, on_broken)  # before training: what cannot be read must not stop its end
    mean, std = normalization(arguments.dataset)
    processor = eval_processor(size, mean, std, native=is_native(held_out, size))
    loader = train_loader(
        data["train"],
        PretrainAugmentation(size, scale=(arguments.crop_scale, 1.0), flip=arguments.flip),
        batch_size=arguments.batch_size,
        accumulation=arguments.accumulation,
        seed=arguments.seed,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        num_workers=arguments.num_workers,
        on_broken=on_broken,
        num_images=arguments.num_images,
    )

    overrides = {"mask_ratio": arguments.mask_ratio, "image_size": size}
    if arguments.patch_size is not None:
        overrides["patch_size"] = arguments.patch_size
    model = LiViTForPreTraining(pretraining_config(arguments.model_size, **overrides), arguments.decode_ratio)

    def loss_of(model, batch, epoch):
        noise = mask_noise(arguments.seed, epoch, batch["index"], accelerator.unwrap_model(model).num_patches)
        return model(batch["pixel_values"], noise=noise).loss

    run = open_run(accelerator, arguments)  # only now: what was refused above leaves no folder behind
    loop = Loop(accelerator, arguments, run, model, loader, loss_of, DeviceTransform(mean, std, seed=arguments.seed))
    loop.resume()
    try:
        loop.fit()
    except Interrupted:
        accelerator.print(resume_message(run, "pretrain.py"))
        raise

    test_loader = eval_loader(
        held_out, processor, batch_size=200, rank=accelerator.process_index, world_size=accelerator.num_processes
    )
    loss, zero_loss = reconstruction_loss(loop.final_model, test_loader, accelerator, arguments.seed)
    results = {
        "stage": "pretrain",
        "model_size": arguments.model_size,
        "parameters": sum(p.numel() for p in loop.final_model.parameters()),
        "image_size": size,
        "dataset": arguments.dataset,
        "imbalance_factor": arguments.imbalance_factor,
        "num_train_images": loader.num_images,
        "num_classes": number_of_classes(data["train"]),
        "class_counts": None if arguments.streaming else counts_summary(class_counts(data["train"])),
        "mask_ratio": arguments.mask_ratio,
        "decode_ratio": arguments.decode_ratio,
        "epochs": arguments.epochs,
        "updates": loop.progress.update,
        "seed": arguments.seed,
        "weights": "model" if arguments.ema_decay is None else "ema",
        "metrics": {"loss": loss, "zero_prediction_loss": zero_loss},
        "seconds": loop.progress.seconds,
    }
    results |= local_places(arguments) | provenance()
    if accelerator.is_main_process:
        rows = reconstruction_rows(loop.final_model, held_out, processor, arguments.seed)
        reconstruction_sheet(rows, run.folder / "reconstructions.png", ["image", "masked", "reconstruction"])
    finish_run(loop, run, processor, results)
    # A small folder has fewer images than fine-tuning takes an update by default; the command printed must run.
    default = parse(FinetuneArguments, ["--dataset", arguments.dataset], CONFIGS).batch_size
    smaller = f" --batch_size {arguments.batch_size}" if default > loader.num_images else ""
    accelerator.print(
        f"\nPretrained {arguments.model_size} on {loader.num_images:,} images of {arguments.dataset} "
        f"for {loop.progress.update:,} updates in {loop.progress.seconds / 60:.1f} minutes.\n"
        f"  loss on held-out images  {loss:.3f}  (predicting zero: {zero_loss:.3f})\n"
        f"  checkpoint               {run.folder}  (a stock ViTMAE)\n"
        f"  look at                  {run.folder / 'reconstructions.png'}\n"
        f"Next, fine-tune it:\n  {launch_line('finetune.py', '--pretrained', run)}{smaller}"
    )
    if accelerator.is_main_process:
        publish_if_asked(arguments, run)


if __name__ == "__main__":
    run_command(main)
