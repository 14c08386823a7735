"""Streams: what their shards hold, what each process sees of them, and pretraining from them by the recipe."""

import io
import signal
import tarfile
from collections.abc import Sequence
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import ClassLabel, Dataset, Features
from PIL import Image
from recipe_runs import TINY, RecipeRun, assert_same_weights, make_pictures
from refusals import refusal

from livt_hf.data import Batches, PretrainAugmentation, load_long_tailed, train_loader
from livt_hf.data.shards import as_stream, shard_lengths

LENGTHS = [9, 2, 17, 11, 6, 14, 4, 8]  # 71 images


@pytest.fixture(autouse=True)
def small_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("livt_hf.data.streaming.BLOCK", 4)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def pictures(count: int, broken: Sequence[int] = ()) -> Dataset:
    """Pictures of four classes, some of them cut short."""
    rng, images = np.random.RandomState(0), []
    for number in range(count):
        buffer = io.BytesIO()
        Image.fromarray(rng.randint(0, 256, (8, 8, 3)).astype(np.uint8)).save(buffer, "PNG")
        images.append({"bytes": buffer.getvalue()[: 40 if number in broken else None], "path": None})
    features = Features(image=datasets.Image(), label=ClassLabel(names=["a", "b", "c", "d"]))
    return Dataset.from_dict({"image": images, "label": [number % 4 for number in range(count)]}, features=features)


def write_shards(folder: Path, kind: str, broken: Sequence[int] = (), broken_test: Sequence[int] = ()) -> Path:
    """71 pictures to train on, in eight shards of different lengths, and 44 to test on, in two."""
    folder.mkdir()
    splits = {"train": (pictures(71, broken), LENGTHS), "test": (pictures(44, broken_test), [20, 24])}
    for split, (dataset, lengths) in splits.items():
        begin = np.cumsum([0, *lengths])
        for number, length in enumerate(lengths):
            rows = dataset.select(range(begin[number], begin[number] + length))
            write_shard(folder / f"{split}-{number:03d}", kind, rows)
    return folder


def write_shard(file: Path, kind: str, rows: Dataset) -> None:
    if kind == "parquet":
        rows.to_parquet(file.with_suffix(".parquet"))
    elif kind == "arrow":
        table = rows.with_format("arrow")[:]
        with pa.ipc.new_stream(str(file.with_suffix(".arrow")), table.schema) as writer:
            writer.write_table(table)
    else:
        with tarfile.open(file.with_suffix(".tar"), "w") as tar:
            for number, row in enumerate(rows.cast_column("image", datasets.Image(decode=False))):
                for suffix, data in {"png": row["image"]["bytes"], "cls": str(row["label"]).encode()}.items():
                    member = tarfile.TarInfo(f"images/{number:04d}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def epoch_of(stream, batches: Batches, epoch: int = 0, start_update: int = 0, on_broken: str = "error") -> list[dict]:
    return list(train_loader(stream, PretrainAugmentation(8), batches, on_broken).epoch(epoch, start_update))


def indices_of(batches: list[dict]) -> list[int]:
    return [index for batch in batches for index in batch["index"].tolist()]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "webdataset"])
def test_an_epoch_sees_each_image_once_over_all_processes_and_workers(tmp_path, kind):
    stream = load_long_tailed(str(write_shards(tmp_path / "shards", kind)), streaming=True)["train"]
    assert shard_lengths(stream) == LENGTHS
    for epoch, workers in ((0, 0), (1, 2)):
        settings = dict(batch_size=14, accumulation=1, world_size=2, num_workers=workers)
        seen = [indices_of(epoch_of(stream, Batches(rank=rank, **settings), epoch)) for rank in range(2)]
        assert [len(own) for own in seen] == [35, 35]
        assert len({*seen[0], *seen[1]}) == 70  # all but one of 71: five updates of 14
        assert {index >> 32 for index in seen[0] + seen[1]} == set(range(8))


def test_an_epoch_sees_images_of_all_shards_in_another_order_each_time(tmp_path):
    stream = load_long_tailed(str(write_shards(tmp_path / "shards", "parquet")), streaming=True)["train"]
    first, second = (indices_of(epoch_of(stream, Batches(1), epoch)) for epoch in (0, 1))
    everything = [shard * 2**32 + place for shard, length in enumerate(LENGTHS) for place in range(length)]
    assert first != second and sorted(first) == sorted(second) == everything
    write_shard(tmp_path / "shards/train-008", "parquet", pictures(0))  # an empty one does not end the stream
    stream = load_long_tailed(str(tmp_path / "shards"), streaming=True)["train"]
    assert all(sorted(indices_of(epoch_of(stream, Batches(1), epoch))) == everything for epoch in range(3))
    # Not even the images of one shard come as they are stored.
    assert [index for index in first if index >> 32 == 2] != everything[11:28]
    assert [index for index in first if index >> 32 == 2] != [index for index in second if index >> 32 == 2]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_stream_that_is_resumed_gives_what_it_would_have_given(tmp_path, workers):
    stream = load_long_tailed(str(write_shards(tmp_path / "shards", "parquet")), streaming=True)["train"]
    batches = Batches(12, accumulation=2, rank=1, world_size=2, num_workers=workers)
    expected = epoch_of(stream, batches, epoch=3)
    assert len(expected) == 10
    for update in range(6) if workers == 0 else (1, 4):
        resumed = epoch_of(stream, batches, epoch=3, start_update=update)
        assert indices_of(resumed) == indices_of(expected[2 * update :])
        for one, other in zip(resumed, expected[2 * update :], strict=True):
            assert torch.equal(one["pixel_values"], other["pixel_values"])


def test_resuming_opens_no_shard_that_was_used_up(tmp_path):
    folder = write_shards(tmp_path / "shards", "parquet")
    stream = load_long_tailed(str(folder), streaming=True)["train"]
    expected = epoch_of(stream, Batches(4))
    half = len(expected) // 2
    coming = {index >> 32 for index in indices_of(expected[half - 1 :])}
    used_up = set(range(8)) - coming
    assert len(used_up) >= 2
    for shard in used_up:
        (folder / f"train-{shard:03d}.parquet").unlink()
    assert indices_of(epoch_of(stream, Batches(4), start_update=half)) == indices_of(expected[half:])


def test_a_shard_that_shrinks_is_noticed(tmp_path):
    folder = write_shards(tmp_path / "shards", "webdataset")
    stream = load_long_tailed(str(folder), streaming=True)["train"]
    (folder / "train-001.tar").replace(folder / "train-002.tar")
    with refusal(None, "shard 2", "2 images", 17):
        epoch_of(stream, Batches(71))


@pytest.mark.parametrize("workers", [0, 1])
def test_another_image_of_its_block_stands_in_for_a_broken_one(tmp_path, workers, caplog):
    folder = write_shards(tmp_path / "shards", "parquet", broken=range(9, 54, 5))
    stream = load_long_tailed(str(folder), streaming=True)["train"]
    batches = Batches(10, num_workers=workers)
    with refusal("on_broken", "image"):
        epoch_of(stream, batches)
    left = epoch_of(stream, batches, on_broken="skip")
    assert len(indices_of(left)) == 70 and 70 - len(set(indices_of(left))) in (8, 9)  # the last image is not seen
    assert indices_of(epoch_of(stream, batches, start_update=3, on_broken="skip")) == indices_of(left[3:])
    if workers == 0:
        assert "left out: image" in caplog.text


def test_a_webdataset_that_is_not_streamed_has_its_classes(tmp_path):
    data = load_long_tailed(str(write_shards(tmp_path / "shards", "webdataset")))
    assert len(data["train"]) == 71 and data["train"].features["label"].names == ["0", "1", "2", "3"]
    file = str(tmp_path / "shards" / "train-002.tar")
    assert load_long_tailed(file, streaming=True)["train"].info.splits["train"].num_examples == 17


def test_archives_beside_the_images_they_held_are_left_alone(tmp_path):
    folder = write_shards(tmp_path / "shards", "webdataset")
    make_pictures(tmp_path / "both")
    (folder / "train-000.tar").rename(tmp_path / "both" / "train.tar")
    assert len(load_long_tailed(str(tmp_path / "both"))["train"]) == 64


def test_a_stored_dataset_becomes_a_stream_that_knows_its_shards():
    dataset = Dataset.from_dict({"image": [None] * 10, "label": [0] * 10})
    assert shard_lengths(as_stream(dataset, 4)) == [3, 3, 2, 2] and shard_lengths(as_stream(dataset, 64)) == [1] * 10
    with refusal(None, "shards"):
        shard_lengths(dataset.to_iterable_dataset())


@pytest.mark.parametrize("kind", ["parquet", "webdataset"])
def test_pretraining_reads_a_stream_of_shards(tmp_path, kind):
    """Broken images of the one are left out of training and of the held-out loss."""
    broken = {"broken": range(9, 54, 5), "broken_test": [3]} if kind == "parquet" else {}
    options = ["--dataset", write_shards(tmp_path / "shards", kind, **broken), *TINY, "--streaming"]
    recipe = RecipeRun("pretrain", tmp_path / "run", *options, *(["--on_broken", "skip"] if broken else []))
    run = recipe.finish()
    assert ("left out: image" in recipe.printed) == bool(broken)
    assert ("left out 1 broken of 44 images" in recipe.printed) == bool(broken)
    assert run.results.num_train_images == 71 and run.results.updates == 3 * 4
    assert run.results.num_classes == (4 if kind == "parquet" else None)  # a webdataset does not name its classes
    assert (run.folder / "reconstructions.png").exists()


def test_pretraining_from_a_stream_is_resumed_bit_for_bit_on_two_processes(tmp_path):
    options = ["--dataset", write_shards(tmp_path / "shards", "parquet"), *TINY, "--streaming"]
    options += ["--log_steps", 1, "--num_workers", 1]
    expected = RecipeRun("pretrain", tmp_path / "uninterrupted", *options, processes=2).finish()
    run = RecipeRun("pretrain", tmp_path / "run", *options, processes=2)
    run.wait_for(lambda: run.logged() >= 2)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75
    resumed = RecipeRun("pretrain", tmp_path / "run", *options, "--resume", processes=2).finish()
    assert_same_weights(resumed.folder, expected.folder)


def test_a_broken_held_out_image_is_refused_before_training(tmp_path):
    folder = make_pictures(tmp_path / "pictures")
    (folder / "test/class3/10.png").write_bytes(b"broken")
    recipe = RecipeRun("pretrain", tmp_path / "run", "--dataset", folder, *TINY)
    assert recipe.wait() != 0
    assert "held-out image" in recipe.printed and "on_broken skip" in recipe.printed
    assert not recipe.folder.exists()
