import io
import os
import re
import sys
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from test_transforms import MEAN, STD, encoded, smooth_picture

from livt_hf.data import decoding
from livt_hf.data.decoding import BrokenImageError, decode_rgb, read_image, read_rgb, warn_about_faint_images
from livt_hf.data.transforms import FinetuneAugmentation, PretrainAugmentation, eval_processor


def turned_exif() -> Image.Exif:
    exif = Image.Exif()
    exif[274] = 6  # orientation: turn by 90 degrees
    return exif


@pytest.fixture(params=["torchcodec", "Pillow"], autouse=True)
def decoder(request, monkeypatch):
    """Every fact about decoding holds with torchcodec and where it does not load."""
    if request.param == "Pillow":
        monkeypatch.setattr(decoding, "fast_decoders", lambda: ())
    elif not decoding.fast_decoders():
        pytest.skip(f"torchcodec does not load beside torch {torch.__version__}")
    return request.param


@pytest.mark.parametrize(
    "mode_and_kind", ["RGB JPEG", "L JPEG", "CMYK JPEG", "RGB PNG", "L PNG", "1 PNG", "P PNG", "RGB TIFF"]
)
def test_decoding_gives_what_pillow_gives(mode_and_kind):
    mode, kind = mode_and_kind.split()
    data = encoded(smooth_picture(40, 30).convert(mode), kind)
    assert np.array_equal(decode_rgb(data).permute(1, 2, 0), Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_is_laid_over_white(mode):
    picture = smooth_picture(8, 8).convert(mode)
    picture.putalpha(0)
    assert (decode_rgb(encoded(picture, "PNG")) == 255).all()


def test_sixteen_bit_grey_keeps_its_shades():
    grey = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1024
    assert np.array_equal(decode_rgb(encoded(Image.fromarray(grey), "PNG"))[0], grey // 256)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_rotated_photograph_comes_out_upright(kind):
    picture = smooth_picture(40, 30)
    turned = decode_rgb(encoded(picture, kind, exif=turned_exif()))
    assert turned.shape == (3, 30, 40)
    assert torch.equal(turned, torch.rot90(decode_rgb(encoded(picture, kind)), -1, dims=(1, 2)))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_path_its_bytes_an_open_file_and_a_pillow_image_are_read_alike(tmp_path, kind):
    data = encoded(smooth_picture(40, 30), kind, exif=turned_exif())
    path = tmp_path / "image"
    path.write_bytes(data)
    with path.open("rb") as file:
        for source in (path, str(path), data, file, Image.open(path)):
            assert torch.equal(read_rgb(source), decode_rgb(data))
    path.write_bytes(data[:50])
    with pytest.raises(BrokenImageError, match=f"^{re.escape(str(path))} cannot be read: "):
        read_rgb(path)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_one_pixel_is_enough_for_every_transform(kind):
    image = decode_rgb(encoded(smooth_picture(1, 1), kind))
    assert PretrainAugmentation(16).batch([image], 0, 0, [0]).shape == (1, 3, 16, 16)
    assert FinetuneAugmentation(16).batch([image], 0, 0, [0]).shape == (1, 3, 16, 16)
    assert eval_processor(16, MEAN, STD)(images=[image], return_tensors="pt")["pixel_values"].shape == (1, 3, 16, 16)


@pytest.mark.parametrize(
    "damage", [lambda d: d[: len(d) // 2], lambda d: b"", lambda d: b"no image", lambda d: None, lambda d: d[:3]]
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_broken_image_is_an_error_with_its_index(kind, damage):
    data = damage(encoded(smooth_picture(64, 64), kind))
    with pytest.raises(BrokenImageError, match="image 7 .*embedded bytes.* cannot be read"):
        read_image({"bytes": data, "path": None}, 7)


@pytest.mark.parametrize(("name", "length"), [("cut.jpg", 200), ("notes.jpg", None), ("nowhere.jpg", 0)])
def test_a_broken_or_missing_file_is_named_by_its_path_alone(tmp_path, name, length):
    path = tmp_path / name
    if name != "nowhere.jpg":
        path.write_bytes(b"no image" if length is None else encoded(smooth_picture(64, 64), "JPEG")[:length])
    with pytest.raises(BrokenImageError) as error:
        read_image({"bytes": None, "path": str(path)}, 7)
    assert error.value.finding.startswith(f"{path} cannot be read: ")
    assert ("may be no image at all" in error.value.finding) == (name == "notes.jpg")


def test_12_bit_images_in_16_bit_files_are_warned_of_once(caplog):
    warn_about_faint_images.cache_clear()
    bright, faint = (Image.fromarray(np.full((8, 8), value, dtype=np.uint16)) for value in (40_000, 4095))
    assert read_rgb(bright).max() == 156 and not caplog.records
    assert read_rgb(faint).max() == read_rgb(faint).max() == 15
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "an image of 16 bits uses only the lower 12"
    ]


@pytest.mark.parametrize(
    ("lowest", "highest", "read"),
    [(0, 0, True), (0, 255, False), (0, 256, True), (0, 65535, True), (0, 65536, False), (-1000, 3000, False)],
)
def test_integers_of_32_bits_are_read_as_16_bits_or_not_at_all(lowest, highest, read):
    data = encoded(Image.fromarray(np.array([[lowest, highest]], dtype=np.int32)), "TIFF")
    if read:
        assert decode_rgb(data).max() == highest // 256
    else:
        with pytest.raises(BrokenImageError, match=f"values from {lowest} to {highest}, whose range is unknown"):
            read_rgb(data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP"])
def test_damaged_bytes_give_a_picture_or_an_error_but_never_the_end_of_the_process(kind):
    generator = np.random.RandomState(0)
    whole = encoded(smooth_picture(48, 64), kind)
    outcomes = set()
    for _ in range(400):
        damaged = bytearray(whole)
        for place in generator.randint(0, len(whole), size=generator.randint(1, 20)):
            damaged[place] = generator.randint(256)
        try:
            outcomes.add(read_image({"bytes": bytes(damaged), "path": None}, 0).dtype)
        except BrokenImageError as error:
            outcomes.add(type(error))
    assert outcomes <= {torch.uint8, BrokenImageError} and BrokenImageError in outcomes


@pytest.mark.parametrize("decoder", ["torchcodec"], indirect=True)
@pytest.mark.parametrize(
    "kind, options, mode, fast",
    [
        ("JPEG", {}, "RGB", True),
        ("JPEG", {"progressive": True, "comment": b"a plain one"}, "L", True),
        ("JPEG", {"exif": turned_exif()}, "RGB", True),
        ("JPEG", {"xmp": b'<x tiff:Orientation="6"/>'}, "RGB", False),
        ("JPEG", {}, "CMYK", False),
        ("PNG", {"dpi": (96, 96)}, "RGB", True),
        ("PNG", {}, "L", True),
        ("PNG", {"exif": turned_exif()}, "RGB", False),
        ("PNG", {"transparency": 7}, "L", False),
        ("PNG", {}, "1", False),
        ("PNG", {}, "P", False),
        ("PNG", {}, "I;16", False),
    ],
)
def test_torchcodec_gets_the_plain_files_and_gives_what_pillow_gives(monkeypatch, kind, options, mode, fast, decoder):
    picture = smooth_picture(40, 30).convert("L" if mode == "I;16" else mode)
    data = encoded(picture.convert(mode), kind, **options)
    got, calls = decode_rgb(data), []
    opened = Image.open
    monkeypatch.setattr(Image, "open", lambda *arguments: calls.append(arguments) or opened(*arguments))
    decode_rgb(data)
    assert bool(calls) != fast
    monkeypatch.setattr(decoding, "fast_decoders", lambda: ())
    assert torch.equal(got, decode_rgb(data))


@pytest.mark.parametrize("decoder", ["torchcodec"], indirect=True)
def test_a_torchcodec_that_does_not_load_leaves_all_to_pillow_and_says_so(monkeypatch, caplog, decoder):
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)  # importing it is an ImportError
    assert decoding.fast_decoders.__wrapped__() == ()
    assert "Pillow decodes the images: they are the same" in caplog.text


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_decompression_bomb_is_refused_before_it_is_decoded(kind):
    data = bytearray(encoded(smooth_picture(8, 8), kind))
    if kind == "JPEG":
        frame = data.index(b"\xff\xc0")
        data[frame + 5 : frame + 9] = b"\xff\xff\xff\xff"
    else:
        data[16:24] = (100_000).to_bytes(4, "big") * 2
        data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    with pytest.raises(BrokenImageError, match="decompression bomb"):
        read_image({"bytes": bytes(data), "path": None}, 0)


def test_only_regular_files_are_read_whatever_they_are_called(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "device.png").symlink_to("/dev/zero")
    for name in ("pipe.png", "device.png"):
        with pytest.raises(BrokenImageError) as error:
            read_rgb(tmp_path / name)
        assert name in error.value.finding and error.value.argument == "on_broken"
        with pytest.raises(BrokenImageError):
            read_image({"bytes": None, "path": str(tmp_path / name)}, 0)
