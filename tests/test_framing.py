"""What a model sees of images that are not square, in evaluation, in training and wherever its folder is loaded."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset, Features
from datasets import Image as ImageColumn
from PIL import Image
from recipe_runs import make_pictures as make_pictures_of_colours
from refusals import refusal
from test_tuning import resnet, trained, wrapped_timm
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    BitImageProcessor,
    ConvNextImageProcessor,
    DeiTImageProcessor,
    SiglipImageProcessor,
    TimmWrapperImageProcessor,
    ViTImageProcessor,
    pipeline,
)

from livt_hf.data import FinetuneAugmentation, load_long_tailed
from livt_hf.data.first_look import dim_outside, read_image_sizes
from livt_hf.data.transforms import CROP_NUMBERS, _crop_boxes
from livt_hf.errors import Interrupted
from livt_hf.files import read_values, write_values
from livt_hf.hub.contents import PROCESSOR_TEXTS, select_numbers
from livt_hf.long_tail.objectives import compare_predictions
from livt_hf.predictions.predict import Predictor
from livt_hf.processors import (
    FRAMINGS,
    Framing,
    frame_processor,
    read_framing,
    read_input_spec,
    to_portable_processor,
)
from livt_hf.recipes import data, finetune, train
from livt_hf.recipes.benchmarks.framing import make_pictures
from livt_hf.runs import Run
from livt_hf.training.framing import try_framings

CROPS = dict(size={"shortest_edge": 73}, do_center_crop=True, crop_size={"height": 64, "width": 64})
# Processors of families, with the framing and the margin that they have.
FAMILIES = {
    "vit": (ViTImageProcessor(size={"height": 64, "width": 64}), "squash", 1.0),
    "dino": (BitImageProcessor(**CROPS), "crop", 64 / 73),
    "convnext": (ConvNextImageProcessor(size={"shortest_edge": 64}), "crop", 0.875),
    "large convnext": (ConvNextImageProcessor(size={"shortest_edge": 384}), "squash", 1.0),
    "siglip": (SiglipImageProcessor(size={"height": 64, "width": 64}), "squash", 1.0),
    "deit": (DeiTImageProcessor(), "squash", 0.875),
    "timm": (TimmWrapperImageProcessor({"input_size": (3, 64, 64), "crop_pct": 0.9}, "resnet18"), "crop", 0.9),
}


@pytest.fixture(autouse=True)
def _runs(tmp_path, monkeypatch):
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")


def mark(width: int, height: int, left: int, top: int) -> Image.Image:
    """A white image with a black mark of a tenth of its size."""
    image = Image.new("RGB", (width, height), "white")
    image.paste((0, 0, 0), (left, top, left + width // 10, top + height // 10))
    return image


def colours(processor, image: Image.Image) -> torch.Tensor:
    """Return what a model sees of an image, as colours from 0 to 1."""
    inputs = read_input_spec(processor)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (inputs.mean, inputs.std))
    return processor(image, return_tensors="pt")["pixel_values"][0] * std + mean


@pytest.mark.parametrize("family", FAMILIES)
def test_the_framing_of_a_processor_is_read_from_what_it_does(family):
    processor, name, margin = FAMILIES[family]
    framing = read_framing(processor)
    assert framing.name == name
    assert framing.margin == pytest.approx(margin, abs=0.011)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mark_at_the_border_is_seen_unless_the_centre_is_cropped(family):
    wide = mark(400, 200, 0, 100)
    seen = {name: colours(frame_processor(FAMILIES[family][0], name), wide) for name in FRAMINGS}
    side = read_input_spec(FAMILIES[family][0]).size
    middle = {name: picture[:, side // 4 : -side // 4] for name, picture in seen.items()}  # without the padding
    assert middle["crop"].min() > 0.9
    for name in ("squash", "pad"):
        assert middle[name].min() < 0.1
        assert middle[name].argmin() % side < side // 10  # at the left border


@pytest.mark.parametrize("name", FRAMINGS)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "timm"])
def test_stock_transformers_load_the_framing_as_it_is_saved_and_as_it_is_published(family, name, tmp_path):
    processor, picture = frame_processor(FAMILIES[family][0], name), mark(90, 50, 0, 10)
    processor.save_pretrained(tmp_path)
    assert torch.equal(colours(AutoImageProcessor.from_pretrained(tmp_path), picture), colours(processor, picture))
    path = tmp_path / "preprocessor_config.json"
    write_values(path, select_numbers(to_portable_processor(read_values(path)), PROCESSOR_TEXTS))
    published = AutoImageProcessor.from_pretrained(tmp_path)
    assert torch.equal(colours(published, picture), colours(processor, picture))
    assert read_framing(published).name == name


@pytest.mark.parametrize(
    ("framing", "width", "height", "share"),
    [
        (Framing("crop"), 400, 200, 1 / 2),
        (Framing("crop", 0.5), 200, 400, 1 / 8),
        (Framing("squash"), 400, 200, 1),
        (Framing("squash", 0.5), 400, 200, 1 / 4),
        (Framing("pad"), 30, 400, 1),
    ],
)
def test_the_seen_share_of_an_image_is_that_of_its_proportions(framing, width, height, share):
    assert framing.seen_share(width, height) == pytest.approx(share)


@pytest.mark.parametrize("name", ["squash", "pad"])
def test_the_largest_training_crop_is_what_evaluation_sees(name):
    processor = frame_processor(ViTImageProcessor(size={"height": 64, "width": 64}, resample=3), name)
    pixels = torch.from_numpy(np.array(mark(160, 60, 10, 20))).permute(2, 0, 1)
    augmentation = FinetuneAugmentation(64, (1.0, 1.0), flip=False, rand_augment=None, framing=read_framing(processor))
    (trained_on,) = augmentation.batch([pixels], seed=0, epoch=0, indices=[0]) / 255
    torch.testing.assert_close(trained_on, colours(processor, pixels), atol=0.02, rtol=0)


def test_crops_for_squashed_images_have_the_proportions_of_the_image_give_or_take_a_third():
    numbers = np.random.default_rng(0).random((200, CROP_NUMBERS - 1))
    sides = np.full(200, 1000), np.full(200, 3000)
    _, _, height, width = _crop_boxes(numbers, *sides, (0.1, 1.0), own_ratio=True).T
    assert np.all((width / height / 3 > 0.74) & (width / height / 3 < 1.35))
    _, _, height, width = _crop_boxes(numbers, *sides, (0.1, 1.0)).T
    assert np.all((width / height > 0.74) & (width / height < 1.35))


def test_pad_crop_has_no_framing():
    with refusal("augmentation"):
        FinetuneAugmentation(64, policy="pad-crop", framing=Framing("squash"))


@pytest.mark.parametrize("family", [resnet, wrapped_timm])
def test_a_run_keeps_its_framing_wherever_it_is_loaded(family, tmp_path):
    pictures = make_pictures_of_colours(tmp_path / "pictures")
    run: Run = trained(pictures, family(tmp_path / "start"), tmp_path / "run", "--tune", "head", "--framing", "squash")
    wide = mark(90, 40, 0, 20)
    wide.save(tmp_path / "wide.png")
    assert read_framing(AutoImageProcessor.from_pretrained(run.folder)).name == "squash"
    serve = pipeline("image-classification", str(run.folder), top_k=None)
    probabilities = {answer["label"]: answer["score"] for answer in serve(str(tmp_path / "wide.png"))}
    (record,) = Predictor(str(run.folder)).predict([tmp_path / "wide.png"])
    logits = np.asarray(record.logits[0])
    model = AutoModelForImageClassification.from_pretrained(run.folder)
    ranked = sorted(probabilities, key=probabilities.get)
    assert ranked == [model.config.id2label[label] for label in np.argsort(logits).tolist()]


def small_set(folder: Path, name: str) -> Path:
    """A made-up set for a tiny backbone of random weights, whose features tell colours."""
    return make_pictures(folder / name, name, train=(40, 24, 16, 12), test=20, side=40, coloured=True)


@pytest.mark.parametrize(("name", "right"), [("parts", "squash"), ("wide", "crop")])
def test_auto_takes_the_framing_that_shows_what_tells_the_classes(name, right, tmp_path):
    words = ["--tune", "head", "--group_column", "part", "--loss", "bal_ce", "--image_size", "32"]
    start, table = resnet(tmp_path / "start"), small_set(tmp_path, name)
    wrong = {"crop": "squash", "squash": "crop"}[right]
    auto = trained(table, start, tmp_path / "auto", *words)
    other = trained(table, start, tmp_path / "other", *words, "--framing", wrong)
    trial = auto.results.framing
    assert (trial["chosen"], trial["own"], trial["tried"]) == (right, "crop", "squash")
    assert (trial["gain"] > trial["standard_error"]) == (right == "squash")
    assert auto.arguments["framing"] == right
    assert read_framing(AutoImageProcessor.from_pretrained(auto.folder)).name == right
    name = "mean_class_accuracy"
    assert auto.results.metrics[name] > other.results.metrics[name] + 0.1


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Path:
    return small_set(tmp_path_factory.mktemp("framing"), "parts")


def tried(table: Path, folder: Path, classes: range = range(4), **options):
    path = str(resnet(folder / "start"))
    train = load_long_tailed(str(table), group_column="part")["train"]
    train = train.select(np.flatnonzero(np.isin(train["label"], classes)))
    torch.manual_seed(0)
    model = AutoModelForImageClassification.from_pretrained(path)
    return try_framings(model, AutoImageProcessor.from_pretrained(path), train, Accelerator(cpu=True), **options)


def test_a_trial_takes_as_many_images_as_its_limit_and_its_time_allow(parts, tmp_path):
    assert tried(parts, tmp_path, max_images=60).num_images == 60
    assert tried(parts, tmp_path, seconds=1e-9) is None


def test_there_is_no_trial_of_images_that_are_all_of_one_class(parts, tmp_path):
    assert tried(parts, tmp_path, classes=range(1)) is None


def test_a_trial_leaves_random_numbers_and_weights_alone(parts, tmp_path):
    torch.manual_seed(1)
    expected, path = torch.rand(3), str(resnet(tmp_path / "start"))
    model = AutoModelForImageClassification.from_pretrained(path)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train = load_long_tailed(str(parts))["train"]
    torch.manual_seed(1)
    try_framings(model, AutoImageProcessor.from_pretrained(path), train, Accelerator(cpu=True))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_resumed_run_keeps_the_framing_that_was_chosen_when_it_began(parts, tmp_path):
    words = ["--tune", "lora", "--lora_rank", "1", "--group_column", "part", "--framing", "auto", "--image_size", "32"]
    words += ["--dataset", parts, "--pretrained", resnet(tmp_path / "start"), "--output_dir", tmp_path / "run"]
    words += "--epochs 2 --warmup_epochs 1 --batch_size 16 --threads 1 --eval_epochs 2".split()
    words = [str(word) for word in words]
    with pytest.raises(Interrupted):
        finetune.main([*words, "--max_hours", "0"])
    assert Run(tmp_path / "run").arguments["framing"] == "squash"
    finetune.main([*words, "--resume", "auto", "--max_hours", "1"])
    run = Run(tmp_path / "run")
    assert (run.results.framing["chosen"], run.results.framing["tried"]) == ("squash", "squash")
    assert read_framing(AutoImageProcessor.from_pretrained(run.folder)).name == "squash"


def test_train_chooses_the_framing_once_for_a_backbone(parts, tmp_path):
    torch.manual_seed(0)
    words = [parts, "--pretrained", wrapped_timm(tmp_path / "start"), "--hours", 0, "--threads", 1]
    train.main([str(word) for word in [*words, "--group_column", "part", "--output_dir", tmp_path / "run"]])
    plan, run = read_values(tmp_path / "run" / "plan.json"), Run(tmp_path / "run" / "finetune")
    chosen = plan["framing"]  # random weights of another version of timm may choose the other
    assert chosen in ("crop", "squash") and run.results.framing == plan["framing_trial"]
    assert read_framing(AutoImageProcessor.from_pretrained(run.folder)).name == chosen
    shutil.rmtree(run.folder)
    write_values(tmp_path / "run" / "plan.json", plan | {"framing": "pad"})  # which no trial chooses
    train.main(["--resume", str(tmp_path / "run")])
    assert read_framing(AutoImageProcessor.from_pretrained(run.folder)).name == "pad"


def test_a_model_from_scratch_is_trained_and_saved_with_the_framing_that_is_named(parts, tmp_path):
    words = ["--framing", "pad", "--group_column", "part", "--model_size", "micro", "--image_size", "32"]
    run = trained(parts, "none", tmp_path / "run", *words)
    assert read_framing(AutoImageProcessor.from_pretrained(run.folder)).name == "pad"
    assert run.results.framing == {"chosen": "pad"}


@pytest.mark.parametrize(
    ("first", "second", "gain"), [([0, 0, 0, 1], [0, 0, 0, 1], 0), ([0, 1, 1, 1], [0, 0, 0, 1], 1 / 3)]
)
def test_the_gain_of_predictions_is_the_difference_of_their_scores(first, second, gain):
    labels = np.array([0, 0, 0, 1])
    measured, error = compare_predictions(np.array(first), np.array(second), labels, "mean_class_accuracy")
    assert measured == pytest.approx(gain)
    assert (error > 0) == (gain > 0)


def test_predictions_of_one_group_are_drawn_together():
    first, labels = np.zeros(40, dtype=int), np.repeat([0, 1], 20)
    second, groups = np.where(np.arange(40) % 2, labels, 0), np.arange(40) // 10
    alone, grouped = (compare_predictions(first, second, labels, "accuracy", groups=g)[1] for g in (None, groups))
    assert grouped > 1.3 * alone


def test_sizes_are_those_of_the_upright_image_read_from_headers(tmp_path):
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (40, 20)).save(tmp_path / "plain.png")
    Image.new("RGB", (40, 20)).save(tmp_path / "turned.jpg", exif=turned)
    (tmp_path / "broken.png").write_bytes(b"no image")
    files = [str(tmp_path / name) for name in ("plain.png", "turned.jpg", "broken.png")]
    dataset = Dataset.from_dict({"image": files}, features=Features({"image": ImageColumn()}))
    assert read_image_sizes(dataset, [0, 1, 2]).tolist() == [[40, 20], [20, 40], [0, 0]]


def test_data_says_what_the_crop_cuts_away_and_dims_it_on_the_sheet(tmp_path, capsys):
    for label, size in {"square": (64, 64), "wide": (256, 64)}.items():
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for number in range(10):
            Image.new("RGB", size, (0, 0, number)).save(tmp_path / "pictures" / label / f"{number}.png")
    data.main([str(tmp_path / "pictures"), "--output", str(tmp_path / "sheet")])
    said = capsys.readouterr().out
    assert f"wide ({1 - 0.875**2 / 4:.0%}), square ({1 - 0.875**2:.0%})" in said
    data.main([str(tmp_path / "pictures"), "--pretrained", str(resnet(tmp_path / "start"))])
    assert "wide (75%), square (0%)" in capsys.readouterr().out


def test_a_picture_is_pale_outside_of_what_is_seen():
    pale = np.asarray(dim_outside(Image.new("RGB", (100, 50)), Framing("crop", 0.8)))[..., 0]
    assert (pale == 0).sum() == 40 * 40
    assert (pale[5:45, 30:70] == 0).all()
    assert pale[0, 0] > 150


def test_nearly_square_images_and_benchmarks_keep_the_framing_of_the_backbone(tmp_path):
    pictures = make_pictures_of_colours(tmp_path / "pictures")
    run = trained(pictures, resnet(tmp_path / "start"), tmp_path / "run", "--tune", "head")
    assert run.results.framing == {"chosen": "crop"}
    assert run.arguments["framing"] == "own"
