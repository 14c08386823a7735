"""Publishing and loading with the real clients against a Hub on loopback."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch
import yaml
from hub_server import TOKEN, hub_server
from huggingface_hub import HfApi, ModelCard, constants
from huggingface_hub.errors import RepositoryNotFoundError
from PIL import Image
from test_cards import PRETRAINING, RESULTS
from transformers import AutoImageProcessor, ViTMAEForPreTraining

from livt_hf import LiViTConfig, LiViTForImageClassification, LiViTForPreTraining, pretraining_config
from livt_hf.data import eval_processor
from livt_hf.hub import PublishError, prepare_publication, publish
from livt_hf.runs import Run

SIZES = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=4
)
NAMES = {0: "cat", 1: "dog", 2: "newt"}
# One process plays three users, one after the other: what the next one imports is refused until then.
CLIENT = """
import json, os, re, sys
import torch
from PIL import Image

class Refuse:
    names = {"transformers", "livt_hf"}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ImportError(name + " is not there")

sys.meta_path.insert(0, Refuse())
first, answers = sys.argv[1], {}

import timm
model = timm.create_model("hf_hub:org/livt-timm", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
answers["timm"] = model(transform(Image.open("picture.jpg")).unsqueeze(0))[0].tolist()
answers["timm labels"] = model.pretrained_cfg["label_names"]
answers["timm without"] = not {"transformers", "livt_hf"} & set(sys.modules)

Refuse.names = {"livt_hf"}
from transformers import AutoImageProcessor, pipeline
classify = pipeline("image-classification", model="org/livt", revision=first)
scores = {a["label"]: a["score"] for a in classify("picture.jpg", function_to_apply="none", top_k=None)}
answers["plain"] = [scores[name] for name in ("cat", "dog", "newt")]
answers["plain without"] = "livt_hf" not in sys.modules

Refuse.names = set()
from huggingface_hub import HfApi, ModelCard
from livt_hf import LiViTForImageClassification
load = LiViTForImageClassification.from_pretrained
pixels = AutoImageProcessor.from_pretrained("org/livt")(Image.open("picture.jpg"), return_tensors="pt")
logits = lambda model: model.eval()(**pixels).logits[0].tolist()
answers["head"] = logits(load("org/livt"))
answers["tagged"] = logits(load("org/livt", revision="v1"))
answers["cached"] = logits(load("org/livt", revision="v1", local_files_only=True))
model = load("org/livt", revision=first)
answers["pinned"] = logits(model)
model.train()(**pixels, labels=torch.tensor([2])).loss.backward()
answers["gradient"] = model.classifier.weight.grad.abs().sum().item()
answers["config"] = [model.config.long_tail.loss, model.config.long_tail.class_counts]

answers["start"] = load("org/mgp", class_counts=[9, 3]).config.num_labels
try:
    load("org/mgp", class_counts=[9, 3], token=False, cache_dir="elsewhere")
except OSError as error:
    answers["private"] = str(error)

answers["results"] = {r.task_id: r.value for r in HfApi().model_info("org/livt").eval_results}
card = ModelCard.load("org/livt")
answers["index"] = {r.metric_name: r.metric_value for r in card.data.eval_results}
use = re.search(r"```python\\n(.*?)```", card.text, flags=re.DOTALL)[1]
exec(use, {"print": lambda *args: answers.update(used=True)})

from datasets import ClassLabel, Dataset, DatasetDict, Features, load_dataset
from datasets import Image as ImageFeature
from livt_hf.hub import publish_dataset
features = Features(image=ImageFeature(), label=ClassLabel(names=["cat", "newt"]))
def split(name, labels):
    paths = [os.path.abspath(f"{name}-{i}.png") for i in range(len(labels))]
    for path in paths:
        Image.fromarray(torch.randint(0, 255, (8, 8, 3), dtype=torch.uint8).numpy()).save(path)
    return Dataset.from_dict({"image": paths, "label": labels}, features=features)
splits = DatasetDict(train=split("train", [1] * 3 + [0] * 30), test=split("test", [0, 1, 0, 1]))
rule = "Exponential: n_i = int(30 * 10^-i)."
publish_dataset(splits, "org/data", rule=rule, seed=7, source="uoft-cs/cifar10", license="mit")
rows = lambda splits: {n: [(r["image"].tobytes().hex(), r["label"]) for r in s] for n, s in splits.items()}
back = load_dataset("org/data")
answers["data"] = rows(back) == rows(splits) and back["train"].features == features
print(json.dumps(answers))
"""


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with hub_server() as server:
        yield server


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / "picture.jpg"
    # Twice as wide as high: the margins of the centre crop are whole pixels, where timm and transformers agree.
    pixels = (torch.rand(40, 80, 3, generator=torch.Generator().manual_seed(0)) * 255).byte().numpy()
    Image.fromarray(pixels).save(path, quality=95)
    return path


def make_run(folder, results, model, **arguments):
    """A finished run as the recipes leave it, with paths in its arguments and log and states that must stay behind."""
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    eval_processor(16, [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]).save_pretrained(folder)
    (folder / "results.json").write_text(json.dumps(results))
    arguments = {"epochs": 10, "source": "/home/jane/my data/cifar", "output_dir": str(folder), **arguments}
    (folder / "arguments.yaml").write_text(yaml.safe_dump(arguments))
    (folder / "log.jsonl").write_text(json.dumps({"update": 1, "event": f"saved {folder}/checkpoints/step-1"}) + "\n")
    (folder / "report").mkdir()
    (folder / "report" / "report.md").write_text("Pictures from /home/jane/my/data.\n")
    Image.new("RGB", (8, 8)).save(folder / "report" / "reliability.png")
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    (folder / "checkpoints" / "step-1" / "optimizer.bin").write_bytes(b"states")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.manual_seed(0)
    config = LiViTConfig(**SIZES, class_counts=[500, 40, 5], id2label=NAMES, label2id={n: i for i, n in NAMES.items()})
    model = LiViTForImageClassification(config)
    torch.nn.init.normal_(model.classifier.weight, std=0.5)
    results = RESULTS | {"pretrained": "/home/jane/runs/pretrain-glyphs-micro/1", "pretrained_local": True}
    return make_run(tmp_path_factory.mktemp("jane") / "runs" / "finetune-x" / "1", results, model)


@pytest.fixture(scope="module")
def pretraining_run(tmp_path_factory):
    torch.manual_seed(0)
    decoder = dict(decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2)
    model = LiViTForPreTraining(pretraining_config("micro", **SIZES, **decoder, decoder_intermediate_size=32))
    return make_run(tmp_path_factory.mktemp("jane") / "runs" / "pretrain-x" / "1", PRETRAINING, model)


@pytest.fixture(scope="module")
def logits(run, picture):
    """What the run itself says about the picture, resized by torchvision (as served) or Pillow (as timm does it)."""

    @torch.inference_mode()
    def of_backend(backend: str) -> list[float]:
        processor = AutoImageProcessor.from_pretrained(run, backend=backend)
        pixels = processor(Image.open(picture), return_tensors="pt")
        return LiViTForImageClassification.from_pretrained(run).eval()(**pixels).logits[0].tolist()

    return of_backend


def put(run, hub, repo_id="org/livt", **options):
    return publish(run, repo_id, token=TOKEN, endpoint=hub.endpoint, **options)


PUBLISHED = {"config.json", "model.safetensors", "preprocessor_config.json", "README.md", "results.json"}
PUBLISHED |= {"arguments.yaml", "log.jsonl", "class_counts.png", "report/report.md", "report/reliability.png"}


def test_everything_a_model_needs_is_uploaded_and_nothing_else(run, hub):
    put(run, hub)
    assert set(hub.files("org/livt")) == PUBLISHED | {".gitattributes", ".eval_results/cifar100.yaml"}


def test_the_published_files_name_no_path_no_user_and_no_token(run, pretraining_run, hub, tmp_path):
    put(run, hub)
    put(pretraining_run, hub, "org/mgp")
    for repo_id in ("org/livt", "org/mgp"):
        for name, content in hub.files(repo_id).items():
            for secret in (b"jane", b"/home", str(tmp_path.parent).encode(), TOKEN.encode(), b"my data"):
                assert secret not in content, (name, secret)
    arguments = yaml.safe_load(hub.files("org/livt")["arguments.yaml"])
    assert arguments == {"epochs": 10, "output_dir": "<local>/finetune-x/1", "source": "<local>/cifar"}
    assert b"<local>/pretrain-glyphs-micro/1" in hub.files("org/livt")["README.md"]


def test_of_names_with_a_slash_only_those_on_the_hub_are_published_whole(run, tmp_path):
    places = {"dataset": "data/birds", "pretrained": "org/mgp"}
    results = RESULTS | places | {"dataset_local": True, "pretrained_local": False}
    model = LiViTForImageClassification.from_pretrained(run)
    folder = prepare_publication(make_run(tmp_path / "run", results, model, **places), tmp_path / "out", "org/livt")
    for published in (json.loads((folder / "results.json").read_text()), Run(folder).arguments):
        assert (published["dataset"], published["pretrained"]) == ("<local>/birds", "org/mgp")


@pytest.fixture(scope="module")
def answers(run, pretraining_run, picture, tmp_path_factory) -> dict:
    """What a fresh process finds after two publications of a model, one for timm and a private pretraining run."""
    home = tmp_path_factory.mktemp("home")
    (home / "picture.jpg").write_bytes(picture.read_bytes())
    model = LiViTForImageClassification.from_pretrained(run)
    for parameter in model.classifier.parameters():
        torch.nn.init.zeros_(parameter)
    second = make_run(tmp_path_factory.mktemp("runs") / "finetune-x" / "2", RESULTS, model)
    with pytest.MonkeyPatch.context() as patch, hub_server() as hub:
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        first = put(run, hub, tag="v1")
        put(second, hub)
        put(run, hub, "org/livt-timm", form="timm")
        put(pretraining_run, hub, "org/mgp", private=True)
        answers = json.loads(hub.run(CLIENT, home, first.oid))
        return answers | {"data files": hub.files("org/data", kind="datasets"), "home": str(home)}


def test_plain_transformers_serves_the_published_model_with_equal_logits(answers, logits):
    assert answers["plain without"] and answers["plain"] == pytest.approx(logits("torchvision"), abs=1e-5)


def test_timm_alone_serves_its_form_with_equal_logits(answers, logits):
    assert answers["timm without"] and answers["timm"] == pytest.approx(logits("pil"), abs=1e-5)
    assert answers["timm labels"] == list(NAMES.values())


def test_the_same_repository_gives_back_the_trainable_model_with_its_head(answers, logits):
    assert answers["pinned"] == pytest.approx(logits("torchvision"), abs=1e-5)
    assert answers["gradient"] > 0 and answers["config"] == ["bal_bce", [500, 40, 5]]


def test_after_a_second_publication_the_first_is_still_there_by_commit_and_tag(answers):
    assert answers["head"] == [0, 0, 0] != answers["pinned"] == answers["tagged"]


def test_what_was_loaded_once_loads_without_the_network(answers):
    assert answers["cached"] == answers["tagged"]


def test_a_private_pretraining_run_starts_a_fine_tuning_for_those_with_the_token(answers):
    assert answers["start"] == 2 and "org/mgp" in answers["private"]


def test_the_results_are_readable_from_the_hub_in_both_forms(answers):
    assert answers["results"]["accuracy"] == answers["index"]["Top-1 accuracy"] == RESULTS["metrics"]["accuracy"]


def test_the_code_on_the_card_runs(answers):
    assert answers["used"]


def test_a_published_pretraining_run_is_a_stock_vitmae(pretraining_run, tmp_path):
    folder = prepare_publication(pretraining_run, tmp_path / "publication", "org/mgp")
    pixels, noise = torch.randn(2, 3, 16, 16), torch.rand(2, 16)
    with torch.inference_mode():
        ours = LiViTForPreTraining.from_pretrained(pretraining_run).eval()(pixels, noise=noise)
        stock = ViTMAEForPreTraining.from_pretrained(folder).eval()(pixels, noise=noise)
    torch.testing.assert_close(stock.logits, ours.logits)
    card = ModelCard.load(folder / "README.md")
    assert card.data.pipeline_tag == "image-feature-extraction" and "0.580" in card.text


def test_a_private_repository_is_refused_without_the_token(run, hub):
    put(run, hub, private=True)
    assert HfApi(endpoint=hub.endpoint, token=TOKEN).model_info("org/livt").private
    with pytest.raises(RepositoryNotFoundError):
        HfApi(endpoint=hub.endpoint, token=False).model_info("org/livt")


def test_a_public_repository_does_not_take_a_private_publication(run, hub):
    HfApi(endpoint=hub.endpoint, token=TOKEN).create_repo("org/livt")
    with pytest.raises(ValueError, match="exists and is public"):
        put(run, hub, private=True)
    assert set(hub.files("org/livt")) == {".gitattributes"}


@pytest.mark.parametrize("where", ["/_lfs/", "/commit/", "/preupload/"])
def test_a_cut_connection_publishes_nothing_and_the_next_try_all(run, hub, where, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between the client's retries
    hub.cut_uploads(where, times=1000)
    options = "org/livt --license apache-2.0 --tag v1"
    command = rf"publish it later with: python recipes/publish.py {re.escape(str(run))} {options}$"
    with pytest.raises(PublishError, match=command):
        put(run, hub, tag="v1")
    assert set(hub.files("org/livt")) == {".gitattributes"} and not hub.repo("org/livt").tags
    hub.cut_uploads(where, times=0)
    put(run, hub, tag="v1")
    assert set(hub.files("org/livt")) >= PUBLISHED and len(hub.repo("org/livt").commits) == 2


def test_a_line_that_recovers_needs_no_second_try(run, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    hub.cut_uploads("/_lfs/", times=1)
    put(run, hub)
    assert set(hub.files("org/livt")) >= PUBLISHED


def test_publishing_again_replaces_shards_of_the_model_before(run, hub):
    api = HfApi(endpoint=hub.endpoint, token=TOKEN)
    api.create_repo("org/livt")
    for name in ("model-00001-of-00002.safetensors", "my_notes.txt"):
        api.upload_file(path_or_fileobj=b"old", path_in_repo=name, repo_id="org/livt")
    put(run, hub)
    assert "model-00001-of-00002.safetensors" not in hub.files("org/livt")
    assert "my_notes.txt" in hub.files("org/livt")


def test_an_unreachable_hub_names_the_command_for_later(run):
    command = r"publish it later with: python recipes/publish.py .* org/livt --license cc-by-nc-4.0 --private --timm$"
    options = dict(license="cc-by-nc-4.0", private=True, form="timm")
    with pytest.raises(PublishError, match=command):
        publish(run, "org/livt", **options, token=TOKEN, endpoint="http://127.0.0.1:9")


@pytest.mark.parametrize("secret", ["hf_abcdefghijklmnopqrstuvwx", TOKEN])
def test_a_token_in_a_file_stops_the_publication(run, hub, tmp_path, secret):
    model = LiViTForImageClassification.from_pretrained(run)
    leaky = make_run(tmp_path / "runs" / "x" / "1", RESULTS, model, note=f"token {secret}")
    with pytest.raises(ValueError, match="arguments.yaml looks as if it held a Hub token"):
        put(leaky, hub)
    assert not hub.repos


def test_the_recipe_writes_the_publication_to_a_folder_or_says_what_is_wrong(run, tmp_path, monkeypatch, capsys):
    recipe = str(Path(__file__).parents[1] / "recipes" / "publish.py")
    monkeypatch.setattr("sys.argv", ["publish.py", str(run), "org/livt", "--folder", str(tmp_path / "publication")])
    runpy.run_path(recipe, run_name="__main__")
    assert {path.name for path in (tmp_path / "publication").iterdir()} >= {"README.md", "model.safetensors"}
    assert "nothing uploaded" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="is not empty; give an empty or a new folder"):
        runpy.run_path(recipe, run_name="__main__")


def test_an_unfinished_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="results.json, arguments.yaml missing"):
        (tmp_path / "config.json").write_text("{}")
        prepare_publication(tmp_path, tmp_path / "publication", "org/livt")


def test_a_pushed_data_set_comes_back_equal_with_counts_rule_and_seed(answers):
    assert answers["data"]
    card = answers["data files"]["README.md"].decode()
    assert "n_i = int(30 * 10^-i). Seed: 7." in card and "license: mit" in card and "dataset_info" in card
    assert "| train | 33 | 2 | 30 | 3 | 10 | 0 | 1 | 1 |" in card and "| newt | 3 | 2 |" in card
    assert not [name for name, content in answers["data files"].items() if answers["home"].encode() in content]
