"""The paper's ablations, one command each, over the configs of a dataset.

    python recipes/sweep.py losses --dataset glyphs
    python recipes/sweep.py losses --dataset cifar100-lt --source FOLDER --seeds 0 1 2
    python recipes/sweep.py tau --dataset cifar100-lt --source FOLDER --finetune "--epochs 20" --jobs 2

Variants that share a pretraining share one MGP run. A sweep that is stopped goes on where it was; what is done is
skipped. Ends with a table, a plot and sweep.json in the output folder. `--list` shows the ablations.
"""

import argparse
import json
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from livt_hf.recipes.paper.sweeps import SWEEPS, Variant, load_results, paper_row, summarise, table_rows
from tqdm.auto import tqdm

from livt_hf.commands import run_command
from livt_hf.reports import markdown_table, sweep_plot
from livt_hf.runs import ARGUMENTS, Run, check_same_settings, runs_folder
from livt_hf.settings import FinetuneArguments, PretrainArguments, parse
from livt_hf.training.machine import available_cores

HERE = Path(__file__).parent
CONFIGS = HERE / "configs"
STAGES = {"pretrain.py": PretrainArguments, "finetune.py": FinetuneArguments}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", nargs="?", choices=SWEEPS, help="which ablation")
    parser.add_argument("--list", action="store_true", help="show the ablations")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", default=None, help="some of its variants")
    parser.add_argument("--dataset", default="glyphs", help="its configs are the base of every variant")
    parser.add_argument("--source", default=None)
    parser.add_argument("--imbalance_factor", default=None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--pretrain", default="", help='further options of the first stage, e.g. "--epochs 50"')
    parser.add_argument("--finetune", default="", help="further options of the second stage")
    parser.add_argument("--launch", default="", help='options of accelerate launch, e.g. "--multi_gpu"')
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each with its share of the cores")
    parser.add_argument("--output_dir", default=None, help="default: runs/sweeps/<dataset>[-<factor>]")
    arguments = parser.parse_args()
    if arguments.list or arguments.sweep is None:
        for name, sweep in SWEEPS.items():
            print(f"{name:14s} {sweep.title}: {'; '.join(variant.label for variant in sweep.variants)}")
        return
    sweep = SWEEPS[arguments.sweep]
    variants = chosen(sweep.variants, arguments.only)
    name = "-".join(filter(None, (Path(arguments.dataset).name, arguments.imbalance_factor)))
    folder = Path(arguments.output_dir or runs_folder() / "sweeps" / name)
    data = words({name: getattr(arguments, name) for name in ("dataset", "source", "imbalance_factor")})

    bases = {
        "pretrain": parse(PretrainArguments, [*data, *shlex.split(arguments.pretrain)], configs=CONFIGS),
        "finetune": parse(FinetuneArguments, [*data, *shlex.split(arguments.finetune)], configs=CONFIGS),
    }
    pretrainings, finetunings, starts, runs_of = {}, {}, {}, {variant.label: [] for variant in variants}
    for seed in arguments.seeds:
        for variant in variants:
            pretrained, start = None, ["scratch"]
            if variant.pretrain is not None:
                start = differences(variant.pretrain, bases["pretrain"])
                pretrained = folder / "mgp" / "_".join([*start, f"seed={seed}"])
                options = shlex.split(arguments.pretrain) + words(variant.pretrain | {"seed": seed})
                pretrainings[pretrained] = [*data, *options]
            options = shlex.split(arguments.finetune) + words(variant.finetune | {"seed": seed})
            changed = differences(variant.finetune, bases["finetune"])
            run = folder / "bft" / "_".join([*start, *changed, f"seed={seed}"])
            finetunings[run] = [*data, "--pretrained", str(pretrained or "none"), *options]
            starts[run] = pretrained
            runs_of[variant.label].append(run)
    threads = max(1, available_cores() // arguments.jobs)
    run_all("pretrain.py", pretrainings, arguments, threads)
    run_all("finetune.py", finetunings, arguments, threads)

    results = {label: load_results(runs) for label, runs in runs_of.items()}
    if any(variant.pretrain for variant in variants):  # what the first stage cost is part of the comparison
        for label, runs in runs_of.items():
            for run, result in zip(runs, results[label], strict=True):
                result["pretrain_seconds"] = starts[run] and load_results([starts[run]])[0]["seconds"]
    base, by_label = bases["finetune"], {variant.label: variant for variant in variants}
    rows = summarise(results, lambda label: paper_row(sweep, by_label[label], base.dataset, base.imbalance_factor))
    report = folder / arguments.sweep
    report.mkdir(parents=True, exist_ok=True)
    table = markdown_table(table_rows(rows))
    said = {"title": sweep.title, "budget": budget(results, pretrainings), "command": command(), "rows": rows}
    (report / "sweep.json").write_text(json.dumps(said, indent=2) + "\n")
    (report / "table.md").write_text(table + "\n")
    sweep_plot(rows, report / "plot.png", sweep.axis, title=f"{sweep.title} ({name})")
    print(f"{sweep.title} on {arguments.dataset}, percent\n\n{table}\n\nPlot: {report / 'plot.png'}")


def budget(results: dict[str, list[dict]], pretrainings: dict) -> str:
    """What each run was given, in a few words."""
    runs = [run for variant in results.values() for run in variant]
    parts = [f"{runs[0]['model_size']}, {runs[0]['num_train_images']:,} training images"]
    mgp = load_results(list(pretrainings))
    if mgp:
        parts.append(f"MGP {spread(run['epochs'] for run in mgp)} epochs ({spread_minutes(mgp)})")
    parts.append(f"BFT {spread(run['epochs'] for run in runs)} epochs ({spread_minutes(runs)})")
    return "; ".join([*parts, f"seeds {spread(run['seed'] for run in runs)}"])


def spread(values) -> str:
    return ", ".join(str(value) for value in sorted(set(values)))


def spread_minutes(runs: list[dict]) -> str:
    minutes = sorted({round(run["seconds"] / 60) for run in runs})
    return f"{' to '.join(str(m) for m in minutes[:: max(1, len(minutes) - 1)])} min a run"


def command() -> str:
    """This command, without the paths of this machine."""
    said = sys.argv[1:]
    for option in ("--source", "--output_dir"):
        if option in said:
            said[said.index(option) + 1] = "FOLDER"
    return shlex.join(["python", "recipes/sweep.py", *map(without_paths, said)])


def without_paths(text: str) -> str:
    """FOLDER for each path in an option's value, which may itself hold several options."""

    def hidden(word: str) -> str:
        option, equals, value = word.rpartition("=")
        local = "/" in value and (Path(value).is_absolute() or Path(value).exists())
        return f"{option}{equals}FOLDER" if local else word

    return " ".join(map(hidden, text.split(" ")))


def words(options: dict) -> list[str]:
    return [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]


def chosen(variants: list[Variant], only: list[str] | None) -> list[Variant]:
    labels = [variant.label for variant in variants]
    unknown = [label for label in only or () if label not in labels]
    if unknown:
        raise SystemExit(f"there is no variant {unknown[0]!r} in this sweep; choose from: {'; '.join(labels)}")
    return [variant for variant in variants if only is None or variant.label in only]


def differences(options: dict, base) -> list[str]:
    """What a run changes of the base settings: its name, so that equal runs of different sweeps are one."""
    return [f"{name}={value}" for name, value in sorted(options.items()) if value != getattr(base, name)]


def run_all(script: str, runs: dict[Path, list[str]], arguments, threads: int) -> None:
    """Run what is not finished, `jobs` at a time; each can be killed and goes on the next time."""

    def run(folder: Path) -> None:
        launch = [sys.executable, "-m", "accelerate.commands.launch", *shlex.split(arguments.launch)]
        command = [*launch, str(HERE / script), *runs[folder]]
        command += ["--output_dir", str(folder), "--resume", "auto", "--threads", str(threads)]
        folder.parent.mkdir(parents=True, exist_ok=True)
        log = folder.with_name(f"{folder.name}.out")
        with log.open("a") as output:
            status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
        if status:
            raise SystemExit(f"{shlex.join(command)}\nfailed; see {log}")

    for folder in runs:  # begun under the same name, but perhaps with other --pretrain or --finetune options
        if (folder / ARGUMENTS).exists():
            check_same_settings(Run(folder), parse(STAGES[script], runs[folder], configs=CONFIGS))
    waiting = [folder for folder in runs if not Run(folder).finished]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(tqdm(pool.map(run, waiting), total=len(waiting), desc=script, unit="run", file=sys.stderr))


if __name__ == "__main__":
    run_command(main)
