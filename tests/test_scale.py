"""The cost of training on paper, against what one can work out by hand."""

import json

import pytest
from test_configs import OF_THE_PAPER, settings, train_images

from livt_hf import pretraining_config
from livt_hf.constants import PRESETS
from livt_hf.recipes.paper import scale


def macs(arguments) -> float:
    """Multiplications of a forward pass for one image: attention and MLP of every block, and the projections."""

    def blocks(tokens: int, width: int, layers: int) -> float:
        return layers * (12 * width**2 * tokens + 2 * tokens**2 * width)

    preset = PRESETS[arguments.model_size]
    width, layers, patch = preset["hidden_size"], preset["num_hidden_layers"], preset["patch_size"]
    patches = ((arguments.image_size or preset["image_size"]) // patch) ** 2
    pixels = 3 * patch**2
    if arguments.stage == "finetune":
        return blocks(patches + 1, width, layers) + patches * width * pixels
    decoder = pretraining_config(arguments.model_size)
    visible = int(patches * (1 - arguments.mask_ratio)) + 1
    inner = decoder.decoder_hidden_size
    decoding = blocks(patches + 1, inner, decoder.decoder_num_hidden_layers) + patches * inner * pixels
    return blocks(visible, width, layers) + patches * width * pixels + visible * width * inner + decoding


def gpu_hours(arguments) -> float:
    """The authors' 94 for iNat18 at 224 pixels, scaled by arithmetic."""

    def work(arguments) -> float:
        frozen = getattr(arguments, "tune", None) == "head"  # one forward pass; training has two more per epoch
        return train_images(arguments) * (1 / 3 if frozen else arguments.epochs) * macs(arguments)

    return 94 * work(arguments) / work(settings("finetune-inat18"))


def test_a_vit_b_step_is_three_forwards_of_17_6_billion_multiplications():
    cost = scale.step_cost("finetune", "base", 224, 1000, images=2)
    assert cost["operations"] / 2 == pytest.approx(3 * 2 * 17.6e9, rel=0.01)
    assert cost["parameters"] == pytest.approx(86.6e6, rel=0.01)


def test_what_is_kept_for_the_backward_pass_grows_with_the_images():
    one, two, three = (scale.step_cost("pretrain", "tiny", 224, 0, images)["bytes"] for images in (1, 2, 3))
    assert three - two == two - one > 0  # the rest does not depend on the images
    # Of every token and block at least its input, queries, keys, values and the two halves of the MLP, in bfloat16.
    decoder = 8 * 197 * 512 * 2 * (4 + 4 + 4)
    assert decoder < two - one < 4 * decoder


@pytest.mark.parametrize(
    ("stage", "layers", "width", "left_out"), [("pretrain", 7, 512, 147 // 2), ("finetune", 12, 192, 98)]
)
def test_patches_that_are_left_out_cost_nothing_in_a_layer(stage, layers, width, left_out):
    """Of ViT-Ti: of every patch and layer at least 12 D^2 multiplications by weights, forward and twice backward."""
    all_of_it, half = (scale.step_cost(stage, "tiny", 224, 10, share=share)["operations"] for share in (1, 0.5))
    saved = 3 * 2 * layers * 12 * width**2 * left_out
    assert saved < all_of_it - half < 1.5 * saved  # and attention


@pytest.mark.parametrize("name", OF_THE_PAPER)
def test_every_config_of_the_paper_is_predicted_and_about_as_its_header_says(name):
    said = json.loads((scale.RECIPES / "results" / "scale.json").read_text())
    (row,) = [row for row in said["rows"] if name in row["configs"]]
    assert row["images"] == settings(name).epochs * train_images(settings(name))
    # The arithmetic of the header counts what our first stage leaves out, the last decoder layer of what is visible.
    assert row["ways"][0]["gpu_hours_at_authors_rate"] == pytest.approx(gpu_hours(settings(name)), rel=0.05)


def test_hours_are_operations_over_the_rate_unless_the_images_take_longer(monkeypatch, tmp_path, capsys):
    kept = {"stage": "finetune", "images": 36e6, "parameters": 10**9, "state_bytes": 16e9, "bytes_an_image": 64e6}

    def way(operations: float) -> dict:
        return {"share": 1, "operations": operations, "operations_an_image": operations / kept["images"]}

    rows = [
        kept | {"configs": ["finetune-imagenet-lt"], "ways": [way(3.6e18), way(0.9e18)]},
        kept | {"configs": ["finetune-inat18"], "ways": [way(9.4e18)]},
    ]
    monkeypatch.setattr(scale, "costs", lambda: rows)
    monkeypatch.setattr(scale, "recorded", lambda question: 250)
    options = ["--tflops", "100", "--utilisation", "0.5", "--cores", "4", "--output", str(tmp_path / "scale.json")]
    scale.main(options)
    said = json.loads((tmp_path / "scale.json").read_text())
    (whole, part), (logged,) = (row["ways"] for row in said["rows"])
    assert whole["gpu_hours_at_share_of_peak"] == pytest.approx(20)  # 3.6e18 over 50e12 a second
    assert (whole["bound_by"], whole["cores"]) == ("compute", pytest.approx(2))  # 500 images per second, 250 per core
    assert part["gpu_hours_at_share_of_peak"] == pytest.approx(10)  # four cores prepare 1000 images per second
    assert (part["bound_by"], part["cores"]) == ("input", pytest.approx(8))
    assert logged["gpu_hours_at_authors_rate"] == pytest.approx(94)  # their log
    assert said["rows"][0]["images_that_fit"] == 1000  # 80 GB without 16 of state, at 64 MB
    assert said["table"][0]["GPU-hours, 50% of peak and 4 cores per GPU"] == "20 / 10"
    assert "finetune-imagenet-lt | 100 / 25 |" in capsys.readouterr().out
