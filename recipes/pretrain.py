"""Masked generative pretraining (MGP), the first stage of LiVT.

    livt pretrain                                                      # the embedded glyphs, two minutes on two cores
    livt pretrain cifar100-lt --source FOLDER
    accelerate launch recipes/pretrain.py --config recipes/configs/pretrain-imagenet-lt.yaml --source FOLDER

The run folder ends up holding a stock ViTMAE checkpoint, its image processor, log.jsonl, results.json and
reconstructions.png. `--help` lists the options.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from livt_hf.commands import check_publishing, publish_if_asked, run_command, what_next
from livt_hf.data import (
    DeviceTransform,
    PretrainAugmentation,
    class_counts,
    eval_loader,
    eval_processor,
    load_data,
    normalization,
    train_loader,
)
from livt_hf.data.batches import build_eval_batches
from livt_hf.data.decoding import is_native
from livt_hf.data.labels import digest_of, number_of_classes
from livt_hf.modeling_livit_mae import LiViTForPreTraining, pretraining_config
from livt_hf.reports import reconstruction_sheet
from livt_hf.results import Results
from livt_hf.runs import Run, parse_training
from livt_hf.settings import FinetuneSettings, PretrainSettings
from livt_hf.text import format_duration
from livt_hf.training import autotune
from livt_hf.training.autotune import resolve_auto_options
from livt_hf.training.loop import TrainingLoop, TrainingTask, finish_run, make_accelerator, open_run, track_picture
from livt_hf.training.pretrain import (
    compute_reconstruction_loss,
    draw_mask_noise,
    format_update_advice,
    reconstruct_examples,
    select_eval_images,
)
from livt_hf.training.results import (
    build_batches,
    build_common_results,
    image_size,
    limit_epochs,
    summarize_class_counts,
)

CONFIGS = Path(__file__).parent / "configs"


def main(argv: Sequence[str] | None = None) -> None:
    began = autotune.clock()
    settings, resumed = parse_training(PretrainSettings, argv, CONFIGS)
    check_publishing(settings)
    accelerator = make_accelerator(settings)
    torch.manual_seed(settings.seed)

    size = image_size(settings)
    with accelerator.main_process_first():
        data = load_data(settings, streaming=settings.streaming)
    on_broken = settings.on_broken if settings.streaming else "error"  # stored data was cleaned when it was loaded
    held_out = select_eval_images(data, 2000, on_broken)  # before training: what cannot be read must not stop its end
    mean, std = normalization(settings.dataset)
    processor = eval_processor(size, mean, std, native=is_native(held_out, size))
    augmentation = PretrainAugmentation(size, scale=(settings.crop_scale, 1.0), flip=settings.flip)
    batches = build_batches(settings, accelerator)
    loader = train_loader(data["train"], augmentation, batches, on_broken=on_broken)
    limit_epochs(settings, loader.updates_per_epoch)

    overrides = {"mask_ratio": settings.mask_ratio, "image_size": size}
    if settings.patch_size is not None:
        overrides["patch_size"] = settings.patch_size
    model = LiViTForPreTraining(pretraining_config(settings.model_size, **overrides), settings.decode_ratio)
    num_patches, transform = model.num_patches, DeviceTransform(mean, std, seed=settings.seed)

    def compute_loss(model, batch, step):
        batch = transform(batch, **vars(step))
        noise = draw_mask_noise(settings.seed, step.epoch, batch["index"], num_patches)
        return model(batch["pixel_values"], noise=noise).loss

    task = TrainingTask(model, loader, compute_loss)
    if resumed is None:
        resolve_auto_options(settings, accelerator, began, task)
    run = open_run(accelerator, settings, resumed)  # only now: what was refused above leaves no folder behind
    loop = TrainingLoop(accelerator, settings, run, task)
    loop.resume(digest_of(data["train"]))
    loop.fit()

    test_loader = eval_loader(held_out, processor, build_eval_batches(200, accelerator))
    loss, zero_loss = compute_reconstruction_loss(loop.final_model, test_loader, accelerator, settings.seed)
    if accelerator.is_main_process:
        rows = reconstruct_examples(loop.final_model, held_out, processor, settings.seed)
        sheet = reconstruction_sheet(rows, run.folder / "reconstructions.png", ["image", "masked", "reconstruction"])
        track_picture(accelerator, "reconstructions", sheet, loop.progress.update)
    results = Results(
        **build_common_results(settings, loop, loop.final_model),
        image_size=size,
        num_train_images=loader.num_images,
        num_classes=number_of_classes(data["train"]) if "label" in data["train"].features else None,
        class_counts=None if settings.streaming else summarize_class_counts(class_counts(data["train"])),
        mask_ratio=settings.mask_ratio,
        decode_ratio=settings.decode_ratio,
        metrics={"loss": loss, "zero_prediction_loss": zero_loss},
    )
    finish_run(loop, loop.final_model, processor, results)
    accelerator.end_training()
    accelerator.print(in_words(settings, run, results))
    if accelerator.is_main_process:
        publish_if_asked(settings, run)


def in_words(settings: PretrainSettings, run: Run, results: Results) -> str:
    """What came out, where it is, and the next command."""
    loss, zero_loss = results.metrics["loss"], results.metrics["zero_prediction_loss"]
    advice = format_update_advice(loss, zero_loss, results.updates)
    # A small folder has fewer images than fine-tuning takes per update by default; the command printed must run.
    default = FinetuneSettings.merged({"dataset": settings.dataset}, CONFIGS).batch_size
    left = int(0.9 * results.num_train_images)  # the rest may be held out
    smaller = ["--batch_size", str(autotune.choose_batch_size(left))] if default > left else []
    return (
        f"\nPretrained {settings.model_size} on {results.num_train_images:,} images of {settings.dataset} "
        f"for {results.updates:,} updates in {format_duration(results.seconds)}.\n"
        f"  loss on held-out images  {loss:.3f}  (predicting zero: {zero_loss:.3f})\n"
        + (f"  warning                  {advice}\n" if advice else "")
        + f"  checkpoint               {run.folder}  (a stock ViTMAE)\n"
        f"  look at                  {run.folder / 'reconstructions.png'}"
        + what_next("Next, fine-tune it", "finetune", "--pretrained", run.folder, *smaller)
    )


if __name__ == "__main__":
    run_command(main)
