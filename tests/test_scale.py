"""The cost of training on paper, against what one can work out by hand."""

import json

import pytest

from livt_hf.recipes.paper import scale
from livt_hf.settings import FinetuneSettings, PretrainSettings


def test_a_vit_b_step_is_three_forwards_of_17_6_billion_multiplications():
    cost = scale.step_cost(FinetuneSettings, "base", 224, 1000, 2)
    assert cost["operations"] / 2 == pytest.approx(3 * 2 * 17.6e9, rel=0.01)
    assert cost["parameters"] == pytest.approx(86.6e6, rel=0.01)


def test_what_is_kept_for_the_backward_pass_grows_with_the_images():
    one, two, three = (scale.step_cost(PretrainSettings, "tiny", 224, 10, images)["bytes"] for images in (1, 2, 3))
    assert three - two == two - one > 0  # the rest does not depend on the images
    # Of every token and block at least its input, queries, keys, values and the two halves of the MLP, in bfloat16.
    decoder = 8 * 197 * 512 * 2 * (4 + 4 + 4)
    assert decoder < two - one < 4 * decoder


def test_hours_are_operations_over_the_rate(monkeypatch, tmp_path, capsys):
    kept = {"stage": "BFT", "image_size": 224, "epochs": 100, "parameters": 10**9, "state_bytes": 16e9}
    kept |= {"operations_an_image": 1e11, "bytes_an_image": 64e6}
    operations = iter([3.6e18, 9.4e18])

    def cost(stage, dataset, size):
        return kept | {"dataset": dataset, "model_size": size, "operations": next(operations)}

    monkeypatch.setattr(scale, "cost", cost)
    monkeypatch.setattr(scale, "images_a_core", lambda: {"BFT": 250})
    monkeypatch.setattr(scale, "RUNS", [(None, "imagenet-lt", "base"), (None, "inat18", "base")])
    options = ["--gpus", "2", "--tflops", "100", "--utilisation", "0.5", "--output", str(tmp_path / "scale.json")]
    scale.main(options)
    said = json.loads((tmp_path / "scale.json").read_text())
    first, last = said["rows"]
    assert first["hours_at_share_of_peak"] == pytest.approx(10)  # 3.6e18 over 2 x 50e12 a second
    assert last["hours_at_authors_rate"] == pytest.approx(94 / 2)  # their log of four GPUs, on two
    assert first["images_that_fit"] == 1000  # 80 GB without 16 of state, at 64 MB
    assert first["cores_at_share_of_peak"] == pytest.approx(4)  # 1000 images per second, 250 per core
    assert said["table"][0]["hours on 2, 50% of peak"] == "10.0"
    assert "ViT-B" in capsys.readouterr().out
