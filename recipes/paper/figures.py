"""The paper's pictures, made from formulas and from your runs.

python recipes/paper/figures.py biases FOLDER                 # Theorem 1 against 3, over pi and over gamma
python recipes/paper/figures.py curves FILE.png RUN...        # loss, rate and accuracy of one or several runs
python recipes/paper/figures.py reconstructions FILE.png RUN...   # pretraining runs on the same images and masks
python recipes/paper/figures.py sizes FILE.png RUN...         # accuracy over the number of parameters
"""

import argparse
import itertools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoImageProcessor

from livt_hf import LiViTForPreTraining
from livt_hf.cli.console import run_command
from livt_hf.data import load_dataset
from livt_hf.errors import LiVTError
from livt_hf.predictions.rules import ARGMAX
from livt_hf.recipes.paper.biases import bias_by_gamma, bias_curves
from livt_hf.reports import reconstruction_sheet, training_curves
from livt_hf.reports.style import PALETTE, new_figure, plain, save
from livt_hf.run_data import data_spec_from_run
from livt_hf.runs import LOG, RESULTS, Run
from livt_hf.training.pretrain import reconstruct_examples, select_eval_images


def curves(file: Path, runs: list[Run]) -> Path:
    return training_curves({str(run.folder): run.folder / LOG for run in runs}, file)


@torch.no_grad()
def reconstructions(file: Path, runs: list[Run]) -> Path:
    """Draw one column per run; images, masks and processor are those of the first run's data."""
    images = select_eval_images(load_dataset(data_spec_from_run(runs[0])), 8)
    processor = AutoImageProcessor.from_pretrained(runs[0].folder)
    models = [LiViTForPreTraining.from_pretrained(run.folder) for run in runs]
    sizes = {(model.config.image_size, model.config.patch_size, model.config.mask_ratio) for model in models}
    if len(sizes) > 1:
        raise LiVTError(f"the runs differ in image size, patch size or mask ratio {sorted(sizes)}: no common masks.")
    first, *others = [reconstruct_examples(model, images, processor, seed=0) for model in models]
    rows = [[*row, *(other[number][2] for other in others)] for number, row in enumerate(first)]
    return reconstruction_sheet(rows, file, ["image", "masked", *(str(run.folder) for run in runs)])


def sizes(file: Path, runs: list[Run]) -> Path:
    """Draw one line per loss and start, as the paper has them for LiVT, MAE and what is trained from scratch."""
    lines = defaultdict(list)
    for results in (run.results for run in runs):
        start = ", from scratch" if results.pretrained == "none" else ""
        metrics = results.rules.get(ARGMAX, results.metrics)
        lines[results.loss + start].append((results.parameters / 1e6, 100 * metrics["accuracy"]))
    figure = new_figure(6, 4.2)
    ax = plain(figure.add_subplot(), "million parameters", "accuracy (%)")
    for (label, points), colour in zip(lines.items(), itertools.cycle(PALETTE), strict=False):
        ax.plot(*zip(*sorted(points), strict=True), marker="o", color=colour, label=label)
    ax.legend(frameon=False)
    return save(figure, file)


OF_RUNS = {"curves": curves, "reconstructions": reconstructions, "sizes": sizes}
STAGES = {"reconstructions": "pretrain", "sizes": "finetune"}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=["biases", *OF_RUNS])
    parser.add_argument("output", type=Path)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN")
    arguments = parser.parse_args(argv)
    runs = [Run(folder) for folder in arguments.runs]
    if arguments.figure == "biases":
        print(bias_curves(arguments.output / "bias-over-prior.png"))
        print(bias_by_gamma(arguments.output / "bias-over-gamma.png"))
        return
    if not runs:
        raise LiVTError(f"{arguments.figure} needs the folder of at least one run.")
    needed = LOG if arguments.figure == "curves" else RESULTS
    for run in runs:
        if not (run.folder / needed).exists():
            raise LiVTError(f"{run.folder} has no {needed}: name the folder of a run, runs/GROUP/NUMBER.")
        if arguments.figure in STAGES and run.results.stage != STAGES[arguments.figure]:
            raise LiVTError(
                f"{arguments.figure} needs {STAGES[arguments.figure]} runs; {run.folder} is of the other stage."
            )
    print(OF_RUNS[arguments.figure](arguments.output, runs))


if __name__ == "__main__":
    run_command(main)
