"""Record what twelve small runs give, and compare two recordings: the proof that a rebuild changes no result.

    python tests/characterisation.py record FOLDER        # by the Python of the environment that is to be recorded
    python tests/characterisation.py compare OLD NEW [--ignore PATTERN...]

FOLDER keeps the data, run folders (without checkpoints), predictions and published folders as `livt` wrote them, and
record.json, which has them in a form that no file layout changes: tensors by name as hashes, predictions by image and
decision rule, options by name. `compare` wants hashes and texts equal and numbers within 1e-9; else it exits with 1.
When a file changes its form and not its content, change the adapters here (ALIASES, the `read_*` functions) and make
record.json anew from the kept files: python tests/characterisation.py reread FOLDER
"""

import argparse
import csv
import fnmatch
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TIMM = "--dataset data/images --pretrained data/timm --image_size 32 --batch_size 16 --epochs 2 --eval_epochs 2"
GLYPHS = "glyphs --images_per_class 40 --imbalance_factor 10 --batch_size 32 --log_steps 2"
TABLE = "data/table/labels.csv --pretrained none --model_size micro --image_size 16 --batch_size 16 --epochs 3"
PATIENTS = f"{TABLE} --group_column patient --on_broken skip --mixup 0 --cutmix 0 --base_lr 4e-3"
# Commands of one wave run two at a time; a wave needs those before it.
WAVES = [
    {
        "pretrain": f"pretrain {GLYPHS} --max_steps 8 --warmup_epochs 0",
        "head": f"finetune {TIMM} --tune head --views 2",
        "lora": f"finetune {TIMM} --tune lora",
        "full": f"finetune {TIMM} --tune full --loss bal_ce --sampler sqrt",
        "groups": f"finetune {PATIENTS} --validation_fraction 0.2 --select best --eval_epochs 1",
        "folds": f"finetune {PATIENTS} --folds 3",
        "multi_label": f"finetune {TABLE.replace('labels', 'findings')} --label_separator | --validation_fraction 0.2",
    },
    {
        "finetune": f"finetune {GLYPHS} --pretrained runs/pretrain --max_steps 12 --save_steps 5",
        "ema_mixup": f"finetune {GLYPHS} --pretrained runs/pretrain --max_steps 12 --ema_decay 0.9 --mixup 0.8"
        " --cutmix 1 --drop_path 0.1 --accumulation 2 --augmentation rand_augment --erase 0.25",
        "muon_keep_ratio": f"finetune {GLYPHS} --pretrained none --max_steps 40 --optimizer muon --keep_ratio 0.5"
        " --keep_all_epochs 1 --clip_grad 1 --loss bal_ce --pooling cls",
    },
    {"two_processes": f"--num_processes 2 finetune {GLYPHS} --pretrained runs/pretrain --max_steps 8 --mixup 0.8"},
    {
        "eval pretrain": "eval runs/pretrain",
        "eval finetune": "eval runs/finetune --test_imbalance=10,-10 --predictions predictions/finetune.parquet",
        "eval groups": "eval runs/groups --prior data/prior.json --adapt_prior --predictions predictions/groups.csv",
        "eval multi_label": "eval runs/multi_label --predictions predictions/multi_label.parquet",
        "predict jsonl": "predict runs/groups data/table/images --format jsonl --output predictions/predict.parquet",
        "predict csv": "predict runs/full data/images/test --format csv --top_k 2 --prior training",
        "predict several": "predict runs/multi_label data/table/images --format jsonl",
    },
    {
        "publish pretrain": "publish runs/pretrain org/pretrain --folder published/pretrain",
        "publish finetune": "publish runs/finetune org/finetune --folder published/finetune",
        "publish timm form": "publish runs/finetune org/timm --form timm --folder published/timm-form",
        "publish full": "publish runs/full org/full --license mit --folder published/full",
        "publish groups": "publish runs/groups org/groups --license mit --folder published/groups --with_pictures",
        "publish multi_label": "publish runs/multi_label org/several --license mit --folder published/multi_label",
    },
]
# Names that a later version writes, and those of 0.2 that they stand for; here those of 0.2 in short.
ALIASES = {
    "paper (argmax z)": "argmax",
    "posterior, uniform prior": "uniform",
    "posterior, training prior": "training",
    "posterior, the model's test prior": "own",
    "posterior, estimated prior": "estimated",
    "posterior, prior of prior.json": "given",
    "posterior, true prior": "true",
    "each class by its own logit": "sigmoid",
    "each label by itself": "per_label",
    "headline": "default_rule",
}
RULES = ("argmax", "uniform", "training", "own", "estimated", "given", "per_label")
# Times, versions and places, which are not results.
IGNORED = {"seconds", "preparation_seconds", "versions", "git_revision", "images_per_second", "transformers_version"}
IGNORED_LINES = re.compile(r"^- (duration|livt_hf revision|[a-z-]+ \d+\.\d+\.\d+)|livt[-_]hf \d")
PICTURES = (".png", ".svg", ".jpg", ".html")


def make_data(folder: Path) -> None:
    """Write an image folder, two tables of labels with what real ones come with, a prior and a timm model."""
    import numpy as np
    import timm
    import torch
    from PIL import Image
    from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

    rng = np.random.RandomState(0)

    def picture(colours: list[int]) -> Image.Image:
        pixels = rng.randint(0, 150, (20, 24, 3)) + 100 * np.eye(4, 3, dtype=int)[colours].sum(0)
        return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))

    for split, counts in {"train": (30, 18, 10, 6), "test": (9, 9, 9, 9)}.items():
        for label, count in enumerate(counts):
            (folder / "images" / split / f"class{label}").mkdir(parents=True)
            for number in range(count):
                picture([label]).save(folder / "images" / split / f"class{label}" / f"{label}-{number:02d}.png")
    (folder / "table/images").mkdir(parents=True)
    labels, findings = [], []
    for number, label in enumerate(np.repeat(np.arange(4), (70, 35, 20, 12))):
        name = f"images/{rng.randint(16**8):08x}.{('png', 'jpg', 'webp')[number % 3]}"
        others = rng.permutation(3)[: rng.randint(3)].tolist()
        picture([label, *others]).save(folder / "table" / name)
        labels.append((name, f"diagnosis {label}", f"P{(number + rng.randint(3)) // 4:02d}"))
        findings.append((name, "|".join("abcd"[n] for n in sorted({label, *others}))))
        if number % 50 == 5:
            content = (folder / "table" / name).read_bytes()
            (folder / "table" / name).write_bytes(content[: len(content) // 3])
            findings.pop()
    labels = [("file", "diagnosis", "patient"), *labels, ("images/lost.png", "diagnosis 0", "P00")]
    labels.append((labels[1][0], "", "P01"))
    findings.insert(0, ("file", "label"))
    for name, rows in {"labels": labels, "findings": findings}.items():
        with (folder / f"table/{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)
    (folder / "prior.json").write_text(json.dumps({f"diagnosis {i}": p for i, p in enumerate((0.1, 0.2, 0.3, 0.4))}))
    torch.manual_seed(0)
    cfg = timm.get_pretrained_cfg("vit_tiny_patch16_224").to_dict() | {"input_size": (3, 32, 32)}
    sizes = dict(img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2)
    config = TimmWrapperConfig(architecture="vit_tiny_patch16_224", num_labels=3, pretrained_cfg=cfg, model_args=sizes)
    TimmWrapperForImageClassification(config).save_pretrained(folder / "timm")


def run_command(folder: Path, name: str, words: str) -> None:
    """Run one `livt` command in the folder, so that every path it is given is relative."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "LIVT_", "ACCELERATE_"))}
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "LIVT_RUNS": "runs"}
    argv = words.split()
    if "finetune" in argv or argv[0] == "pretrain":
        argv += ["--output_dir", f"runs/{name}", "--threads", "1"]
    elif argv[0] in ("eval", "predict"):
        argv += ["--threads", "1"]
    began, livt = time.monotonic(), Path(sys.executable).with_name("livt")
    with (folder / f"output/{name}.out").open("w") as out, (folder / f"output/{name}.err").open("w") as err:
        code = subprocess.run([livt, *argv], cwd=folder, env=kept | own, stdout=out, stderr=err).returncode
    print(f"{time.monotonic() - began:6.1f} s  exit {code}  livt {' '.join(argv)}", flush=True)
    if code != 0 and argv[0] != "predict":  # of which some images are broken
        raise SystemExit((folder / f"output/{name}.err").read_text())


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def canonical(value):
    """Drop what is no result, and use one name for each thing."""
    if isinstance(value, dict):
        return {ALIASES.get(name, name): canonical(item) for name, item in value.items() if name not in IGNORED}
    if isinstance(value, list | tuple):
        return [canonical(item) for item in value]
    return ALIASES.get(value, value) if isinstance(value, str) else value


def read_weights(folder: Path) -> dict[str, str]:
    """Return the hash of every tensor of a model folder by its name, however many files hold them."""
    from safetensors.numpy import load_file

    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    described = {name: f"{t.dtype} {t.shape} ".encode() + t.tobytes() for name, t in sorted(tensors.items())}
    return {name: sha256(content) for name, content in described.items()}


def flatten_later_form(values):
    """Return evaluation.json as 0.2 wrote it: names of rules are keys, and nothing says which is the default."""
    if isinstance(values, dict) and "rule_labels" in values:
        values = {key: value for key, value in values.items() if key not in ("rule_labels", "default_rule", "classes")}
        under = values.get("under_prior", {})
        if "accuracy" in under:
            values["under_prior"] = {"prior": under["prior"]} | under["accuracy"]
    return values


def read_file(path: Path):
    """Return a record, or the lines of any other text; options of nested sections come by their own names."""
    import yaml

    text = path.read_text()
    if path.suffix == ".jsonl":
        return [canonical(json.loads(line)) for line in text.splitlines()]
    if path.suffix == ".json":
        return canonical(flatten_later_form(json.loads(text)))
    if path.name == "arguments.yaml":
        parts = [value if isinstance(value, dict) else {name: value} for name, value in yaml.safe_load(text).items()]
        return canonical({name: value for part in parts for name, value in part.items()})
    return [line for line in text.splitlines() if not IGNORED_LINES.search(line)]


def split_column(column: str) -> tuple[str | None, str]:
    """Return the rule of a column (empty: the default rule; None: no rule) and what the column holds."""
    what, _, rule = column.partition(" (")  # 0.2: "score (posterior, uniform prior)", "class name (...)"
    if rule:
        return ALIASES.get(rule[:-1], rule[:-1]), what
    if column in ("labels", "label") or not column.startswith(("prediction", "score")):
        return None, column
    kind, _, rest = column.partition("_")  # later: "score", "score_argmax", "score_argmax_class name"
    rule = next((name for name in RULES if rest == name or rest.startswith(f"{name}_")), "")
    return rule, rest[len(rule) :].removeprefix("_") or kind


def first_rule(row: dict) -> str | None:
    """Return the first rule of a file of 0.2."""
    return next((split_column(column)[0] for column in row if " (" in column), None)


def read_predictions(path: Path) -> dict:
    """Return by image its facts, and by rule the predicted label or labels, their score, and the scores of all."""
    import pyarrow.csv
    import pyarrow.parquet

    table = pyarrow.csv.read_csv(path) if path.suffix == ".csv" else pyarrow.parquet.read_table(path)
    images = {}
    for number, row in enumerate(table.to_pylist()):
        facts, rules = {}, {}
        for column, value in row.items():
            rule, what = split_column(column)
            if rule is not None:
                # The default rule comes first in files of 0.2 and has no name in later ones.
                rules.setdefault("default" if rule in ("", first_rule(row)) else rule, {})[what] = value
            elif column != "index":
                facts[column] = value
        images[row.get("file") or f"row {row.get('index', number)}"] = facts | {"rules": rules}
    return images


def read_published(folder: Path) -> dict:
    """Return the tensors of a published folder, and the content of its other files; pictures and pages as hashes."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".safetensors"]
    files = {
        p.relative_to(folder).as_posix(): sha256(p.read_bytes()) if p.suffix in PICTURES else read_file(p)
        for p in paths
    }
    return {"weights": read_weights(folder), "files": files}


def read_recording(folder: Path) -> dict:
    """Return everything that the commands left in the folder, in canonical form."""
    record = {}
    for run in sorted(path.parent for path in folder.glob("runs/**/arguments.yaml")):
        record[run.relative_to(folder).as_posix()] = {
            "weights": read_weights(run),
            "arguments": read_file(run / "arguments.yaml"),
            "results": read_file(run / "results.json"),
            "evaluation": {p.parent.name: read_file(p) for p in run.glob("*/evaluation.json")},
            "predictions": {p.parent.name: read_predictions(p) for p in run.glob("**/predictions.parquet")},
        }
    for path in sorted(folder.glob("predictions/*")):
        record[f"predictions/{path.name}"] = read_predictions(path)
    for path in sorted(folder.glob("output/predict *.out")):
        record[path.stem] = [json.loads(x) if x[0] == "{" else x.split(",") for x in path.read_text().splitlines()]
    for path in sorted(folder.glob("published/*")):
        record[f"published/{path.name}"] = read_published(path)
    return record


def record(folder: Path) -> None:
    for name in ("data", "output", "runs", "predictions"):
        (folder / name).mkdir(parents=True)
    make_data(folder / "data")
    for wave in WAVES:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda item: run_command(folder, *item), wave.items()))
    for path in folder.glob("runs/**/checkpoints"):
        shutil.rmtree(path)
    reread(folder)


def reread(folder: Path) -> None:
    text = json.dumps(read_recording(folder), indent=1).replace(f"{folder}/", "")  # some readers name absolute paths
    (folder / "record.json").write_text(text + "\n")


def leaves(value, path: str = "") -> dict:
    """Return the numbers and texts of a nested value by their paths."""
    if not isinstance(value, dict | list) or not value:
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {key: leaf for name, item in items for key, leaf in leaves(item, f"{path}/{name}").items()}


def same(one, other) -> bool:
    if isinstance(one, float) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9) or (math.isnan(one) and math.isnan(other))
    return one == other


def compare(old: Path, new: Path, ignored: list[str]) -> bool:
    """Print what differs, at most ten lines for each run; return whether nothing does."""
    records = [json.loads((folder / "record.json").read_text()) for folder in (old, new)]
    equal = True
    for name in sorted(records[0].keys() | records[1].keys()):
        one, other = (leaves(part.get(name, "absent"), name) for part in records)
        paths = [p for p in one | other if not any(fnmatch.fnmatch(p, pattern) for pattern in ignored)]
        wrong = [p for p in paths if p not in one or p not in other or not same(one[p], other[p])]
        print(f"{name}: {len(paths):,} values, {len(wrong):,} differ")
        for path in wrong[:10]:
            print(f"    {path}: {one.get(path, 'absent')!r} -> {other.get(path, 'absent')!r}")
        equal &= not wrong
    return equal


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("record", "reread", "compare"))
    parser.add_argument("folders", nargs="+", type=lambda path: Path(path).absolute())
    parser.add_argument("--ignore", nargs="+", default=[], help="patterns of paths whose difference is expected")
    options = parser.parse_args()
    if options.mode == "compare":
        sys.exit(not compare(*options.folders, options.ignore))
    {"record": record, "reread": reread}[options.mode](*options.folders)
