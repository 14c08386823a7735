"""Masked generative pretraining (MGP), the first stage of LiVT.

    livt pretrain                                                      # the embedded glyphs, two minutes on two cores
    livt pretrain FOLDER --model_size small --hours 8
    livt --multi_gpu --num_processes 8 pretrain imagenet-lt --source FOLDER
    accelerate launch recipes/pretrain.py --config recipes/configs/pretrain-imagenet-lt.yaml --source FOLDER

The run folder ends up holding a stock ViTMAE checkpoint, its image processor, log.jsonl, results.json and
reconstructions.png. `--help` lists the options.
"""

import torch
from accelerate import Accelerator

from livt_hf.cli.console import format_next_command, run_command
from livt_hf.cli.inherit import CommandLine
from livt_hf.cli.publish import publish_run
from livt_hf.cli.resume import resolve_training, start_run
from livt_hf.cli.training_settings import PretrainSettings
from livt_hf.data import class_counts, eval_loader, eval_processor, load_dataset, normalization
from livt_hf.data.batches import build_eval_batches
from livt_hf.data.decoding import is_native
from livt_hf.data.labels import digest_of, number_of_classes
from livt_hf.reports import reconstruction_sheet
from livt_hf.results import Results
from livt_hf.runs import Run
from livt_hf.text import format_duration
from livt_hf.training import autotune
from livt_hf.training.loop import TrainingLoop, finish_run, make_accelerator, open_run, track_picture
from livt_hf.training.pretrain import (
    build_pretrain_task,
    choose_image_size,
    compute_reconstruction_loss,
    format_update_advice,
    reconstruct_examples,
    select_eval_images,
)
from livt_hf.training.results import build_common_results, summarize_class_counts


def pretrain(
    settings: PretrainSettings, accelerator: Accelerator, resumed: Run | None = None, began: float | None = None
) -> Run:
    """Pretrain a ViT and return its finished run.

    Args:
        settings: the options; with `hours` the time counts from `began`.
        accelerator: processes and devices.
        resumed: the run to resume.
        began: value of `autotune.clock()` at the start of the command.
    """
    torch.manual_seed(settings.optimization.seed)
    with accelerator.main_process_first():
        dataset = load_dataset(settings.data, streaming=settings.streaming)
    train, size = dataset["train"], choose_image_size(settings.model)
    if not settings.streaming:
        settings = settings.reduce_batch_size(len(train))
    # Stored data was cleaned when it was loaded.
    on_broken = settings.data.on_broken if settings.streaming else "error"
    held_out = select_eval_images(dataset, 2000, on_broken)
    processor = eval_processor(size, *normalization(settings.data.dataset), native=is_native(held_out, size))
    task = build_pretrain_task(
        train,
        settings.model,
        settings.optimization,
        settings.augmentation,
        processor,
        accelerator,
        settings.data.num_workers,
        on_broken,
    )
    optimization = autotune.limit_epochs(settings.optimization, task.loader.updates_per_epoch)
    if resumed is None:
        optimization = autotune.resolve_auto_options(optimization, task, accelerator, began or autotune.clock())
    settings = settings.replace(optimization=optimization)
    # Only now: what raised an error above leaves no folder behind.
    run = open_run(accelerator, lambda: resumed or start_run(settings), settings.to_dict())
    loop = TrainingLoop(task, optimization, settings.checkpoints, accelerator, run)
    loop.resume(digest_of(train))
    loop.fit()

    batches = eval_loader(held_out, processor, build_eval_batches(200, accelerator))
    loss, zero_loss = compute_reconstruction_loss(loop.final_model, batches, accelerator, settings.optimization.seed)
    if accelerator.is_main_process:
        rows = reconstruct_examples(loop.final_model, held_out, processor, settings.optimization.seed)
        sheet = reconstruction_sheet(rows, run.folder / "reconstructions.png", ["image", "masked", "reconstruction"])
        track_picture(accelerator, "reconstructions", sheet, loop.progress.update)
    results = Results(
        **build_common_results(settings.stage, settings.data, settings.model.model_size, loop, loop.final_model),
        image_size=size,
        num_train_images=task.loader.num_images,
        num_classes=number_of_classes(train) if "label" in train.features else None,
        class_counts=None if settings.streaming else summarize_class_counts(class_counts(train)),
        mask_ratio=settings.model.mask_ratio,
        decode_ratio=settings.model.decode_ratio,
        metrics={"loss": loss, "zero_prediction_loss": zero_loss},
    )
    finish_run(loop, loop.final_model, processor, results)
    return run


def main(argv: CommandLine = None) -> None:
    """Pretrain, print what came out, and publish it if asked to."""
    began = autotune.clock()
    settings, resumed = resolve_training(PretrainSettings, argv)
    accelerator = make_accelerator(settings.optimization, settings.checkpoints.trackers)
    run = pretrain(settings, accelerator, resumed, began)
    accelerator.end_training()
    if accelerator.is_main_process:
        print(format_summary(settings, run))
        publish_run(settings, run)


def format_summary(settings: PretrainSettings, run: Run) -> str:
    """Return the loss, the folder and the next command."""
    results = run.results
    loss, zero_loss = results.metrics["loss"], results.metrics["zero_prediction_loss"]
    advice = format_update_advice(loss, zero_loss, results.updates)
    return (
        f"\nPretrained {settings.model.model_size} on {results.num_train_images:,} images of {settings.data.dataset} "
        f"for {results.updates:,} updates in {format_duration(results.seconds)}.\n"
        f"  loss on held-out images  {loss:.3f}  (predicting zero: {zero_loss:.3f})\n"
        + (f"  warning                  {advice}\n" if advice else "")
        + f"  checkpoint               {run.folder}  (a stock ViTMAE)\n"
        f"  look at                  {run.folder / 'reconstructions.png'}"
        + format_next_command("Next, fine-tune it", "finetune", "--pretrained", run.folder)
    )


if __name__ == "__main__":
    run_command(main)
