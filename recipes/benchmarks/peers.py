"""`livt train` against what people use instead, on the same images, backbone and core-minutes.

    python recipes/benchmarks/peers.py --model FOLDER --dataset plantdoc --minutes 2 10 --seeds 0 1 2
    python recipes/benchmarks/peers.py --model FOLDER --dataset cifar100-lt --minutes 10 --entries ours trainer

The data are below LIVT_DATA. Every entry has one thread and a process of its own, and does what its documentation
shows, with a length that fits the time; nothing is tuned for anyone. Time is processor time from the images on disk to
the trained model; imports and the test images come on top. Rows are added to recipes/results/peers.json as they are
done, and are not done again. Accuracy, its standard error, mean class accuracy and ECE are in percent;
`tests` has McNemar's test of each entry against ours, in which an image counts once with the answers of all seeds.

ours            livt train --pretrained, calibrated; decided under the uniform prior (livt decide --prior uniform)
trainer         transformers' Trainer: cross-entropy, AdamW 1e-3, batches of 32, linear decay, random crops and flips
trainer_balance the same with `balance(model, counts, loss="bal_ce")`, decided by the largest logit
logreg          LogisticRegression of scikit-learn on standardised frozen features; logreg_balanced: balanced weights
fastai          vision_learner(...).fine_tune(epochs), where fastai is installed
autogluon       MultiModalPredictor(...).fit(time_limit=...), where autogluon.multimodal is installed
"""

import argparse
import contextlib
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parents[1] / "results" / "peers.json"
DATASETS = {
    "plantdoc": {"name": "plantdoc", "size": 224},
    "cifar100-lt": {"name": "cifar100-lt", "source": "cifar100", "imbalance_factor": 100, "size": 128},
}
BATCH_SIZE, LEARNING_RATE = 32, 1e-3  # of Trainer
TRIAL = 8  # updates that tell Trainer how many fit
Trained = tuple[np.ndarray, float]  # log probabilities (N, C) of the test images, and seconds of training


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=DATASETS, default="plantdoc")
    parser.add_argument("--model", type=Path, required=True, help="folder of a timm model with its processor")
    parser.add_argument("--minutes", type=float, nargs="+", default=[2, 10])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--entries", nargs="+", choices=ENTRIES, help="default: all that are installed")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--log", type=Path, help="folder for what the entries print")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)  # the file that an entry leaves its answers in
    settings = parser.parse_args(argv)
    if settings.run is not None:
        run_entry(settings)
        return
    entries = settings.entries or [name for name in ENTRIES if is_installed(name)]
    for minutes in settings.minutes:
        for seed in settings.seeds:
            for entry in entries:
                key = {"dataset": settings.dataset, "minutes": minutes, "seed": seed, "entry": entry}
                if not any(key.items() <= row.items() for row in read_rows(settings.output)):
                    row = key | launch_entry(settings, entry, minutes, seed)
                    write_rows(settings.output, [*read_rows(settings.output), row])
                    print(json.dumps({name: value for name, value in row.items() if name != "right"}), flush=True)


def is_installed(entry: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        name = {"fastai": "fastai.vision.all", "autogluon": "autogluon.multimodal"}.get(entry, "livt_hf")
        return importlib.util.find_spec(name) is not None
    return False


def launch_entry(settings: argparse.Namespace, entry: str, minutes: float, seed: int) -> dict:
    """Run one entry in a process of its own and return its row."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder, "answers.npz")
        words = ["--dataset", settings.dataset, "--model", settings.model, "--minutes", minutes, "--seeds", seed]
        command = [sys.executable, __file__, *map(str, words), "--entries", entry, "--run", str(answers)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "LIVT_RUNS": str(Path(folder, "runs"))}
        environment |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        log = Path(settings.log or folder, f"{settings.dataset}-{entry}-{minutes:g}-{seed}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            done = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            sys.exit(f"{entry} failed:\n{log.read_text()[-3000:]}")
        found = np.load(answers)
        row = score(found["log_probabilities"], found["labels"]) | {"seconds": round(float(found["seconds"]), 1)}
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return row | {"process_seconds": round(spent, 1)}


def run_entry(settings: argparse.Namespace) -> None:
    """Train one entry, and write the log probabilities of the test images."""
    import torch

    torch.set_num_threads(1)
    (entry,), (minutes,), (seed,) = settings.entries, settings.minutes, settings.seeds
    size = DATASETS[settings.dataset]["size"]
    with tempfile.TemporaryDirectory() as folder:
        model = resize_model(settings.model, Path(folder, settings.model.name), size)
        answers, seconds = ENTRIES[entry](settings.dataset, model, 60 * minutes, seed)
    labels = np.asarray(load_images(settings.dataset)["test"]["label"])
    np.savez(settings.run, log_probabilities=answers, labels=labels, seconds=seconds)


def resize_model(model: Path, folder: Path, size: int) -> Path:
    """Copy a timm model to a folder with another image size."""
    config = json.loads((model / "config.json").read_text())
    config["pretrained_cfg"]["input_size"] = [3, size, size]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to((model / "model.safetensors").resolve())
    return folder


def find_data(dataset: str) -> tuple[str, str | None, float | None]:
    """Return name, source and imbalance factor of a dataset below LIVT_DATA."""
    facts, data = DATASETS[dataset], Path(os.environ["LIVT_DATA"])
    if "source" not in facts:
        return str(data / str(facts["name"])), None, None
    return str(facts["name"]), str(data / str(facts["source"])), facts["imbalance_factor"]


def load_images(dataset: str):
    """Return the splits, whose images PIL decodes."""
    from livt_hf.data import load_long_tailed

    name, source, factor = find_data(dataset)
    return load_long_tailed(name, factor, source)


# Entries


def train_ours(dataset: str, model: Path, seconds: float, seed: int) -> Trained:
    from livt_hf.predictions import Predictions

    name, source, factor = find_data(dataset)
    folder = model.parent / "run"
    words = [name, "--pretrained", model, "--hours", seconds / 3600, "--seed", seed, "--threads", 1]
    words += ["--output_dir", folder]
    words += ["--source", source, "--imbalance_factor", factor] if source else []
    command = [sys.executable, "-m", "livt_hf.cli.main", "train", *map(str, words)]
    subprocess.run(command, check=True)
    results = json.loads((folder / "finetune" / "results.json").read_text())
    posterior = Predictions.load(folder / "finetune" / "predictions").posterior("uniform")
    return np.log(np.maximum(np.asarray(posterior), 1e-30)), sum(part["seconds"] for part in results["parts"])


def train_trainer(dataset: str, model: Path, seconds: float, seed: int, balanced: bool = False) -> Trained:
    import copy

    import torch
    import torchvision.transforms as T
    from transformers import AutoImageProcessor, AutoModelForImageClassification, Trainer, TrainingArguments, set_seed

    from livt_hf import balance
    from livt_hf.data import class_counts

    set_seed(seed)
    data, began = load_images(dataset), time.process_time()
    names = data["train"].features["label"].names
    processor = AutoImageProcessor.from_pretrained(model)
    network = AutoModelForImageClassification.from_pretrained(
        model, num_labels=len(names), ignore_mismatched_sizes=True, label_names=names
    )
    if balanced:
        network = balance(network, class_counts(data["train"]), loss="bal_ce")
    size, facts = DATASETS[dataset]["size"], processor.data_config
    augment = [T.RandomResizedCrop(size), T.RandomHorizontalFlip(), T.ToTensor()]
    augment = T.Compose([*augment, T.Normalize(facts["mean"], facts["std"])])

    def prepare_train(rows: dict) -> dict:
        return {"pixel_values": [augment(one.convert("RGB")) for one in rows["image"]], "labels": rows["label"]}

    def prepare_test(rows: dict) -> dict:
        pixels = [processor(one.convert("RGB"), return_tensors="pt")["pixel_values"][0] for one in rows["image"]]
        return {"pixel_values": pixels, "labels": rows["label"]}

    train, test = data["train"].with_transform(prepare_train), data["test"].with_transform(prepare_test)
    fixed = dict(per_device_train_batch_size=BATCH_SIZE, learning_rate=LEARNING_RATE, lr_scheduler_type="linear")
    fixed |= dict(save_strategy="no", report_to="none", use_cpu=True, remove_unused_columns=False, disable_tqdm=True)

    def fit(one: torch.nn.Module, updates: int) -> Trainer:
        arguments = TrainingArguments(str(model.parent / "trainer"), max_steps=updates, seed=seed, **fixed)
        trainer = Trainer(one, arguments, train_dataset=train)
        trainer.train()
        return trainer

    fit(copy.deepcopy(network), 1)
    trial = time.process_time()
    fit(copy.deepcopy(network), TRIAL)
    per_update = (time.process_time() - trial) / TRIAL
    trainer = fit(network, max(1, int((seconds - (time.process_time() - began)) / per_update)))
    spent = time.process_time() - began
    logits = torch.from_numpy(trainer.predict(test).predictions)
    return logits.log_softmax(-1).numpy(), spent


def train_trainer_balance(dataset: str, model: Path, seconds: float, seed: int) -> Trained:
    return train_trainer(dataset, model, seconds, seed, balanced=True)


def train_logreg(dataset: str, model: Path, seconds: float, seed: int, weights: str | None = None) -> Trained:
    import torch
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    data, began = load_images(dataset), time.process_time()
    processor = AutoImageProcessor.from_pretrained(model)
    network = AutoModelForImageClassification.from_pretrained(model).timm_model.eval()

    @torch.inference_mode()
    def features(split: str) -> np.ndarray:
        found = []
        for rows in data[split].iter(BATCH_SIZE):
            pixels = processor([one.convert("RGB") for one in rows["image"]], return_tensors="pt")["pixel_values"]
            found.append(network.forward_head(network.forward_features(pixels), pre_logits=True).numpy())
        return np.concatenate(found)

    del seconds  # it takes what it takes
    head = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000, class_weight=weights, random_state=seed))
    head.fit(features("train"), np.asarray(data["train"]["label"]))
    spent = time.process_time() - began
    answers = np.full((len(data["test"]), len(data["train"].features["label"].names)), -30.0)
    answers[:, head.classes_] = head.predict_log_proba(features("test"))
    return answers, spent


def train_logreg_balanced(dataset: str, model: Path, seconds: float, seed: int) -> Trained:
    return train_logreg(dataset, model, seconds, seed, weights="balanced")


def export_images(dataset: str, folder: Path) -> dict[str, tuple[list[str], list[int]]]:
    """Write all images as files, for tools that read nothing else; return paths and labels by split."""
    found = {}
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        images, paths = load_images(dataset)[split], []
        for number, image in enumerate(images["image"]):
            paths.append(str(folder / split / f"{number}.png"))
            image.convert("RGB").save(paths[-1])
        found[split] = paths, list(images["label"])
    return found


def train_fastai(dataset: str, model: Path, seconds: float, seed: int) -> Trained:
    import timm
    from fastai.vision import all as vision
    from safetensors.torch import load_file

    vision.set_seed(seed)
    files, began = export_images(dataset, model.parent / "images"), time.process_time()
    size, name = DATASETS[dataset]["size"], json.loads((model / "config.json").read_text())["architecture"]
    label_of = dict(zip(*files["train"], strict=True))
    block = vision.DataBlock(
        (vision.ImageBlock, vision.CategoryBlock(vocab=sorted(set(label_of.values())))),
        get_y=lambda path: label_of[path],
        splitter=vision.RandomSplitter(0.01, seed),
        item_tfms=vision.RandomResizedCrop(size, min_scale=0.5),
        batch_tfms=vision.aug_transforms(size=size),
    )
    loaders = block.dataloaders(files["train"][0], bs=64, num_workers=0)
    weights = {key.removeprefix("timm_model."): value for key, value in load_file(model / "model.safetensors").items()}
    start = timm.create_model(name, num_classes=0)
    start.load_state_dict(weights, strict=False)

    def learner():
        made = vision.vision_learner(loaders, name, pretrained=False)
        made.model[0].model.load_state_dict(start.state_dict(), strict=False)
        made.freeze()
        return made

    trial = time.process_time()
    learner().fit_one_cycle(1)
    # An epoch of the whole network takes about twice as long as one of the head that is trained first.
    left, head = seconds - (time.process_time() - began), time.process_time() - trial
    made = learner()
    made.fine_tune(max(1, int((left - head) / (2 * head))))
    spent = time.process_time() - began
    probabilities, _ = made.get_preds(dl=made.dls.test_dl(files["test"][0]))
    answers = np.full((len(probabilities), max(label_of.values()) + 1), -30.0)
    answers[:, list(made.dls.vocab)] = probabilities.clamp_min(1e-13).log().numpy()
    return answers, spent


def train_autogluon(dataset: str, model: Path, seconds: float, seed: int) -> Trained:
    import pandas as pd
    from autogluon.multimodal import MultiModalPredictor

    files, began = export_images(dataset, model.parent / "images"), time.process_time()
    table, test = (pd.DataFrame({"image": paths, "label": labels}) for paths, labels in files.values())
    predictor = MultiModalPredictor(label="label", path=str(model.parent / "autogluon"))
    chosen = {"model.timm_image.checkpoint_name": json.loads((model / "config.json").read_text())["architecture"]}
    predictor.fit(table, time_limit=seconds, seed=seed, hyperparameters=chosen)
    spent = time.process_time() - began
    probabilities = predictor.predict_proba(test[["image"]])
    answers = np.full((len(test), max(table["label"]) + 1), -30.0)
    answers[:, list(probabilities.columns)] = np.log(np.maximum(probabilities.to_numpy(), 1e-13))
    return answers, spent


ENTRIES: dict[str, Callable[[str, Path, float, int], Trained]] = {
    "ours": train_ours,
    "trainer": train_trainer,
    "trainer_balance": train_trainer_balance,
    "logreg": train_logreg,
    "logreg_balanced": train_logreg_balanced,
    "fastai": train_fastai,
    "autogluon": train_autogluon,
}


# Results


def score(log_probabilities: np.ndarray, labels: np.ndarray, bins: int = 15) -> dict:
    """Return the metrics of one entry, and which test images it has right."""
    log_probabilities = np.asarray(log_probabilities, dtype=np.float64)
    log_probabilities = log_probabilities - np.log(np.exp(log_probabilities).sum(1, keepdims=True))
    right = log_probabilities.argmax(1) == labels
    by_class = [right[labels == label].mean() for label in np.unique(labels)]
    confidence = np.exp(log_probabilities.max(1))
    own = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gaps = [abs((right[own == one] - confidence[own == one]).sum()) for one in range(bins)]
    return {
        "accuracy": round(100 * float(right.mean()), 2),
        "standard_error": round(100 * float(right.std()) / len(right) ** 0.5, 2),
        "mean_class_accuracy": round(100 * float(np.mean(by_class)), 2),
        "nll": round(-float(log_probabilities[np.arange(len(labels)), labels].mean()), 4),
        "ece": round(100 * float(sum(gaps)) / len(labels), 2),
        "right": "".join(map(str, right.astype(int))),
    }


def compare_with_ours(rows: Sequence[dict]) -> list[dict]:
    """Return McNemar's test of each entry against ours; the answers of all seeds to an image count as one."""
    from livt_hf.predictions.significance import paired_p_value

    tests = []
    for dataset, minutes, entry in sorted({(row["dataset"], row["minutes"], row["entry"]) for row in rows}):
        found: dict[str, dict[int, str]] = {"ours": {}, entry: {}}
        for row in rows:
            if (row["dataset"], row["minutes"]) == (dataset, minutes) and row["entry"] in found:
                found[row["entry"]][row["seed"]] = row["right"]
        seeds = sorted(found["ours"].keys() & found[entry].keys())
        if entry == "ours" or not seeds:
            continue
        ours, other = (np.array(list("".join(found[name][seed] for seed in seeds))) == "1" for name in ("ours", entry))
        gained, lost = int((ours & ~other).sum()), int((other & ~ours).sum())
        images = np.tile(np.arange(len(ours) // len(seeds)), len(seeds))
        p = paired_p_value(ours.astype(float) - other, images)
        numbers = {"only_ours_right": gained, "only_entry_right": lost, "p": round(p, 5)}
        tests.append({"dataset": dataset, "minutes": minutes, "entry": entry, "seeds": seeds} | numbers)
    return tests


def read_rows(path: Path) -> list[dict]:
    return json.loads(path.read_text())["rows"] if path.exists() else []


def write_rows(path: Path, rows: Sequence[dict]) -> None:
    writing = path.with_name(f".writing-{path.name}")
    writing.write_text(json.dumps({"rows": rows, "tests": compare_with_ours(rows)}, indent=1) + "\n")
    writing.replace(path)


if __name__ == "__main__":
    main()
