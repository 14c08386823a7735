import io
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, List
from PIL import Image as PILImage
from refusals import refusal

from livt_hf.data import (
    Batches,
    FinetuneAugmentation,
    PretrainAugmentation,
    class_counts,
    eval_loader,
    eval_processor,
    find_broken,
    loading,
    train_loader,
)
from livt_hf.data.decoding import WAY_OUT, BrokenImageError, drop_broken, find_copies, image_digests
from livt_hf.data.loading import StoredImages
from livt_hf.data.shards import as_stream
from livt_hf.errors import LiVTError


def jpeg(seed: int, height: int, width: int) -> bytes:
    noise = np.random.RandomState(seed).randint(0, 256, (4, 4, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    PILImage.fromarray(noise).resize((width, height)).save(buffer, "JPEG")
    return buffer.getvalue()


def make(count: int, sizes=((120, 150), (100, 130)), labels=None) -> Dataset:
    images = [{"bytes": jpeg(i, *sizes[i % len(sizes)]), "path": None} for i in range(count)]
    labels = [i % 3 for i in range(count)] if labels is None else labels
    label = ClassLabel(names=["a", "b", "c"])
    features = Features(image=Image(), label=List(label) if isinstance(labels[0], list) else label)
    return Dataset.from_dict({"image": images, "label": labels}, features=features)


@pytest.fixture(scope="module")
def photos() -> Dataset:
    return make(22)


@pytest.fixture(scope="module")
def small() -> Dataset:
    return make(40, sizes=((32, 32),))


def same(first: list[dict], second: list[dict]) -> bool:
    return len(first) == len(second) and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("size", ["photos", "small"])
def test_any_number_of_workers_gives_the_same_batches_also_on_resume(size, request):
    dataset = request.getfixturevalue(size)
    augmentation = FinetuneAugmentation(16) if size == "photos" else PretrainAugmentation(32)
    plain = train_loader(dataset, augmentation, Batches(4, accumulation=2))
    expected = list(plain.epoch(1))
    assert len(expected) == 2 * plain.updates_per_epoch
    assert not same(list(plain.epoch(2)), expected)
    assert same(list(plain.epoch(1, start_update=3)), expected[6:])
    for workers in (1, 2):
        loader = train_loader(dataset, augmentation, Batches(4, accumulation=2, num_workers=workers))
        interrupted = loader.epoch(0)
        next(interrupted)
        assert same(list(loader.epoch(1)), expected)
        assert same(list(loader.epoch(1, start_update=3)), expected[6:])


def test_a_batch_has_uint8_images_labels_and_row_numbers_each_once_up_to_the_ragged_end(photos):
    loader = train_loader(photos, PretrainAugmentation(16), Batches(4))
    seen = torch.cat([batch["index"] for batch in loader.epoch(0)]).tolist()
    assert loader.updates_per_epoch == 5 and loader.num_images == 22
    assert len(seen) == len(set(seen)) == 20
    batch = next(loader.epoch(0))
    assert batch["pixel_values"].shape == (4, 3, 16, 16) and batch["pixel_values"].dtype == torch.uint8
    assert batch["labels"].dtype == batch["index"].dtype == torch.int64
    assert batch["labels"].tolist() == [photos["label"][i] for i in batch["index"].tolist()]


def test_resuming_does_not_read_what_it_skips():
    broken = make(8)
    loader = train_loader(broken, PretrainAugmentation(16), Batches(2))
    first = [batch["index"] for batch in loader.epoch(0)][0].tolist()
    rows = broken.to_dict()
    for index in first:
        rows["image"][index] = {"bytes": b"broken", "path": None}
    broken = Dataset.from_dict(rows, features=broken.features)
    loader = train_loader(broken, PretrainAugmentation(16), Batches(2))
    assert len(list(loader.epoch(0, start_update=1))) == 3
    with pytest.raises(ValueError, match="cannot be read"):
        list(loader.epoch(0))


def test_impossible_batch_sizes_name_possible_ones(photos):
    with refusal(None, 24, 22, "at most 20"):
        train_loader(photos, PretrainAugmentation(16), Batches(24, accumulation=2, world_size=2))
    with refusal(None, 10, "8 or 12"):
        Batches(10, accumulation=2, world_size=2)


def test_small_images_of_one_size_are_decoded_once_and_others_when_needed(small, photos):
    assert isinstance(StoredImages(small).images([3, 1]), torch.Tensor)
    assert isinstance(StoredImages(photos).images([3, 1]), list)
    assert isinstance(StoredImages(make(4, sizes=((32, 32), (32, 31)))).images([0, 1]), list)
    expected = torch.from_numpy(np.array(small[3]["image"])).permute(2, 0, 1)
    assert torch.equal(StoredImages(small).images([3])[0], expected)


@pytest.mark.parametrize("kind", ["training", "evaluation"])
def test_large_images_are_decoded_eight_at_a_time_and_a_batch_is_the_same_as_at_once(photos, kind, monkeypatch):
    def batch() -> dict:
        if kind == "evaluation":
            return next(iter(eval_loader(photos, eval_processor(16, (0.5,) * 3, (0.5,) * 3), Batches(20))))
        return next(train_loader(photos, FinetuneAugmentation(16), Batches(20)).epoch(0))

    def counted(encoded, index):
        image = decode(encoded, index)
        alive.add(image)
        most.append(len(alive))
        return image

    decode, alive, most = loading.read_image, weakref.WeakSet(), []
    monkeypatch.setattr(loading, "read_image", counted)
    in_parts = batch()
    assert max(most) == loading.AT_ONCE == 8
    monkeypatch.setattr(loading, "AT_ONCE", 20)
    assert same([batch()], [in_parts]) and max(most) == 20


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_evaluation_sees_each_image_once_over_all_processes(photos, workers, world_size):
    processor = eval_processor(16, (0.5,) * 3, (0.5,) * 3)
    batches = [
        batch
        for rank in range(world_size)
        for batch in eval_loader(photos, processor, Batches(12, rank=rank, world_size=world_size, num_workers=workers))
    ]
    assert torch.cat([batch["index"] for batch in batches]).tolist() == list(range(22))
    assert torch.cat([batch["labels"] for batch in batches]).tolist() == photos["label"][:]
    expected = processor(images=[photos[i]["image"] for i in range(22)], return_tensors="pt")["pixel_values"]
    assert torch.equal(torch.cat([batch["pixel_values"] for batch in batches]), expected)
    few = photos.select(range(2))  # some processes have nothing to evaluate
    sizes = [len(list(eval_loader(few, processor, Batches(6, rank=r, world_size=3)))) for r in range(3)]
    assert sum(sizes) == 2


def test_counts_look_through_selections(photos):
    assert class_counts(photos).tolist() == [8, 7, 7]
    assert class_counts(photos.select([0, 3, 4, 21])).tolist() == [3, 1, 0]
    assert class_counts(photos.select(range(5, 22)).shuffle(seed=0).select([0, 1, 2])).sum() == 3


def test_several_labels_per_image_give_multi_hot_rows_and_count_for_each_of_them():
    dataset = make(5, labels=[[0, 2], [], [1], [2], [0, 1, 2]])
    assert class_counts(dataset).tolist() == [2, 2, 3]
    assert class_counts(dataset.select([4, 0, 1])).tolist() == [2, 1, 2]
    stored = StoredImages(dataset.select([4, 0, 1]))
    assert stored.labels([1, 2, 0]).tolist() == [[1, 0, 1], [0, 0, 0], [1, 1, 1]]
    assert class_counts(make(3, labels=[[0, 0, 2], [2, 0, 2], [1]])).tolist() == [2, 1, 2]  # one image once


@pytest.fixture(scope="module")
def damaged() -> Dataset:
    """Six images, of which number 4 ends early."""
    rows = make(6).to_dict()
    rows["image"][4] = {"bytes": rows["image"][4]["bytes"][:200], "path": "cut.jpg"}
    return Dataset.from_dict(rows, features=make(1).features)


def test_broken_images_are_found_and_left_out(damaged, caplog):
    assert list(find_broken(damaged)) == [4]
    assert class_counts(drop_broken(damaged)).tolist() == [2, 1, 2]
    assert "left out 1 broken of 6 images" in caplog.text and "cut.jpg" in caplog.text


def test_a_cell_without_an_image_and_a_file_that_is_gone_are_broken_images(tmp_path):
    rows = make(6).to_dict()
    rows["image"][2:4] = [None, {"bytes": None, "path": str(tmp_path / "gone.jpg")}]
    dataset = Dataset.from_dict(rows, features=make(1).features)
    said = find_broken(dataset)
    assert said[2] == "image 2 (embedded bytes) cannot be read: it has neither bytes nor a path"
    assert list(said) == [2, 3] and len(drop_broken(dataset)) == 4
    assert find_copies({"train": dataset, "test": dataset.select([2, 3])}) == []
    with refusal("on_broken", "2 images"):
        list(train_loader(dataset, PretrainAugmentation(16), Batches(6)).epoch(0))
    for row, named in ((2, "it has neither bytes nor a path"), (3, "gone.jpg cannot be read")):
        with pytest.raises(BrokenImageError, match=named):
            list(image_digests(dataset.select([row])))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["training", "evaluation", "stream"])
def test_a_broken_image_is_the_same_sentence_from_any_process(damaged, small, kind, workers):
    batches = Batches(6, num_workers=workers)
    if kind == "training":  # and so is what an augmentation refuses
        with refusal(None, "64 x 64"):
            list(train_loader(small, FinetuneAugmentation(64, policy="pad-crop"), batches).epoch(0))
    if kind == "evaluation":
        batches = eval_loader(damaged, eval_processor(16, (0.5,) * 3, (0.5,) * 3), batches)
    else:
        dataset = damaged if kind == "training" else as_stream(damaged, 1)
        batches = train_loader(dataset, PretrainAugmentation(16), batches).epoch(0)
    with pytest.raises(BrokenImageError) as error:
        list(batches)
    assert str(error.value).startswith("image 4 (cut.jpg) cannot be read: ")
    assert str(error.value).endswith(WAY_OUT) and "\n" not in str(error.value)


@pytest.mark.parametrize("size", [16, 200])  # small images are decoded at once
def test_all_broken_images_are_named_where_one_is_met_up_to_ten_and_then_counted(tmp_path, size):
    paths = [str(tmp_path / f"{number}.png") for number in range(14)]
    for number, path in enumerate(paths):
        PILImage.new("RGB", (size, size)).save(path)
        if number not in (0, 7):
            Path(path).write_bytes(b"broken")
    dataset = Dataset.from_dict(
        {"image": paths, "label": [0] * 14}, features=Features(image=Image(), label=ClassLabel(names=["a"]))
    )
    with pytest.raises(LiVTError) as error:
        list(train_loader(dataset, PretrainAugmentation(16), Batches(7)).epoch(0))
    lines = str(error.value).splitlines()
    assert lines[0] == "12 images cannot be read:" and "1.png" in lines[1] and lines[11:12] == ["  and 2 more"]
    assert "on_broken skip" in lines[12]


def test_loaders_leave_the_global_generator_alone(photos):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    list(train_loader(photos, PretrainAugmentation(16), Batches(4, num_workers=1)).epoch(0))
    assert torch.equal(torch.rand(1), expected)


# Streams


def test_a_stream_says_what_it_needs(photos):
    stream = as_stream(photos, 2)
    with refusal(None, "2 shards", "4 processes"):
        train_loader(stream, PretrainAugmentation(16), Batches(4, world_size=4))
    with refusal("class_counts", "class_counts"):
        class_counts(stream)


def test_a_stream_of_broken_images_ends_with_an_error_instead_of_looping():
    rows = make(6).to_dict()
    rows["image"] = [{"bytes": b"broken", "path": None}] * 6
    stream = as_stream(Dataset.from_dict(rows, features=make(1).features), 1)
    loader = train_loader(stream, PretrainAugmentation(16), Batches(2), on_broken="skip")
    with pytest.raises(ValueError, match="cannot be read"):
        list(loader.epoch(0))
