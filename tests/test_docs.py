"""What the README and the pages of docs/ say is so: names exist, commands parse, links resolve, code runs."""

import importlib
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from accelerate.commands.launch import launch_command_parser
from datasets import config as datasets_config
from documents import (
    COMMAND_PAGES,
    DOCS,
    GENERATED,
    GUIDES,
    LINKED_PAGES,
    PAGES,
    README,
    ROOT,
    blocks,
    inline_code,
    python_block,
    shell_commands,
)
from PIL import Image
from recipe_runs import make_pictures
from test_tuning import wrapped_timm
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainingArguments,
)

from livt_hf import LiViTConfig, LiViTForImageClassification
from livt_hf.classifiers import load_model, load_processor
from livt_hf.cli import main as cli
from livt_hf.cli.options import parse_words
from livt_hf.cli.settings import settings_class
from livt_hf.data import class_counts, eval_processor, load_long_tailed, read_rgb
from livt_hf.data.benchmarks import BENCHMARKS
from livt_hf.long_tail.losses import LOSSES
from livt_hf.predictions.predict import Predictor
from livt_hf.recipes import convert

DOTTED = re.compile(r"`((?:cli|data|training|predictions|reports|hub|runs|specs)(?:\.\w+)+)(?:\(|`)")
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in COMMAND_PAGES}
COMMANDS = list(dict.fromkeys(command for text in TEXTS.values() for command in shell_commands(text)))
# What commands in the text stand for something with.
STAND_INS = {"IMAGE...": "picture.png", "QUESTION": "data", "RANK": "0"}
# Words of other programs that the text mentions alone.
OTHERS = {"--config", "--help", "--help_all", "--multi_gpu", "--num_processes"}


def named_objects() -> list[str]:
    return sorted({name for page in DOCS.glob("*.md") for name in DOTTED.findall(page.read_text(encoding="utf-8"))})


def test_the_pages_name_objects():
    assert len(named_objects()) > 20


@pytest.mark.parametrize("name", named_objects())
def test_a_name_in_the_docs_exists(name):
    module, rest = "livt_hf", name.split(".")
    while rest:
        try:
            importlib.import_module(f"{module}.{rest[0]}")
        except ModuleNotFoundError:
            break
        module, rest = f"{module}.{rest[0]}", rest[1:]
    found = importlib.import_module(module)
    for attribute in rest:
        found = getattr(found, attribute)


def check_livt(words: list[str]) -> None:
    place = next(number for number, word in enumerate(words) if word in cli.COMMANDS)
    launch_command_parser().parse_args([*words[:place], "script.py"])
    if words[place + 1 :] or words[place] == "eval":  # another command that is named alone is not one to copy
        parse_words(settings_class(words[place]), words[place + 1 :])


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_documents_exists_and_takes_these_options(command):
    words = [STAND_INS.get(word, word) for word in shlex.split(command)]
    if words[:3] == ["python3", "-m", "venv"] or words[:2] == ["pip", "install"] or "pytest" in words:
        return
    if words[0] == "livt":
        check_livt(words[1:])
        return
    if words[0] == "mkdocs":
        assert words[1:] in (["build"], ["serve"])
        return
    (script,) = [word for word in words if word.endswith(".py")]
    assert (ROOT / script).is_file(), script
    if words[0] == "accelerate":
        options = launch_command_parser().parse_args(words[2:]).training_script_args
        parse_words(settings_class(Path(script).stem.replace("_", "-")), options)


def test_the_documents_have_every_command():
    assert {word for command in COMMANDS for word in shlex.split(command)} >= set(cli.COMMANDS)


def test_every_option_the_documents_mention_exists():
    known = {f"--{name}" for command in cli.COMMANDS for name in settings_class(command).names()}
    words = {word for text in TEXTS.values() for code in inline_code(text) for word in code.split()}
    mentioned = {word.partition("=")[0].replace("--no-", "--") for word in words if word.startswith("--")}
    assert mentioned - known - OTHERS == set()


@pytest.mark.parametrize("page", LINKED_PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_relative_link_resolves(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    links = [target for target in re.findall(r"\]\(([^)\s]+)\)", prose) if not target.startswith("http")]
    for target, anchor in (link.partition("#")[::2] for link in links):
        path = (page.parent / target).resolve() if target else page
        assert path.exists() or path in GENERATED, target
        if anchor and path not in GENERATED:
            assert anchor in headings(path), f"{target}#{anchor}"


def headings(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_every_page_is_in_the_navigation():
    class Loader(yaml.SafeLoader):
        """Takes the names of Python objects in mkdocs.yml as text."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix)
    navigation = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]

    def pages(entry) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages(part)]

    named = pages(navigation)
    assert {page.relative_to(DOCS).as_posix() for page in PAGES[1:]} <= set(named)
    assert len(named) == len(set(named))


@pytest.mark.parametrize("page", TEXTS)
def test_the_python_of_a_page_compiles(page):
    for number, code in enumerate(blocks(TEXTS[page], "python")):
        compile(code, f"{page}, block {number}", "exec")


@pytest.fixture
def resnet() -> ResNetForImageClassification:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", num_labels=3)
    return ResNetForImageClassification(config).eval()


def test_a_classifier_is_trained_as_the_readme_says(request, tmp_path, monkeypatch, resnet, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets_config, "HF_DATASETS_CACHE", tmp_path / "cache")
    load, of_imagenet = AutoModelForImageClassification.from_pretrained, tmp_path / "resnet-50"
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", num_labels=1000)
    ResNetForImageClassification(config).save_pretrained(of_imagenet)

    def from_pretrained(name: str, **options) -> ResNetForImageClassification:
        return load(of_imagenet, **options) if name == "microsoft/resnet-50" else resnet

    monkeypatch.setattr(AutoModelForImageClassification, "from_pretrained", from_pretrained)
    processor = eval_processor(16, [0.5] * 3, [0.25] * 3)
    monkeypatch.setattr(AutoImageProcessor, "from_pretrained", lambda name: processor)
    make_pictures(Path("FOLDER"), train=(6, 3, 1), test=3)
    names = {}
    exec(python_block(README, "Trainer"), names)
    assert names["model"].config.long_tail.class_counts == [6, 3, 1] and "eval_few" in capsys.readouterr().out
    exec(python_block(README, "Trainer", 1), names)
    model, pixels = names["model"], names["pixel_values"]
    assert model.config.long_tail.loss == "ce"
    assert model.probabilities(pixels, prior=[0.2, 0.2, 0.6]).sum(-1).tolist() == pytest.approx([1] * 8)


def test_the_trainer_takes_metrics_and_a_sampler_as_the_guide_says(tmp_path, resnet):
    labels = [0, 0, 0, 0, 1, 1, 2, 0]
    rows = [{"pixel_values": torch.randn(3, 16, 16), "labels": label} for label in labels]
    arguments = TrainingArguments(str(tmp_path), num_train_epochs=1, report_to=[], save_strategy="no")
    names = dict(Trainer=Trainer, torch=torch, model=resnet, counts=np.array([5, 2, 1]), epochs=1, arguments=arguments)
    code = python_block((GUIDES / "trainer.md").read_text(encoding="utf-8"))
    exec(code, names | dict(train=rows, test=rows, train_labels=labels))
    assert resnet.config.long_tail.loss == "bal_ce" and resnet.config.long_tail.label_smoothing == 0.1
    assert resnet.config.long_tail.seen_counts is not None


def test_a_model_is_served_as_the_guide_says(tmp_path, monkeypatch, tiny, capsys):
    monkeypatch.chdir(tmp_path)
    LiViTForImageClassification(LiViTConfig(**tiny, class_counts=[50, 20, 5])).save_pretrained("RUN")
    eval_processor(16, [0.5] * 3, [0.25] * 3).save_pretrained("RUN")
    Image.new("RGB", (40, 30), (200, 30, 30)).save("picture.png")
    names = {}
    exec(python_block(TEXTS["docs/guides/serve.md"]), names)
    model, pixels = names["model"], names["pixels"]
    uniform, mine = model.probabilities(pixels), model.probabilities(pixels, prior=[0.7, 0.3, 0.0])
    torch.testing.assert_close(uniform, torch.full((1, 3), 1 / 3), atol=0.01, rtol=0)  # it has learned nothing
    torch.testing.assert_close(mine, torch.tensor([[0.7, 0.3, 0.0]]), atol=0.01, rtol=0)
    assert capsys.readouterr().out == f"{uniform}\n{mine}\n"


@pytest.fixture
def losses_restored():
    known = dict(LOSSES)
    yield
    for name in LOSSES.keys() - known.keys():
        del LOSSES[name]


def test_a_loss_is_added_as_the_guide_says(losses_restored, tiny):
    exec(python_block(TEXTS["docs/guides/own-loss.md"]), {})
    model = LiViTForImageClassification(LiViTConfig(**tiny, class_counts=[50, 20, 5], loss="my_loss"))
    loss = model(torch.randn(4, 3, 16, 16), labels=torch.tensor([0, 0, 1, 2])).loss
    torch.testing.assert_close(loss, torch.tensor(3.0).log() + 2 / 3, atol=1e-3, rtol=0)  # all classes at 1 / 3
    with pytest.raises(ValueError, match="its second term changes what the outputs estimate"):
        model.probabilities(torch.randn(1, 3, 16, 16))


def test_detections_are_joined_with_labels_as_the_guide_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("labels.csv").write_text("image,label,site\na/1.jpg,deer,a\na/2.jpg,empty,a\n")
    animal, unsure, person = (
        dict(category=c, conf=p, bbox=[0.1, 0.2, 0.3, 0.4]) for c, p in (("1", 0.9), ("1", 0.1), ("2", 0.9))
    )
    pictures = [dict(file=f"a/{number}.jpg", detections=[animal, unsure, person]) for number in (1, 2, 3)]
    Path("detections.json").write_text(
        json.dumps({"images": [*pictures, {"file": "a/4.jpg", "failure": "unreadable"}]})
    )
    exec(python_block(TEXTS["docs/guides/camera-traps.md"]), {})
    assert Path("boxes.csv").read_text().split() == [
        "image,label,site,x,y,width,height",
        "a/1.jpg,deer,a,0.1,0.2,0.3,0.4",
    ]


def test_a_dataset_is_added_as_the_guide_says(request, tmp_path, monkeypatch):
    request.addfinalizer(lambda: BENCHMARKS.pop("wards"))
    monkeypatch.setattr(datasets_config, "HF_DATASETS_CACHE", tmp_path / "cache")
    pictures = make_pictures(tmp_path / "pictures", train=(4, 2), test=1)
    exec(python_block(TEXTS["docs/guides/own-dataset.md"]), {})
    assert class_counts(load_long_tailed("wards", source=pictures)["train"]).tolist() == [4, 2]


def test_logits_from_elsewhere_get_a_prior_as_the_guide_says(capsys):
    names = {}
    exec(python_block(TEXTS["docs/guides/external-models.md"]), names)
    logits, counts = torch.tensor([[2.0, 0.5, 0.1], [0.3, 0.2, 0.1]]), torch.tensor([900.0, 120.0, 15.0])
    expected = (logits - counts.log()).softmax(-1)
    torch.testing.assert_close(names["record"].posterior(prior="uniform"), expected.numpy(), check_dtype=False)
    assert len(capsys.readouterr().out) > 0


def test_a_classifier_trained_elsewhere_is_told_its_counts_as_the_guide_says(resnet):
    names = {"model": resnet, "pixels": torch.randn(2, 3, 16, 16)}
    logits = resnet(names["pixels"]).logits
    exec(python_block(TEXTS["docs/guides/external-models.md"], number=1), names)
    counts, prior = torch.tensor([900.0, 120.0, 15.0]), torch.tensor([0.2, 0.2, 0.6])
    torch.testing.assert_close(
        names["model"].probabilities(names["pixels"], prior=prior),
        (logits.softmax(-1) * prior / counts / (logits.softmax(-1) * prior / counts).sum(-1, keepdim=True)),
        check_dtype=False,
    )


@pytest.mark.slow
def test_a_graph_is_asked_as_the_guide_says(tmp_path, monkeypatch, tiny, capsys):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    model = LiViTForImageClassification(LiViTConfig(**tiny, class_counts=[50, 20, 5], id2label=dict(enumerate("abc"))))
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained("model")
    eval_processor(16, [0.5] * 3, [0.25] * 3).save_pretrained("model")
    Image.effect_mandelbrot((40, 30), (-2, -1.5, 1, 1.5), 50).convert("RGB").save("picture.png")
    convert.main(["model", "OUT", "--to", "onnx", "--prior", "uniform"])
    capsys.readouterr()
    exec(python_block(TEXTS["docs/guides/export.md"]), {})
    [predictions] = Predictor("model").predict([Path("picture.png")])
    assert capsys.readouterr().out.strip() == "abc"[predictions.posterior("uniform").argmax()]


@pytest.mark.slow
def test_the_graph_of_a_timm_model_is_asked_as_the_guide_says(tmp_path, monkeypatch):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    model = load_model(str(wrapped_timm(tmp_path / "timm"))).eval()
    Image.effect_mandelbrot((60, 50), (-2, -1.5, 1, 1.5), 50).convert("RGB").save("picture.png")
    convert.main(["timm", "OUT", "--to", "onnx"])
    names = {"session": onnxruntime.InferenceSession("OUT/model.onnx"), "processor": load_processor("timm")}
    exec(python_block(TEXTS["docs/guides/export.md"], number=1), names)
    pixels = names["processor"]([read_rgb("picture.png")], return_tensors="pt").pixel_values
    with torch.no_grad():
        expected = model(pixels).logits
    torch.testing.assert_close(torch.from_numpy(names["probabilities"]), expected, atol=1e-3, rtol=0)
