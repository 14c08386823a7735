"""Both recipes with the Hub: publishing at the end, starting from a Hub id, and a Hub that is not there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_server import hub_server
from huggingface_hub import ModelCard
from recipe_runs import RECIPES, TINY, make_pictures
from transformers import ConvNextConfig, ConvNextForImageClassification, ConvNextImageProcessor

# One process for several recipes: the imports are most of the time.
CHAIN = """
import runpy, sys, json
for argv in json.loads(sys.argv[1]):
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")
"""


# What a user without this package does, and what one with it does, with the same published model.
PLAIN = """
import sys
sys.modules["livt_hf"] = None  # importing it fails
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline
"""
BALANCED = """
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline
from livt_hf import balance
"""
SERVE = """
import json, sys
from PIL import Image
id, picture = sys.argv[1:]
model = AutoModelForImageClassification.from_pretrained(id).eval()
pixels = AutoImageProcessor.from_pretrained(id)(Image.open(picture).convert("RGB"), return_tensors="pt")
said = {"class": type(model).__name__, "counts": model.config.long_tail["class_counts"]}
said["labels"] = sorted(found["label"] for found in pipeline("image-classification", model=id)(picture))
if "livt_hf" in sys.modules and sys.modules["livt_hf"]:
    said["probabilities"] = balance(model).probabilities(**pixels).tolist()
said["logits"] = model(**pixels).logits.tolist()
print(json.dumps(said))
"""


def convnext(folder: Path) -> Path:
    torch.manual_seed(0)
    config = ConvNextConfig(num_stages=2, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
    ConvNextForImageClassification(config).save_pretrained(folder)
    ConvNextImageProcessor(size={"shortest_edge": 32}, crop_pct=1.0).save_pretrained(folder)
    return folder


def launch(environment: dict, *commands: list) -> subprocess.CompletedProcess:
    chain = json.dumps([[str(RECIPES / name), *map(str, options)] for name, *options in commands])
    environment = environment | {"ACCELERATE_USE_CPU": "1"}
    return subprocess.run([sys.executable, "-c", CHAIN, chain], env=environment, capture_output=True, text=True)


def test_a_run_publishes_itself_and_the_next_one_starts_from_its_hub_id(tmp_path: Path):
    pictures = make_pictures(tmp_path / "pictures")
    mgp, bft = tmp_path / "mgp", tmp_path / "bft"
    options = ["--dataset", pictures, *TINY, "--max_steps", 2, "--push_to_hub", "--hub_license", "mit"]
    with hub_server() as server:
        done = launch(
            server.environment(tmp_path / "home"),
            ["pretrain.py", *options, "--hub_model_id", "org/mgp", "--output_dir", mgp],
            ["finetune.py", *options, "--hub_model_id", "org/bft", "--output_dir", bft, "--pretrained", "org/mgp"],
        )
        assert done.returncode == 0, done.stderr
        assert "published: " in done.stderr and "HTTP Request" not in done.stderr
        assert "were normalised" not in done.stderr  # the Hub has the statistics of the pretraining
        assert {"model.safetensors", "config.json", "README.md"} <= server.files("org/mgp").keys()
        assert json.loads(server.files("org/bft")["config.json"])["model_type"] == "beit"
        assert ModelCard(server.files("org/bft")["README.md"].decode()).data.license == "mit"
    results = json.loads((bft / "results.json").read_text())
    assert (results["pretrained"], results["pretrained_local"], results["dataset_local"]) == ("org/mgp", False, True)
    assert json.loads((mgp / "results.json").read_text())["dataset_local"]


def test_another_family_is_published_served_without_this_package_and_fine_tuned_on_other_labels(tmp_path: Path):
    pictures, others = make_pictures(tmp_path / "pictures"), make_pictures(tmp_path / "others", train=(20, 12))
    start, common = convnext(tmp_path / "start"), ["--tune", "head", "--batch_size", 16, "--threads", 1]
    published = ["--push_to_hub", "--hub_license", "mit", "--hub_model_id", "org/conv"]
    run, again, report = tmp_path / "run", tmp_path / "again", tmp_path / "report"
    image = next((pictures / "test" / "class2").iterdir())
    with hub_server() as server:
        environment = server.environment(tmp_path / "home") | {"LIVT_RUNS": str(tmp_path / "runs")}
        done = launch(
            environment,
            ["finetune.py", "--dataset", pictures, "--pretrained", start, *common, *published, "--output_dir", run],
            ["eval.py", "--model", "org/conv", "--dataset", pictures, "--report", report, "--threads", 1],
            ["predict.py", "org/conv", image, "--format", "jsonl", "--threads", 1],
            ["finetune.py", "--dataset", others, "--pretrained", "org/conv", *common, "--output_dir", again],
        )
        assert done.returncode == 0, done.stderr
        plain, balanced = (
            json.loads(subprocess.check_output([sys.executable, "-c", code, "org/conv", image], env=environment))
            for code in (PLAIN + SERVE, BALANCED + SERVE)
        )
        card = ModelCard(server.files("org/conv")["README.md"].decode())
    assert plain["class"] == balanced["class"] == "ConvNextForImageClassification"
    assert plain["labels"] == ["class0", "class1", "class2", "class3"] and plain["counts"] == [30, 18, 10, 6]
    torch.testing.assert_close(*(torch.tensor(said["logits"]) for said in (plain, balanced)))
    assert sum(balanced["probabilities"][0]) == pytest.approx(1)
    results = json.loads((run / "results.json").read_text())
    rules = json.loads((report / "evaluation.json").read_text())["rules"]
    assert rules["argmax"]["accuracy"] == results["metrics"]["accuracy"]
    assert card.data.license == "mit" and "vit" not in card.data.tags
    assert "balance(AutoModelForImageClassification.from_pretrained(" in card.text and "`tune`: head" in card.text
    new = json.loads((again / "config.json").read_text())
    assert list(new["id2label"].values()) == ["class0", "class1"] and new["long_tail"]["class_counts"] == [20, 12]


def test_without_the_hub_the_run_is_complete_and_the_message_says_how_to_publish_it(tmp_path: Path):
    with hub_server() as server:
        environment = server.environment(tmp_path / "home")
    run = tmp_path / "mgp"
    options = ["--dataset", make_pictures(tmp_path / "pictures"), *TINY, "--max_steps", 2, "--output_dir", run]
    options += ["--push_to_hub", "--hub_model_id", "org/mgp", "--hub_license", "mit"]
    done = launch(environment, ["pretrain.py", *options])
    assert done.returncode != 0
    assert f"livt publish {run} org/mgp --license mit" in done.stderr and "Traceback" not in done.stderr
    assert (run / "results.json").exists() and (run / "model.safetensors").exists()
