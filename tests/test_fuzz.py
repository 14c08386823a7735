"""Damaged files of every kind that is read: one sentence or a result, never another error, a hang or an unpickling.

Each kind has a good file and the way in which the package reads it. Seeded damage (cuts, flipped and inserted bytes,
values of other types, deep nesting, a pickle that runs code) makes the cases: `CASES` of each kind by default, and
`MANY` behind `slow`.
"""

import contextlib
import gzip
import json
import logging
import lzma
import math
import pickle
import random
import shutil
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
import yaml
from needs import needs_linux
from PIL import Image
from test_cards import METRICS, PRETRAINING, RESULTS
from test_checkpoints import Trained
from transformers import ConvNextConfig, ConvNextForImageClassification

from livt_hf import LiViTConfig, LiViTForImageClassification, balance
from livt_hf.classifiers import load_model, load_processor
from livt_hf.cli.inherit import inherit_from_run
from livt_hf.cli.options import read_config, write_config
from livt_hf.cli.resume import resolve_training
from livt_hf.cli.settings import EvalSettings
from livt_hf.cli.training_settings import FinetuneSettings, PretrainSettings
from livt_hf.conversion import from_official, to_timm
from livt_hf.data import eval_processor, load_long_tailed, read_rgb
from livt_hf.errors import LiVTError
from livt_hf.long_tail.priors import read_numbers, read_prior
from livt_hf.pretrained import load_backbone
from livt_hf.processors import read_input_spec
from livt_hf.recipes import convert, publish, train
from livt_hf.reports.comparison import compare
from livt_hf.runs import Run, read_log
from livt_hf.training.checkpoints import Progress
from livt_hf.training.frozen import DIGEST_BYTES, FeatureCache

pytestmark = needs_linux
resource = pytest.importorskip("resource")

CASES, MANY = 6, 300
SECONDS = 60  # in which every case must be over
ROOM = 2**31  # bytes of memory that a case may take
NAMES = ["cat", "dog", "newt"]
SIZES = dict(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4
)


# The good files. Each function fills an empty folder.


def finished_run(folder: Path) -> None:
    torch.manual_seed(0)
    labels = dict(id2label=dict(enumerate(NAMES)), label2id={name: label for label, name in enumerate(NAMES)})
    calibration = dict(scale=1.1, odds=0.5, offsets=[0.1, 0.0, -0.1], num_images=30, thresholds=None)
    head = dict(class_counts=[50, 10, 5], test_prior=[0.5, 0.3, 0.2], calibration=calibration)
    LiViTForImageClassification(LiViTConfig(**SIZES, **labels, **head)).save_pretrained(folder)
    eval_processor(8, [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]).save_pretrained(folder)
    Run(folder).write_results(RESULTS)
    write_config(FinetuneSettings.build(dataset="glyphs", pretrained="none", epochs=3), folder / "arguments.yaml")
    for update in range(1, 6):
        Run(folder).log({"update": update, "epoch": update / 2, "loss": 1 / update, "lr": 1e-3})
    Run(folder).log({"update": 5, "epoch": 3, "eval": {"accuracy": 0.5, "many": None}})
    (folder / "report").mkdir()
    summary = {"model": "x", "dataset": "glyphs", "split": "test", "rules": {"paper": METRICS, "uniform": METRICS}}
    (folder / "report/evaluation.json").write_text(json.dumps(summary, indent=2))
    rows = [{"name": name, "count": 10, "images": 5, "accuracy": 0.4} for name in NAMES]
    pa.csv.write_csv(pa.Table.from_pylist(rows), folder / "report/classes.csv")
    (folder / "plan.json").write_text(json.dumps({"why": "because", "stages": {"finetune": ["--epochs", "3"]}}))


def finished_pretraining(folder: Path) -> None:
    Run(folder).write_results(PRETRAINING)
    write_config(PretrainSettings(), folder / "arguments.yaml")
    (folder / "config.json").write_text("{}")


def unfinished_run(folder: Path) -> None:
    finished_run(folder)
    (folder / "results.json").unlink()


def stock_classifier(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = dict(hidden_sizes=[4, 8], depths=[1, 1], num_stages=2, image_size=16, num_labels=3)
    balance(ConvNextForImageClassification(ConvNextConfig(**sizes)), class_counts=[5, 3, 2]).save_pretrained(folder)
    eval_processor(16, [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]).save_pretrained(folder)


def numbers(folder: Path) -> None:
    (folder / "named.json").write_text(json.dumps({"cat": 50, "dog": 10.5, "newt": 5}))
    (folder / "listed.yaml").write_text(yaml.safe_dump([50, 10, 5]))
    (folder / "config.yaml").write_text("epochs: 3\nbase_lr: 1e-3\ntune: head\nflip: no\ndataset: glyphs\n")
    (folder / "list.json").write_text(json.dumps([50, 10, 5]))


def pictures(folder: Path) -> list[tuple[str, str]]:
    rng, rows = np.random.RandomState(0), []
    for label, count in {"cat": 5, "dog": 4, "newt": 3}.items():
        (folder / "images" / label).mkdir(parents=True)
        for number in range(count):
            path = folder / "images" / label / f"{number}.png"
            Image.fromarray(rng.randint(0, 255, (8, 8, 3), dtype=np.uint8)).save(path)
            rows.append((path.relative_to(folder).as_posix(), label))
    return rows


def tables(folder: Path) -> None:
    rows = [{"image": path, "label": label, "site": f"s{len(path) % 3}"} for path, label in pictures(folder)]
    table = pa.Table.from_pylist(rows)
    pa.csv.write_csv(table, folder / "table.csv")
    pa.csv.write_csv(table, folder / "table.tsv", pa.csv.WriteOptions(delimiter="\t", quoting_style="none"))
    (folder / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pa.parquet.write_table(table, folder / "table.parquet")
    lines = "".join(f"{row['image']} {NAMES.index(row['label'])}\n" for row in rows)
    (folder / "list.txt").write_text(lines)
    (folder / "list.txt.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    (folder / "list.txt.xz").write_bytes(lzma.compress(lines.encode()))


def stored_datasets(folder: Path) -> None:
    splits = load_images(folder)
    for kind in ("parquet", "arrow"):
        (folder / kind).mkdir()
    splits["train"].to_parquet(folder / "parquet/train.parquet")
    splits.save_to_disk(folder / "disk")
    with pa.OSFile(str(folder / "arrow/train.arrow"), "wb") as file:
        table = splits["train"].with_format("arrow")[:]
        with pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)


def load_images(folder: Path) -> datasets.DatasetDict:
    rows = pictures(folder)
    columns = {"image": [str(folder / path) for path, _ in rows], "label": [label for _, label in rows]}
    data = datasets.Dataset.from_dict(columns).class_encode_column("label")
    return datasets.DatasetDict(train=data.cast_column("image", datasets.Image()))


def images(folder: Path) -> None:
    image = Image.fromarray(np.random.RandomState(0).randint(0, 255, (24, 20, 3), dtype=np.uint8))
    for kind in ("jpg", "png", "gif", "bmp", "tiff", "webp"):
        image.save(folder / f"image.{kind}")
    turned = Image.Exif()
    turned[0x0112] = 6
    image.save(folder / "exif.jpg", exif=turned)
    image.convert("CMYK").save(folder / "cmyk.jpg")
    image.save(folder / "progressive.jpg", progressive=True)
    image.convert("P").save(folder / "palette.png", transparency=3)
    Image.fromarray(np.arange(400, dtype=np.uint16).reshape(20, 20) * 150).save(folder / "grey16.png")


def checkpoint(folder: Path) -> None:
    trained = Trained(folder)
    trained.step()
    trained.save(**vars(Progress(update=2, pending=[0.5])))


def kept_features(folder: Path) -> None:
    FeatureCache(folder).write(np.ones((1, 5, 3), dtype=np.float32), digests())


def digests() -> list[bytes]:
    return [bytes([number]) * DIGEST_BYTES for number in range(5)]


def official(folder: Path) -> None:
    """A fine-tuned model under the names of timm, as the authors save it."""
    torch.manual_seed(0)
    sizes = SIZES | dict(hidden_size=64)
    model = to_timm(LiViTForImageClassification(LiViTConfig(**sizes, num_labels=3, layer_norm_eps=1e-6)))
    torch.save({"model": model.state_dict(), "epoch": 3}, folder / "file.pth")


# How they are read.


def resume(folder: Path) -> None:
    resolve_training(FinetuneSettings, ["--resume", str(folder)])


def measure(folder: Path) -> None:
    EvalSettings.parse(["--model", str(folder)], inherit=inherit_from_run)


def publishing(folder: Path) -> None:
    out = folder.parent / "publication"
    shutil.rmtree(out, ignore_errors=True)
    model = LiViTForImageClassification(LiViTConfig(**SIZES, num_labels=3))
    with pytest.MonkeyPatch.context() as patch:  # the weights have kinds of their own
        patch.setattr(
            "livt_hf.hub.publishing._write_model",
            lambda _run, _folder, results, _form: None if results.stage == "pretrain" else model,
        )
        publish.main([str(folder), "org/name", "--license", "mit", "--folder", str(out)])


def rewind(folder: Path) -> None:
    log = (folder / "log.jsonl").read_bytes()
    read_log(folder / "log.jsonl")
    Run(folder).rewind_log(3)
    (folder / "log.jsonl").write_bytes(log)


def comparison(folder: Path) -> None:
    out = folder.parent / "comparison"
    shutil.rmtree(out, ignore_errors=True)
    compare(str(folder), str(folder), out)


def going_on(folder: Path) -> None:
    Progress(**Trained(folder).load())


def planned(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "run_livt", lambda words: all(isinstance(word, str) for word in words) or 1 / 0)
        with contextlib.suppress(train.Interrupted):
            train.main(["--resume", str(folder)])


def features(folder: Path) -> None:
    kept = FeatureCache(folder)
    if not kept.missing(digests()):
        assert kept.read(digests()).shape == (1, 5, 3)


def processor(folder: Path) -> None:
    read_input_spec(load_processor(str(folder)))


def prior(path: Path) -> None:
    values = read_prior(str(path), NAMES)
    assert all(math.isfinite(value) and value >= 0 for value in values) and abs(sum(values) - 1) < 1e-6


def positive(path: Path) -> None:
    assert all(math.isfinite(value) for value in read_numbers(str(path), NAMES, "class counts"))


def dataset(path: Path) -> None:
    data = load_long_tailed(str(path))
    for split in data.values():
        assert set(split["label"]) <= {0, 1, 2, *range(split.features["label"].num_classes)}


@dataclass(frozen=True)
class Kind:
    """A file that `make` writes into a folder, and how it is read: `read` gets the folder, or the file if `alone`."""

    make: Callable[[Path], object]
    file: str
    read: Callable[[Path], object]
    alone: bool = False


CHECKPOINT = "checkpoints/step-2/"
KINDS = {
    "config of a LiViT": Kind(finished_run, "config.json", lambda folder: load_model(str(folder))),
    "config of a stock classifier": Kind(stock_classifier, "config.json", lambda folder: load_model(str(folder))),
    "config of a backbone": Kind(stock_classifier, "config.json", lambda folder: load_backbone(str(folder))),
    "weights of a LiViT": Kind(finished_run, "model.safetensors", lambda folder: load_model(str(folder))),
    "weights of a backbone": Kind(stock_classifier, "model.safetensors", lambda folder: load_backbone(str(folder))),
    "image processor": Kind(finished_run, "preprocessor_config.json", processor),
    "arguments of a run that goes on": Kind(unfinished_run, "arguments.yaml", resume),
    "arguments of a run that is measured": Kind(finished_run, "arguments.yaml", measure),
    "arguments of a run that is published": Kind(finished_run, "arguments.yaml", publishing),
    "results": Kind(finished_run, "results.json", publishing),
    "results of a pretraining": Kind(finished_pretraining, "results.json", publishing),
    "log": Kind(finished_run, "log.jsonl", rewind),
    "log of a run that is published": Kind(finished_run, "log.jsonl", publishing),
    "report that is published": Kind(finished_run, "report/evaluation.json", publishing),
    "report that is compared": Kind(finished_run, "report/evaluation.json", comparison),
    "classes of a report": Kind(finished_run, "report/classes.csv", comparison),
    "plan": Kind(finished_run, "plan.json", planned),
    "state of a checkpoint": Kind(checkpoint, CHECKPOINT + "state.json", going_on),
    "weights of a checkpoint": Kind(checkpoint, CHECKPOINT + "model.safetensors", going_on),
    "optimizer of a checkpoint": Kind(checkpoint, CHECKPOINT + "optimizer.bin", going_on),
    "authors' checkpoint": Kind(
        official, "file.pth", partial(from_official, num_attention_heads=2, class_counts=[5, 3, 2]), alone=True
    ),
    "prior by name": Kind(numbers, "named.json", prior, alone=True),
    "prior in a list": Kind(numbers, "listed.yaml", prior, alone=True),
    "class counts": Kind(numbers, "named.json", positive, alone=True),
    "class weights": Kind(numbers, "listed.yaml", positive, alone=True),
    "names of a conversion": Kind(numbers, "list.json", lambda path: convert.read_names(str(path)), alone=True),
    "config of a command": Kind(
        numbers, "config.yaml", lambda path: FinetuneSettings.build(**read_config(FinetuneSettings, path)), alone=True
    ),
    **{
        name: Kind(tables, name, dataset, alone=True)
        for name in ("table.csv", "table.tsv", "table.jsonl", "table.parquet")
        + ("list.txt", "list.txt.gz", "list.txt.xz")
    },
    "parquet of images": Kind(stored_datasets, "parquet/train.parquet", lambda folder: dataset(folder / "parquet")),
    "arrow of images": Kind(stored_datasets, "arrow/train.arrow", lambda folder: dataset(folder / "arrow")),
    "dataset on disk": Kind(stored_datasets, "disk/dataset_dict.json", lambda folder: dataset(folder / "disk")),
    "split on disk": Kind(stored_datasets, "disk/train/state.json", lambda folder: dataset(folder / "disk")),
    "facts of a split on disk": Kind(
        stored_datasets, "disk/train/dataset_info.json", lambda folder: dataset(folder / "disk")
    ),
    **{
        name: Kind(images, name, read_rgb, alone=True)
        for name in ("image.jpg", "image.png", "image.gif", "image.bmp", "image.tiff", "image.webp", "exif.jpg")
        + ("cmyk.jpg", "progressive.jpg", "palette.png", "grey16.png")
    },
    "features": Kind(kept_features, "*.safetensors", features),
}


# The damage.


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


VALUES = (None, True, "", "text", "\0", "é" * 9, -1, 0, 0.5, 7, 10**9, 10**40, 1e308, math.nan, math.inf, [], {}, [[]])
VALUES += (["a", 1], {"a": {"b": [1]}}, "../../etc/passwd", "9" * 5000)
SIGNS = (b"-", b"9", b'"', b"'", b":", b",", b"\n", b"}", b"]", b"nan", b"1e999", b"\xe9")


def damaged_value(value, rng: random.Random):
    """A JSON value with one of its parts replaced, dropped or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        name = rng.choice(list(value))
        kind = rng.random()
        if kind < 0.1:
            return {key: item for key, item in value.items() if key != name}
        if kind < 0.15:
            return value | {rng.choice(["unknown", "", "model_type", "0"]): rng.choice(VALUES)}
        return value | {name: damaged_value(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        position = rng.randrange(len(value))
        part = rng.choice([[], [value[position]] * 2, [damaged_value(value[position], rng)]])
        return value[:position] + part + value[position + 1 :]
    return rng.choice(VALUES)


def other_values(data: bytes, name: str, rng: random.Random) -> bytes | None:
    """A text of values with one of them changed; None for other files."""
    if name.endswith((".json", ".yaml")):
        value = damaged_value(yaml.safe_load(data), rng)
        return (json.dumps(value) if name.endswith(".json") else yaml.safe_dump(value, sort_keys=False)).encode()
    if name.endswith(".jsonl"):
        lines = data.splitlines(keepends=True)
        position = rng.randrange(len(lines))
        lines[position] = json.dumps(damaged_value(json.loads(lines[position]), rng)).encode() + b"\n"
        return b"".join(lines)
    if name.endswith(".safetensors"):
        length = int.from_bytes(data[:8], "little")
        header = json.dumps(damaged_value(json.loads(data[8 : 8 + length]), rng)).encode()
        return len(header).to_bytes(8, "little") + header + data[8 + length :]
    return None


def damaged(data: bytes, name: str, rng: random.Random, trap: Path) -> bytes:
    """Damage of one kind, at a random place; half of it near the beginning, where headers are."""
    if rng.random() < 0.5 and (changed := other_values(data, name, rng)) is not None:
        return changed
    place = rng.randrange(min(len(data), 200) if rng.random() < 0.5 else len(data))
    length = rng.choice([1, 2, 4, 8, 64, 1000])
    noise = bytes(rng.randrange(256) for _ in range(length))
    if rng.random() < 0.03:
        pickles = [pickle.dumps(Trap(trap)), pickle.dumps({"a": Trap(trap)}, protocol=2)]
        return rng.choice([b"", b"\0" * len(data), *pickles])
    if rng.random() < 0.05:
        deep = 100_000
        return rng.choice([b"[" * deep, b'{"a":' * deep, b"[" * deep + b"]" * deep, b"- " * 3000, b"a: &a [*a]\n"])
    if rng.random() < 0.05:
        utf_16 = data.decode("latin-1").encode("utf-16")
        return rng.choice([b"\xef\xbb\xbf" + data, b"\xff\xfe" + data, utf_16, data * 2])
    return rng.choice(
        [
            data[:place],
            data[place:],
            data[:place] + noise + data[place + length :],
            data[:place] + noise + data[place:],
            data[:place] + data[place + length :],
            data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :],
            data[:place] + b"\0" * length + data[place + length :],
            data[:place] + b"\xff" * length + data[place + length :],
            data[:place] + data[place : place + length] * 2 + data[place + length :],
            data[:place] + rng.choice(SIGNS) + data[place + 1 :],
        ]
    )  # fmt: skip


class TookTooLong(BaseException):
    """Not an Exception: no reader may take it for damage."""


def too_long(*_):
    raise TookTooLong


def fuzz(name: str, numbers, tmp_path: Path) -> list[str]:
    """What went wrong, once for each place in the code, with the number of a case that shows it."""
    kind, trap, found = KINDS[name], tmp_path / "trap", {}
    folder = tmp_path / "good" / "1"
    folder.mkdir(parents=True)
    kind.make(folder)
    (path,) = folder.glob(kind.file)
    read = partial(kind.read, path if kind.alone else folder)
    read()
    good = path.read_bytes()
    before, memory = signal.signal(signal.SIGALRM, too_long), resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, memory[1]))
    try:
        for number in numbers:
            path.write_bytes(damaged(good, path.name, random.Random(f"{name} {number}"), trap))
            signal.alarm(SECONDS)
            try:
                read()
            except LiVTError as error:
                sentence = str(error)
                if not sentence.strip() or len(sentence) > 2000 or "Traceback" in sentence:
                    found.setdefault("no sentence", f"case {number}: {sentence[:300]!r}")
            except (Exception, TookTooLong) as error:
                last = error.__traceback__
                while last.tb_next is not None:
                    last = last.tb_next
                place = f"{type(error).__name__} in {last.tb_frame.f_code.co_filename}:{last.tb_lineno}"
                found.setdefault(place, f"case {number}: {str(error)[:300]}")
            finally:
                signal.alarm(0)
    finally:
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, memory)
    assert not trap.exists(), "a pickle was run"
    return [f"{place}: {what}" for place, what in found.items()]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, tmp_path):
    """Thousands of warnings would be written, and `datasets` would keep a copy of every table."""
    logging.disable(logging.CRITICAL)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_file_is_refused_in_a_sentence_or_read(name, tmp_path):
    assert fuzz(name, range(CASES), tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_many_damaged_files_are_refused_in_a_sentence_or_read(name, tmp_path):
    assert fuzz(name, range(CASES, CASES + MANY), tmp_path) == []
