"""What README.md says is so: commands parse, code runs, and tree, links and tables are those of the project."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from datasets import config as datasets_config
from PIL import Image
from recipe_runs import make_pictures
from test_tuning import wrapped_timm
from transformers import ResNetConfig, ResNetForImageClassification

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
from livt_hf.recipes.ablations import REPORTED
from livt_hf.recipes.paper import tables

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
README, HOW_TO = (ROOT / "README.md").read_text(), (RECIPES / "README.md").read_text()
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
PAGES += [f"recipes/{folder}README.md" for folder in ("", "configs/", "results/")]
# What commands in the text stand for something with.
STAND_INS = {"IMAGE...": "picture.png", "QUESTION": "data", "RANK": "0"}
# Words of Accelerate and of the benchmark that the text mentions alone.
OTHERS = {"--multi_gpu", "--num_processes", "--quick", "--utilisation"}


def inline_code(page: str) -> list[str]:
    prose = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


def shell_commands(page: str) -> list[str]:
    """Every command of the shell blocks and of the inline code, one per string."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    lines = [line for text in blocks for line in text.splitlines()]
    commands = [part.strip() for line in lines for part in re.sub(r"(^|\s)#.*", "", line).split("&&") if part.strip()]
    commands = [command.replace(".venv/bin/", "") for command in commands]
    code = inline_code(page)
    inline = [code for code in code if re.match(r"(livt|python|accelerate launch) \S", code) and " | " not in code]
    return [command for command in dict.fromkeys(commands + inline) if command not in ("livt eval", "livt sweep")]


def check_livt(words: list[str]) -> None:
    place = next(number for number, word in enumerate(words) if word in cli.COMMANDS)
    launch_command_parser().parse_args([*words[:place], "script.py"])
    if words[place + 1 :]:  # a command that is named alone is not one to copy
        parse_words(settings_class(words[place]), words[place + 1 :])


@pytest.mark.parametrize("command", dict.fromkeys(shell_commands(README) + shell_commands(HOW_TO)))
def test_a_command_of_the_documents_exists_and_takes_these_options(command):
    words = [STAND_INS.get(word, word) for word in shlex.split(command)]
    if words[:3] == ["python3", "-m", "venv"] or words[:2] == ["pip", "install"] or "pytest" in words:
        return
    if words[0] == "livt":
        check_livt(words[1:])
        return
    (script,) = [word for word in words if word.endswith(".py")]
    assert (ROOT / script).is_file(), script
    if words[0] == "accelerate":
        options = launch_command_parser().parse_args(words[2:]).training_script_args
        parse_words(settings_class(Path(script).stem.replace("_", "-")), options)


def test_the_readme_is_short_and_the_documents_have_every_command():
    assert len(README.splitlines()) <= 180
    found = {word for command in shell_commands(README) + shell_commands(HOW_TO) for word in shlex.split(command)}
    assert found >= set(cli.COMMANDS)


def test_every_option_the_documents_mention_exists():
    known = {f"--{name}" for command in cli.COMMANDS for name in settings_class(command).names()} | {
        "--config",
        "--help",
        "--help_all",
    }
    mentioned = {
        word for code in inline_code(README) + inline_code(HOW_TO) for word in code.split() if word.startswith("--")
    }
    assert mentioned - known - OTHERS == set()


def python_block(heading: str, page: str = README, number: int = 0) -> str:
    section = page[page.index(f"\n## {heading}\n") :]
    return re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[number]


def test_a_model_is_used_as_the_readme_says(tmp_path, monkeypatch, tiny, capsys):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/finetune-glyphs-micro/1")
    LiViTForImageClassification(LiViTConfig(**tiny, class_counts=[50, 20, 5])).save_pretrained(folder)
    eval_processor(16, [0.5] * 3, [0.25] * 3).save_pretrained(folder)
    Image.new("RGB", (40, 30), (200, 30, 30)).save("picture.png")
    names = {"my_frequencies": [0.7, 0.3, 0.0]}
    exec(python_block("Serving"), names)
    model, pixels = names["model"], names["pixels"]
    uniform, mine = model.probabilities(pixels), model.probabilities(pixels, prior=[0.7, 0.3, 0.0])
    torch.testing.assert_close(uniform, torch.full((1, 3), 1 / 3), atol=0.01, rtol=0)  # it has learned nothing
    torch.testing.assert_close(mine, torch.tensor([[0.7, 0.3, 0.0]]), atol=0.01, rtol=0)
    assert capsys.readouterr().out == f"{uniform[0].topk(3)}\n{mine[0].topk(3)}\n"


def test_a_classifier_is_balanced_as_the_readme_says():
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", num_labels=3)
    names = {"model": ResNetForImageClassification(config).eval(), "pixels": torch.randn(2, 3, 16, 16)}
    model = names["model"]
    exec(python_block("Serving", number=1), names)
    assert names["model"] is model and model.config.long_tail.class_counts == [900, 120, 15]
    assert model(names["pixels"], labels=torch.tensor([0, 2])).loss.isfinite()


@pytest.fixture
def losses_restored():
    known = dict(LOSSES)
    yield
    for name in LOSSES.keys() - known.keys():
        del LOSSES[name]


def test_a_loss_is_added_as_the_how_to_says(losses_restored, tiny):
    exec(python_block("Add a loss", HOW_TO), {})
    model = LiViTForImageClassification(LiViTConfig(**tiny, class_counts=[50, 20, 5], loss="poly1_ce"))
    loss = model(torch.randn(4, 3, 16, 16), labels=torch.tensor([0, 0, 1, 2])).loss
    torch.testing.assert_close(loss, torch.tensor(3.0).log() + 2 / 3, atol=1e-3, rtol=0)  # all classes at 1 / 3
    with pytest.raises(ValueError, match="its second term changes what the outputs estimate"):
        model.probabilities(torch.randn(1, 3, 16, 16))


def test_a_dataset_is_added_as_the_how_to_says(request, tmp_path, monkeypatch):
    request.addfinalizer(lambda: BENCHMARKS.pop("wards"))
    monkeypatch.setattr(datasets_config, "HF_DATASETS_CACHE", tmp_path / "cache")
    pictures = make_pictures(tmp_path / "pictures", train=(4, 2), test=1)
    exec(python_block("Add a dataset", HOW_TO), {})
    assert class_counts(load_long_tailed("wards", source=pictures)["train"]).tolist() == [4, 2]


def test_a_classifier_trained_elsewhere_is_told_its_counts_as_the_how_to_says():
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", num_labels=3)
    names = {"model": ResNetForImageClassification(config).eval(), "pixels": torch.randn(2, 3, 16, 16)}
    logits = names["model"](names["pixels"]).logits
    exec(python_block("Use a model that was trained elsewhere", HOW_TO), names)
    counts, prior = torch.tensor([900.0, 120.0, 15.0]), torch.tensor([0.2, 0.2, 0.6])
    torch.testing.assert_close(
        names["model"].probabilities(names["pixels"], prior=prior),
        (logits.softmax(-1) * prior / counts / (logits.softmax(-1) * prior / counts).sum(-1, keepdim=True)),
        check_dtype=False,
    )


@pytest.mark.slow
def test_a_graph_is_asked_as_the_how_to_says(tmp_path, monkeypatch, tiny, capsys):
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
    exec(python_block("Export a model to ONNX", HOW_TO), {})
    [predictions] = Predictor("model").predict([Path("picture.png")])
    assert capsys.readouterr().out.strip() == "abc"[predictions.posterior("uniform").argmax()]


@pytest.mark.slow
def test_the_graph_of_a_timm_model_is_asked_as_the_how_to_says(tmp_path, monkeypatch):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    model = load_model(str(wrapped_timm(tmp_path / "timm"))).eval()
    Image.effect_mandelbrot((60, 50), (-2, -1.5, 1, 1.5), 50).convert("RGB").save("picture.png")
    convert.main(["timm", "OUT", "--to", "onnx"])
    names = {"session": onnxruntime.InferenceSession("OUT/model.onnx"), "processor": load_processor("timm")}
    exec(python_block("Export a model to ONNX", HOW_TO, number=1), names)
    pixels = names["processor"]([read_rgb("picture.png")], return_tensors="pt").pixel_values
    with torch.no_grad():
        expected = model(pixels).logits
    torch.testing.assert_close(torch.from_numpy(names["probabilities"]), expected, atol=1e-3, rtol=0)


def test_the_tree_names_only_what_exists():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page[page.index("## The tree") :]
    folder, checked = None, []
    for line in re.search(r"^```\n(.*?)^```", section, re.DOTALL | re.MULTILINE)[1].splitlines():
        start = re.match(r"\w+/", line)
        if start:
            folder = ROOT / start[0]
            line = line[start.end() :]
            checked.append(folder)
        together = re.search(r"((?:\w+ )+)\.py", line)  # "pretrain finetune .py"
        checked += [folder / f"{name}.py" for name in together[1].split()] if together else []
        for name in re.findall(r"(?<!\S)[\w*/]+(?:/|\.py|\.yaml)(?=[\s,]|$)", line):
            if "*" in name:
                assert list(folder.glob(name)), name
            else:
                checked.append(ROOT / name if (ROOT / name).exists() else folder / name)
    assert [str(path.relative_to(ROOT)) for path in checked if not path.exists()] == []
    assert ROOT / "livt_hf" / "modeling_livit.py" in checked and RECIPES / "sweep.py" in checked and len(checked) > 30


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_resolves(page):
    text = (ROOT / page).read_text()
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not target.startswith(("http", "#"))]
    assert [target for target in targets if not ((ROOT / page).parent / target.split("#")[0]).exists()] == []
    headings = {
        re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)", text, re.M)
    }
    assert set(re.findall(r"\]\(#([^)\s]+)\)", text)) <= headings


def test_the_tables_are_those_of_the_result_files():
    with pytest.raises(SystemExit) as stopped:
        tables.main(["--check"])
    assert stopped.value.code == 0


def test_result_files_become_tables_between_the_markers(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results")

    def render(text: str) -> str:
        return tables.render(text, tmp_path / "docs" / "README.md")

    empty = "a\n<!-- results -->\n<!-- /results -->\nb\n<!-- benchmark -->\n<!-- /benchmark -->\nc\n"
    empty += "<!-- benchmark stop; step -->\n<!-- /benchmark -->\n<!-- benchmark stop -->\n<!-- /benchmark -->\n"
    empty += "<!-- scale -->\n<!-- /scale -->\n<!-- results glyphs/losses -->\n<!-- /results -->\n"
    assert render(empty.replace("<!-- results glyphs/losses -->\n<!-- /results -->\n", "")) in empty
    (tmp_path / "results" / "glyphs").mkdir(parents=True)
    row = {"variant": "ce", "seeds": 1, "posterior_accuracy": None, "paper": None}
    row |= {name: 50.0 for name in ("accuracy", "many", "medium", "few", "ece")}
    row |= {f"{name}_deviation": None for name in ("accuracy", "many", "medium", "few", "ece")}
    sweep = {"title": "Losses", "budget": "micro", "command": "livt sweep losses", "rows": [row]}
    (tmp_path / "results" / "glyphs" / "losses.json").write_text(json.dumps(sweep))
    peers = [{"question": "steps", "peer_name": "stock", "ratio": 1.234}, {"question": "growth", "ratio": None}]
    (tmp_path / "results" / "benchmark.json").write_text(json.dumps(peers))
    (tmp_path / "results" / "glyphs" / "tau.json").write_text(json.dumps(sweep | {"title": "Tau"}))
    (tmp_path / "results" / "glyphs" / "tau.png").touch()
    (tmp_path / "results" / "scale.json").write_text(json.dumps({"table": [{"stage": "MGP, ViT-B"}]}))
    full = render(empty)
    assert (full.count("**Losses**"), full.count("**Tau**")) == (2, 1)  # all of them, and the one that is named
    assert '<img src="../results/glyphs/tau.png"' in full and "| MGP, ViT-B |" in full
    assert "**Losses**, glyphs: micro\n\n`livt sweep losses`\n\n| variant | accuracy |" in full
    assert "| ce | 50.0 | 50.0 | 50.0 | 50.0 | 50.0 | - | 1 |" in full
    assert full.count("| steps | stock | 1.23 |") == 2 and "growth" not in full
    assert render(full) == full


def test_some_variants_of_several_sweeps_become_one_short_table(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    row = {"seeds": 3, "posterior_accuracy": 60.0, "paper": None} | {name: 50.0 for name in REPORTED}
    row |= {f"{name}_deviation": 0.5 for name in REPORTED}
    for name in ("losses", "head"):
        rows = [row | {"variant": variant} for variant in ("ce", "bce", "bal_bce")]
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    marker = "<!-- short Birds, from scratch: losses ce bal_bce; Birds, a head: head ce -->\n"
    table = tables.render(f"{marker}<!-- /short -->\n", tmp_path).splitlines()[3:-1]
    assert table == [
        "| Birds, from scratch | ce | 50.0 ± 0.5 | 50.0 | 50.0 | 50.0 | 60.0 |",
        "|  | bal_bce | 50.0 ± 0.5 | 50.0 | 50.0 | 50.0 | 60.0 |",
        "| Birds, a head | ce | 50.0 ± 0.5 | 50.0 | 50.0 | 50.0 | 60.0 |",
    ]
