"""Augmentation of the two stages, the evaluation processor, and what is done on the training device.

Crops, flips and colour policies map uint8 to uint8 on the CPU. Their randomness is keyed by (seed, epoch, image), so
an image looks the same whichever worker, process or micro-batch it lands in. Normalisation, erasing and mixing happen
once per batch on the training device (`DeviceTransform`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data.auto_augment import auto_augment_transform, posterize, rand_augment_transform
from timm.data.constants import IMAGENET_DEFAULT_MEAN
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from torchvision.transforms import ColorJitter
from transformers import BitImageProcessor

from livt_hf.errors import LiVTError
from livt_hf.processors import Framing
from livt_hf.randomness import keyed_rng, keyed_uniform, preserve_rng_state, purpose_seed, seed_generators

CROP_TRIES = 10
CROP_NUMBERS = 4 * CROP_TRIES + 1
PADDING = 4  # of pad-crop
THREE_AUGMENT_JITTER = 0.3  # DeiT III's, for timm's policy "3a"


# uint8 images of one size (B, 3, H, W), or a list of (3, H, W) of any size.
Images = torch.Tensor | Sequence[torch.Tensor]


@dataclass(frozen=True)
class Augmentation:
    """Augmentation of MGP: random resized crop (bicubic) and flip.

    With `framing` "squash" or "pad" a crop has the proportions of its image, give or take a third, as the model sees
    them in evaluation: squashed to a square, or kept and padded.
    """

    image_size: int
    scale: tuple[float, float] = (0.2, 1.0)
    flip: bool = True
    framing: Framing = field(default=Framing(), kw_only=True, repr=False)  # noqa: RUF009  # it is frozen

    def batch(self, images: Images, seed: int, epoch: int, indices: Sequence[int]) -> torch.Tensor:
        """Augment uint8 images by the keys (seed, epoch, index) to uint8 images (B, 3, image_size, image_size)."""
        numbers = keyed_uniform(purpose_seed(seed, "crop"), epoch, indices, CROP_NUMBERS)
        return _resized_crops(images, numbers, self.image_size, self.scale, self.flip, self.framing)


PretrainAugmentation = Augmentation


@dataclass(frozen=True)
class FinetuneAugmentation(Augmentation):
    """Augmentation of BFT: random resized crop (bicubic) and flip, then a colour policy of timm.

    `policy="pad-crop"` is the light one for CIFAR-size images: 4 pixels of zero padding, a crop, a flip.
    `rand_augment` is a policy string of timm or None; "3a" is DeiT III's 3-Augment, with its colour jitter.
    `mean` fills the corners that a rotation or shift uncovers.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    rand_augment: str | None = "rand-m9-mstd0.5-inc1"
    policy: str = "resized-crop"
    mean: tuple[float, float, float] = IMAGENET_DEFAULT_MEAN

    def __post_init__(self):
        if self.policy not in ("resized-crop", "pad-crop"):
            raise LiVTError(f'policy is "{self.policy}": pass "resized-crop" or "pad-crop".')
        if self.rand_augment is not None and self.rand_augment.split("-")[0] not in ("rand", "3a"):
            raise LiVTError(
                f'rand_augment is "{self.rand_augment}": pass a timm policy such as "rand-m9-mstd0.5-inc1" or "3a", '
                "or None for no colour policy."
            )
        if self.policy == "pad-crop" and self.framing.name != "crop":
            message = (
                f"pad-crop leaves images at their own size, and cannot {self.framing.name} them; use another one."
            )
            raise LiVTError(message, argument="augmentation")
        object.__setattr__(self, "_colour_steps", self._build_colour_steps())

    def _build_colour_steps(self) -> list:
        if self.rand_augment is None:
            return []
        # As timm's create_transform sets them up with bicubic interpolation.
        settings = {
            "translate_const": int(self.image_size * 0.45),
            "img_mean": tuple(min(255, round(255 * m)) for m in self.mean),
            "interpolation": Image.Resampling.BICUBIC,
        }
        if self.rand_augment.startswith("rand"):
            policy = rand_augment_transform(self.rand_augment, settings)
            for operation in policy.ops:
                if operation.aug_fn is posterize:
                    operation.aug_fn = _posterize
            return [policy]
        return [auto_augment_transform(self.rand_augment, settings), ColorJitter(*[THREE_AUGMENT_JITTER] * 3)]

    def batch(self, images: Images, seed: int, epoch: int, indices: Sequence[int]) -> torch.Tensor:
        if self.policy == "pad-crop":
            numbers = keyed_uniform(purpose_seed(seed, "crop"), epoch, indices, 3)
            images = _pad_crops(images, numbers, self.image_size, self.flip)
        else:
            images = super().batch(images, seed, epoch, indices)
        return self._recolour(images, seed, epoch, indices) if self._colour_steps else images

    def _recolour(self, images: torch.Tensor, seed: int, epoch: int, indices: Sequence[int]) -> torch.Tensor:
        pictures = images.permute(0, 2, 3, 1).contiguous().numpy()
        result = np.empty_like(pictures)
        with preserve_rng_state():  # timm and torchvision draw from the global generators
            for i, index in enumerate(indices):
                seed_generators(purpose_seed(seed, "colour"), epoch, index)
                picture = Image.fromarray(pictures[i])
                for step in self._colour_steps:
                    picture = step(picture)
                result[i] = picture
        return torch.from_numpy(result).permute(0, 3, 1, 2).contiguous()


def _posterize(picture: Image.Image, bits: int, **_) -> Image.Image:
    """Posterize as timm, whose strongest magnitudes keep 0 bits: black until Pillow 12 and here, an error in 13."""
    return posterize(picture, bits) if bits > 0 else Image.new(picture.mode, picture.size)


def _offsets(numbers: np.ndarray, choices: np.ndarray | int) -> np.ndarray:
    return np.minimum((numbers * choices).astype(np.int64), choices - 1)


def _crop_boxes(
    numbers: np.ndarray, height: np.ndarray, width: np.ndarray, scale: tuple[float, float], own_ratio: bool = False
) -> np.ndarray:
    """Return boxes (B, 4) of top, left, height, width by the rule of torchvision's RandomResizedCrop.

    Area uniform in `scale`, aspect ratio log-uniform in 3/4 .. 4/3, the first of ten tries that fits; failing all, the
    largest central box whose ratio is allowed. With `own_ratio` the aspect ratio is relative to that of the image.
    """
    numbers = numbers.reshape(len(numbers), CROP_TRIES, 4)
    height, width = height[:, None], width[:, None]  # (B, 1)
    unit = width / height if own_ratio else np.ones(height.shape)
    area = height * width * (scale[0] + (scale[1] - scale[0]) * numbers[..., 0])  # (B, tries)
    ratio = unit * np.exp(np.log(3 / 4) + (np.log(4 / 3) - np.log(3 / 4)) * numbers[..., 1])
    w, h = np.rint(np.sqrt(area * ratio)).astype(np.int64), np.rint(np.sqrt(area / ratio)).astype(np.int64)
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    top = _offsets(numbers[..., 2], np.maximum(height - h + 1, 1))
    left = _offsets(numbers[..., 3], np.maximum(width - w + 1, 1))
    first = fits.argmax(axis=1)[:, None, None]
    boxes = np.take_along_axis(np.stack([top, left, h, w], axis=-1), first, axis=1)[:, 0]  # (B, 4)

    w = np.minimum(width, np.maximum(1, np.rint(height * (4 / 3) * unit).astype(np.int64)))
    h = np.minimum(height, np.maximum(1, np.rint(width * (4 / 3) / unit).astype(np.int64)))
    central = np.concatenate([(height - h) // 2, (width - w) // 2, h, w], axis=1)
    return np.where(fits.any(axis=1)[:, None], boxes, central)


def _resized_crops(
    images: Images, numbers: np.ndarray, size: int, scale: tuple[float, float], flip: bool, framing: Framing
) -> torch.Tensor:
    """Crop and flip images by their numbers (B, CROP_NUMBERS)."""
    mirrored = (numbers[:, -1] < 0.5) & flip
    shapes = np.array([image.shape[-2:] for image in images]).T
    boxes = _crop_boxes(numbers[:, :-1], *shapes, scale, own_ratio=framing.name != "crop")
    result = torch.empty(len(images), 3, size, size, dtype=torch.uint8)
    result[:] = torch.tensor(framing.fill, dtype=torch.uint8)[:, None, None]
    for i, (image, (top, left, height, width)) in enumerate(zip(images, boxes.tolist(), strict=True)):
        image = image[None, :, top : top + height, left : left + width]
        # Colours side by side, as they come from the decoder: twice as fast as planes.
        image = image.contiguous(memory_format=torch.channels_last)
        inner = (size, size)
        if framing.name == "pad":
            inner = tuple(max(1, round(size * side / max(height, width))) for side in (height, width))
        image = F.interpolate(image, size=inner, mode="bicubic", antialias=True)[0]
        top, left = ((size - side) // 2 for side in inner)
        result[i, :, top : top + inner[0], left : left + inner[1]] = image.flip(-1) if mirrored[i] else image
    return result


def _pad_crops(images: Images, numbers: np.ndarray, size: int, flip: bool) -> torch.Tensor:
    """Shift and flip images by their numbers (B, 3)."""
    if not isinstance(images, torch.Tensor):
        single = zip(images, numbers, strict=True)
        return torch.cat([_pad_crops(image[None], number[None], size, flip) for image, number in single])
    height, width = images.shape[-2:]
    if min(height, width) + 2 * PADDING < size:
        raise LiVTError(
            f"pad-crop cannot cut {size} x {size} pixels from an image of {height} x {width}: lower image_size "
            'or use policy="resized-crop".'
        )
    rows = _offsets(numbers[:, 0], height + 2 * PADDING - size + 1)[:, None] + np.arange(size)
    columns = _offsets(numbers[:, 1], width + 2 * PADDING - size + 1)[:, None] + np.arange(size)
    columns = np.where((numbers[:, 2:] < 0.5) & flip, columns[:, ::-1], columns)
    # One gather: pixel numbers in the padded image, (B, size * size)
    pixels = torch.from_numpy(rows[:, :, None] * (width + 2 * PADDING) + columns[:, None, :]).flatten(1)
    padded = F.pad(images, (PADDING,) * 4).flatten(2)
    cropped = padded.gather(2, pixels[:, None, :].expand(-1, images.shape[1], -1))
    return cropped.view(len(images), images.shape[1], size, size)


def eval_processor(
    image_size: int, mean: Sequence[float], std: Sequence[float], native: bool = False
) -> BitImageProcessor:
    """Return the image processor that is published with the model.

    Shorter side to image_size / 0.875 (bicubic), centre crop; above 224 pixels without the margin. `native` is for
    small images at their own size: no margin either, so these stay as they are and others come to that size.
    It is BiT's, which makes the same pixels: transformers 4 and transformers.js know no ViT processor that crops.
    """
    shortest_edge = image_size if native or image_size > 224 else int(image_size / 0.875)
    return BitImageProcessor(
        do_resize=True,
        size={"shortest_edge": shortest_edge},
        resample=Image.Resampling.BICUBIC,
        do_center_crop=True,
        crop_size={"height": image_size, "width": image_size},
        do_convert_rgb=True,
        image_mean=list(mean),
        image_std=list(std),
    )


@dataclass
class DeviceTransform:
    """Normalise, erase and mix a whole micro-batch on the training device.

    Erasing ("pixel") is keyed by image, mixing by (epoch, update, micro-batch, process): an image is mixed with one of
    its own micro-batch. `mixup` and `cutmix` are the alphas of timm's Mixup, always applied, half and half when both
    are positive, without label smoothing; labels then come out soft (B, num_classes). With both 0 labels stay as they
    are. Global generators are left as they were.
    """

    mean: Sequence[float]
    std: Sequence[float]
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    num_classes: int | None = None
    seed: int = 0

    def __post_init__(self):
        self._mean, self._std = (torch.tensor(v).float().view(1, 3, 1, 1) * 255 for v in (self.mean, self.std))
        # Erased pixels are drawn on the CPU: a device's own generator is out of reach of the key.
        self._erase = RandomErasing(probability=1.0, mode="pixel", device="cpu")
        self._mixes = self.mixup > 0 or self.cutmix > 0
        if self._mixes and self.num_classes is None:
            raise LiVTError("mixup and cutmix make soft labels: pass num_classes.")

    def __call__(self, batch: dict, *, epoch: int, update: int, micro: int = 0, rank: int = 0) -> dict:
        """Turn a batch of the train loader, already on its device, into model inputs."""
        images = batch["pixel_values"]
        if self._mean.device != images.device:
            self._mean, self._std = self._mean.to(images.device), self._std.to(images.device)
        images = images.float().sub_(self._mean).div_(self._std)  # one allocation; as the image processor does it
        if self.erase > 0:
            self._erase_some(images, batch["index"].cpu().numpy(), epoch)
        batch = batch | {"pixel_values": images}
        if self._mixes:
            self.check_batch(len(images))
            with keyed_rng(purpose_seed(self.seed, "mix"), epoch, update, micro, rank):
                batch["pixel_values"], batch["labels"] = self._mix(images, batch["labels"])
        return batch

    def check_batch(self, size: int) -> None:
        """Raise an error for a micro-batch that cannot be mixed."""
        if self._mixes and size % 2:
            raise LiVTError(
                f"mixup pairs the images of a micro-batch, but this one has {size}: choose a batch_size that gives "
                "each process and accumulation step an even number, or set mixup and cutmix to 0."
            )

    def _erase_some(self, images: torch.Tensor, indices: np.ndarray, epoch: int) -> None:
        seed = purpose_seed(self.seed, "erase")
        for i in np.flatnonzero(keyed_uniform(seed, epoch, indices, 1)[:, 0] < self.erase):
            with keyed_rng(seed, epoch, int(indices[i]), 1):
                self._erase(images[i])  # in place

    def _mix(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        multi_hot = labels.ndim == 2
        num_classes = len(images) if multi_hot else self.num_classes
        mix = Mixup(mixup_alpha=self.mixup, cutmix_alpha=self.cutmix, label_smoothing=0.0, num_classes=num_classes)
        if not multi_hot:
            return mix(images, labels)
        # Let timm mix the positions 0 .. B - 1 instead, and read the share that an image keeps.
        images, shares = mix(images, torch.arange(len(images), device=images.device))
        own = shares[0, 0]
        return images, labels * own + labels.flip(0) * (1 - own)
