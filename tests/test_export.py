"""Graphs that run without this package: ONNX and torch.export."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refusal
from transformers import (
    ConvNextImageProcessor,
    ResNetConfig,
    ResNetForImageClassification,
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
    TimmWrapperImageProcessor,
)

import livt_hf
from livt_hf import LiViTConfig, LiViTForImageClassification, balance
from livt_hf.classifiers import load_processor
from livt_hf.data import eval_processor
from livt_hf.export import EXPORTERS, ServingGraph, get_output_size
from livt_hf.predictions import Predictions
from livt_hf.predictions.predict import Predictor
from livt_hf.recipes.convert import main

COUNTS, NAMES = [900, 90, 10], {0: "cat", 1: "dog", 2: "newt"}
CALIBRATION = {"scale": 1.3, "odds": 0.2, "offsets": [0.1, -0.1, 0.3], "num_images": 30}


def saved_livit(folder, tiny):
    sizes = tiny | {"num_hidden_layers": 1}
    config = LiViTConfig(**sizes, class_counts=COUNTS, id2label=NAMES, calibration=CALIBRATION)
    return saved(folder, LiViTForImageClassification(config), eval_processor(16, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)))


def saved_resnet(folder, _):
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", id2label=NAMES)
    model = balance(ResNetForImageClassification(config), class_counts=COUNTS, loss="bal_ce")
    return saved(folder, model, ConvNextImageProcessor(size={"shortest_edge": 32}, crop_pct=0.875))


def saved_timm(folder, _):
    """Its image processor is written into config.json, with the model."""
    facts = {"input_size": (3, 32, 32), "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.25, 0.3), "crop_pct": 0.875}
    config = TimmWrapperConfig(
        architecture="resnet10t", model_args={"channels": (8, 8, 16, 16)}, pretrained_cfg=facts, id2label=NAMES
    )
    model = balance(TimmWrapperForImageClassification(config), class_counts=COUNTS, loss="bal_ce")
    return saved(folder, model, TimmWrapperImageProcessor(facts, architecture="resnet10t"))


def saved(folder, model, processor):
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def images_as_read(predictor: Predictor, folder, number: int) -> tuple[Predictions, np.ndarray]:
    """Files as the package classifies them, and the bytes that are left of them once resized and cropped."""
    noise = np.random.default_rng(0)
    read = []
    for i in range(number):
        Image.fromarray(noise.integers(0, 256, (50, 70, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        read.append(folder / f"{i}.png")
    predictions = Predictions.concatenate(list(predictor.predict(read)))
    return predictions, np.stack([as_bytes(predictor.processor, Image.open(path)) for path in read])


def as_bytes(processor, image: Image.Image) -> np.ndarray:
    if isinstance(processor, TimmWrapperImageProcessor):
        for step in processor.val_transforms.transforms[:-2]:  # the last two rescale and normalise
            image = step(image)
        return np.asarray(image)
    steps = {"do_rescale": False, "do_normalize": False, "return_tensors": "pt"}
    return processor(image, **steps)["pixel_values"][0].byte().permute(1, 2, 0).numpy()


def assert_no_paths(folder) -> None:
    """Assert that no file of a folder tells where packages lie on the machine that wrote it."""
    found = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    packages = [str(Path(module.__file__).parents[1]).encode() for module in (torch, livt_hf)]
    assert found and not [name for name, content in found.items() if any(path in content for path in packages)]


FAMILIES = pytest.mark.parametrize("save", [saved_livit, saved_resnet, saved_timm])


@FAMILIES
def test_bytes_of_the_right_size_are_all_that_the_graph_needs(tmp_path, tiny, save):
    predictor = Predictor(str(save(tmp_path / "model", tiny)))
    predictions, images = images_as_read(predictor, tmp_path, 3)
    expected = torch.from_numpy(predictions.posterior([0.3, 0.2, 0.5]))
    graph = ServingGraph(predictor.model, predictor.processor, torch.tensor([0.3, 0.2, 0.5]))
    torch.testing.assert_close(graph(torch.from_numpy(images)).detach(), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@FAMILIES
def test_onnx_gives_the_calibrated_posterior_of_any_number_of_images_under_the_prior_of_a_file(tmp_path, tiny, save):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, prior = save(tmp_path / "model", tiny), {"newt": 5, "cat": 3, "dog": 2}
    (tmp_path / "prior.json").write_text(json.dumps(prior))
    main([str(model), str(tmp_path / "out"), "--to", "onnx", "--prior", str(tmp_path / "prior.json")])
    session = runtime.InferenceSession(tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"])
    predictions, images = images_as_read(Predictor(str(model)), tmp_path, 3)
    expected = torch.from_numpy(predictions.posterior([0.3, 0.2, 0.5]))
    for number in (1, 3):
        [found] = session.run(["probabilities"], {"images": images[:number]})
        torch.testing.assert_close(torch.from_numpy(found), expected[:number], atol=1e-4, rtol=0)
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == list(NAMES.values())
    assert_no_paths(tmp_path / "out")
    again = load_processor(str(tmp_path / "out"))
    assert as_bytes(again, Image.new("RGB", (50, 70))).shape == images.shape[1:]


def test_torch_export_gives_the_logits_where_no_prior_is_asked_for(tmp_path, tiny, capsys):
    model = saved_livit(tmp_path / "model", tiny)
    main([str(model), str(tmp_path / "out"), "--to", "torch-export"])
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    predictions, images = images_as_read(Predictor(str(model)), tmp_path, 3)
    np.testing.assert_allclose(program(torch.from_numpy(images)).detach(), predictions.logits, atol=1e-4)
    assert_no_paths(tmp_path / "out")
    assert "bytes of RGB (images, 16, 16, 3)" in capsys.readouterr().out
    with refusal(None, tmp_path / "out"):
        main([str(model), str(tmp_path / "out"), "--to", "torch-export"])


def test_a_model_from_elsewhere_is_exported_under_a_prior_once_its_class_counts_are_told(tmp_path):
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", id2label=NAMES)
    processor = ConvNextImageProcessor(size={"shortest_edge": 32}, crop_pct=0.875)
    model = saved(tmp_path / "model", ResNetForImageClassification(config), processor)
    (tmp_path / "counts.json").write_text(json.dumps(COUNTS))
    options = ["--to", "torch-export", "--prior", "training", "--class_counts", str(tmp_path / "counts.json")]
    main([str(model), str(tmp_path / "out"), *options])
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    predictions, images = images_as_read(Predictor(str(model)), tmp_path, 2)
    softmax = predictions.scores()  # that of cross-entropy is the posterior
    torch.testing.assert_close(program(torch.from_numpy(images)), softmax, atol=1e-4, rtol=0)


def test_what_no_graph_can_hold_is_refused(tmp_path, tiny):
    livit = LiViTForImageClassification(LiViTConfig(**tiny, num_labels=3))
    processor = eval_processor(16, (0.5,) * 3, (0.5,) * 3)
    with refusal("prior", "class_counts"):
        ServingGraph(livit, processor, torch.tensor([0.2, 0.3, 0.5]))
    processor.do_center_crop = False
    with refusal(None, "different sizes"):
        get_output_size(processor)
    processor.do_center_crop, whole = True, processor.preprocess
    processor.preprocess = lambda *images, **steps: {"pixel_values": whole(*images, **steps)["pixel_values"].square()}
    with refusal(None, "rescale and normalise"):
        ServingGraph(livit, processor)
    with refusal(None, "beit", "--prior"):
        main([str(tmp_path), str(tmp_path / "out"), "--to", "beit", "--prior", "uniform"])


@pytest.mark.parametrize("wrong", ["batch of one", "outputs"])
def test_a_file_whose_outputs_are_not_those_of_the_model_is_refused(tmp_path, tiny, monkeypatch, wrong):
    def save(graph, images, folder):
        if wrong == "outputs":
            return lambda batch: graph(batch) + 1e-3
        return lambda batch: graph(batch) * (len(batch) > 1)

    monkeypatch.setitem(EXPORTERS, "torch-export", save)
    with refusal(None, "differ by"):
        main([str(saved_livit(tmp_path / "model", tiny)), str(tmp_path / "out"), "--to", "torch-export"])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # nothing is left that could be served
