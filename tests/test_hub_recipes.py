"""Both recipes with the Hub: publishing at the end, starting from a Hub id, and a Hub that is not there."""

import json
import subprocess
import sys
from pathlib import Path

from hub_server import hub_server
from huggingface_hub import ModelCard
from recipe_runs import RECIPES, TINY, make_pictures

# One process for several recipes: the imports are most of the time.
CHAIN = """
import runpy, sys, json
for argv in json.loads(sys.argv[1]):
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")
"""


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
        assert {"model.safetensors", "config.json", "README.md"} <= server.files("org/mgp").keys()
        assert json.loads(server.files("org/bft")["config.json"])["model_type"] == "beit"
        assert ModelCard(server.files("org/bft")["README.md"].decode()).data.license == "mit"
    results = json.loads((bft / "results.json").read_text())
    assert (results["pretrained"], results["pretrained_local"], results["dataset_local"]) == ("org/mgp", False, True)
    assert json.loads((mgp / "results.json").read_text())["dataset_local"]


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
