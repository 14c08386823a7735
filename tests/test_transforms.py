import io
import random

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refusal
from timm.data.auto_augment import rand_augment_transform
from torchvision import transforms as tv
from transformers import AutoImageProcessor

from livt_hf.data.transforms import DeviceTransform, FinetuneAugmentation, PretrainAugmentation, eval_processor

MEAN, STD = (0.48, 0.45, 0.40), (0.27, 0.26, 0.28)


def smooth_picture(height: int, width: int, seed: int = 0) -> Image.Image:
    noise = np.random.RandomState(seed).randint(0, 256, (6, 5, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def to_tensor(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def encoded(picture: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def small_images(count: int) -> torch.Tensor:
    return torch.stack([to_tensor(smooth_picture(32, 32, seed)) for seed in range(count)])


# Augmentation


def test_the_crop_is_torchvisions_random_resized_crop_up_to_its_random_numbers():
    picture = Image.fromarray(np.dstack([*np.mgrid[:60, :80], np.zeros((60, 80))]).astype(np.uint8))
    image = to_tensor(picture)
    ours = PretrainAugmentation(16).batch([image] * 3000, 0, 0, range(3000)).double()
    crop = tv.RandomResizedCrop(16, scale=(0.2, 1.0), interpolation=tv.InterpolationMode.BICUBIC)
    torch.manual_seed(0)
    theirs = torch.stack([to_tensor(tv.RandomHorizontalFlip()(crop(picture))) for _ in range(3000)]).double()
    for statistic in (torch.Tensor.mean, torch.Tensor.std):  # where the crops lie, and how large they are
        assert torch.allclose(statistic(ours, dim=(0, 2, 3)), statistic(theirs, dim=(0, 2, 3)), rtol=0.02)
    spans = [(x[:, 1, 0, -1] - x[:, 1, 0, 0]).abs() for x in (ours, theirs)]  # width of a crop, in pixels
    assert abs(spans[0].mean() - spans[1].mean()) < 1 and abs(spans[0].std() - spans[1].std()) < 1


@pytest.mark.parametrize(
    "augmentation",
    [
        PretrainAugmentation(32),
        FinetuneAugmentation(32),
        FinetuneAugmentation(32, policy="pad-crop", rand_augment="3a"),
    ],
)
def test_an_image_looks_the_same_in_any_batch_and_different_in_every_epoch(augmentation):
    images = small_images(8)
    batch = augmentation.batch(images, 0, 1, range(8))
    for some in (images[3:6], list(images[3:6])):  # as they come from memory and from files
        assert torch.equal(augmentation.batch(some, 0, 1, [3, 4, 5]), batch[3:6])
    for other in (augmentation.batch(images, 0, 2, range(8)), augmentation.batch(images, 1, 1, range(8))):
        assert not torch.equal(other, batch)


def test_without_flip_no_picture_is_mirrored():
    ramp = torch.arange(32, dtype=torch.uint8).mul(8).expand(3, 32, 32)[None].repeat(200, 1, 1, 1)
    for make in (
        PretrainAugmentation,
        lambda s, **k: FinetuneAugmentation(s, policy="pad-crop", rand_augment=None, **k),
    ):
        mirrored = {}
        for flip in (False, True):
            out = make(32, flip=flip).batch(ramp, 0, 0, range(200)).int()
            mirrored[flip] = (out[:, 0, 16, 20] < out[:, 0, 16, 12]).sum().item()
        assert mirrored[False] == 0 and 60 < mirrored[True] < 140


def test_pad_crop_shifts_by_at_most_four_pixels_with_zeros_outside():
    image = torch.full((1, 3, 32, 32), 200, dtype=torch.uint8)
    image[..., 16, 16] = 7
    out = FinetuneAugmentation(32, policy="pad-crop", rand_augment=None, flip=False).batch(
        image.repeat(300, 1, 1, 1), 0, 0, range(300)
    )
    _, rows, columns = torch.nonzero(out[:, 0] == 7, as_tuple=True)
    assert rows.unique().tolist() == columns.unique().tolist() == list(range(12, 21))
    assert set(out.unique().tolist()) == {0, 7, 200}
    with refusal(None, 64):
        FinetuneAugmentation(64, policy="pad-crop").batch(image, 0, 0, [0])
    with refusal(None, '"centre"'):
        FinetuneAugmentation(32, policy="centre")
    for policy in ("trivial", "randaugment"):
        with refusal(None, policy):
            FinetuneAugmentation(32, rand_augment=policy)


def test_augmentation_leaves_the_global_generators_alone():
    def draws():
        return random.random(), np.random.rand(), torch.rand(1).item()

    def seeded():
        random.seed(1), np.random.seed(1), torch.manual_seed(1)

    seeded()
    expected = draws()
    seeded()
    FinetuneAugmentation(32, rand_augment="3a").batch(small_images(4), 0, 0, range(4))
    FinetuneAugmentation(32).batch(small_images(4), 0, 0, range(4))
    batch = {"pixel_values": small_images(4), "labels": torch.arange(4), "index": torch.arange(4)}
    DeviceTransform(MEAN, STD, erase=0.9, mixup=0.8, cutmix=1.0, num_classes=4)(batch, epoch=0, update=0)
    assert draws() == expected


@pytest.mark.parametrize("magnitude", range(11))
@pytest.mark.parametrize("policy", ["rand-m{}-p1", "rand-m{}-p1-inc1"])
def test_rand_augment_is_timms_and_where_timm_keeps_no_bits_the_picture_is_black(policy, magnitude):
    picture, policy = smooth_picture(32, 32), policy.format(magnitude)
    (ours,) = FinetuneAugmentation(32, rand_augment=policy, mean=MEAN)._colour_steps
    settings = {"translate_const": 14, "img_mean": (122, 115, 102), "interpolation": Image.Resampling.BICUBIC}
    for operation, timms in zip(ours.ops, rand_augment_transform(policy, settings).ops, strict=True):
        if timms.name.startswith("Posterize") and timms.level_fn(magnitude, {}) == (0,):
            expected = Image.new("RGB", picture.size)
        else:
            random.seed(1)  # signs are drawn
            expected = timms(picture)
        random.seed(1)
        assert operation.name == timms.name and operation(picture) == expected


# Evaluation


@pytest.mark.parametrize(("size", "edge"), [(224, 256), (288, 288), (384, 384)])
def test_the_pil_backend_is_the_authors_evaluation_bit_for_bit(tmp_path, size, edge):
    picture = smooth_picture(375, 500)
    authors = tv.Compose(
        [
            tv.Resize(edge, interpolation=tv.InterpolationMode.BICUBIC),
            tv.CenterCrop(size),
            tv.ToTensor(),
            tv.Normalize(MEAN, STD),
        ]
    )(picture)
    processor = eval_processor(size, MEAN, STD)
    processor.save_pretrained(tmp_path)
    by_pil = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")(images=picture, return_tensors="pt")
    assert torch.equal(by_pil["pixel_values"][0], authors)
    default = AutoImageProcessor.from_pretrained(tmp_path)(images=picture, return_tensors="pt")["pixel_values"]
    assert torch.equal(default, processor(images=to_tensor(picture)[None], return_tensors="pt")["pixel_values"])
    assert (default[0] - authors).abs().max() < 0.05


def test_native_size_images_are_only_normalised_and_exactly_as_in_training():
    images = small_images(3)
    evaluated = eval_processor(32, MEAN, STD, native=True)(images=images, return_tensors="pt")["pixel_values"]
    batch = {"pixel_values": images, "labels": torch.zeros(3, dtype=torch.long), "index": torch.arange(3)}
    trained = DeviceTransform(MEAN, STD)(batch, epoch=0, update=0)
    assert torch.equal(evaluated, trained["pixel_values"])
    assert torch.equal(trained["labels"], batch["labels"])


# On the device


def flat_batch(size: int) -> dict:
    values = torch.arange(size, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 16, 16)
    return {"pixel_values": values, "labels": torch.arange(size), "index": torch.arange(100, 100 + size)}


def test_mixed_labels_are_the_shares_of_the_mixed_pictures():
    transform = DeviceTransform((0, 0, 0), (1 / 255,) * 3, mixup=0.8, cutmix=1.0, num_classes=6)
    kinds = set()
    for update in range(20):
        out = transform(flat_batch(6), epoch=0, update=update)
        values = out["pixel_values"].mean(dim=(1, 2, 3))  # image i is the constant i
        assert torch.allclose(out["labels"] @ torch.arange(6.0), values, atol=1e-4)
        assert torch.allclose(out["labels"].sum(dim=1), torch.ones(6))
        kinds.add(out["pixel_values"][0].std().item() > 1e-3)
    assert kinds == {True, False}  # cut and blended


def test_mixing_follows_the_key_and_multi_hot_labels_mix_like_ids():
    transform = DeviceTransform(MEAN, STD, mixup=0.8, cutmix=1.0, num_classes=6, seed=3)
    place = {"epoch": 1, "update": 5, "micro": 1, "rank": 2}
    ids = transform(flat_batch(6), **place)
    again = transform(flat_batch(6), **place)
    assert torch.equal(ids["pixel_values"], again["pixel_values"])
    hot = transform({**flat_batch(6), "labels": torch.eye(6)}, **place)
    assert torch.equal(ids["pixel_values"], hot["pixel_values"])
    assert torch.allclose(ids["labels"], hot["labels"])
    with refusal(None, 5):  # an odd micro-batch
        transform(flat_batch(5), **place)
    with refusal(None, "num_classes"):
        DeviceTransform(MEAN, STD, cutmix=1.0)
    for change in ({"epoch": 2}, {"update": 6}, {"micro": 0}, {"rank": 0}):
        assert not torch.equal(transform(flat_batch(6), **{**place, **change})["labels"], ids["labels"])


def test_a_quarter_of_the_images_is_erased_whatever_the_batch():
    transform = DeviceTransform((0, 0, 0), (1 / 255,) * 3, erase=0.25)
    image = torch.full((400, 3, 16, 16), 9, dtype=torch.uint8)
    batch = {"pixel_values": image, "labels": torch.zeros(400), "index": torch.arange(400)}
    out = transform(batch, epoch=2, update=0)["pixel_values"]
    erased = (out != 9).flatten(1).any(dim=1)
    assert 70 < erased.sum() < 130
    part = {key: value[50:60] for key, value in batch.items()}
    assert torch.equal(transform(part, epoch=2, update=1, rank=1)["pixel_values"], out[50:60])
