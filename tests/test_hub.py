"""Publishing and loading with the real clients against a Hub on loopback."""

import json
import logging
import os
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value
from hub_server import TOKEN, hub_server
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import RepositoryNotFoundError
from PIL import Image
from recipe_runs import make_pictures
from refusals import refusal
from test_cards import PRETRAINING, RESULTS
from test_tuning import wrapped_timm
from torchvision.transforms.functional import to_pil_image
from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTMAEForPreTraining, pipeline

from livt_hf import LiViTConfig, LiViTForImageClassification, LiViTForPreTraining, balance, pretraining_config
from livt_hf.cli.training_settings import FinetuneSettings, PretrainSettings
from livt_hf.data import eval_processor, load_dataset, read_rgb
from livt_hf.hub import (
    Origin,
    Publication,
    PublishError,
    dataset_card,
    origin_of,
    prepare_publication,
    publish,
    publish_dataset,
)
from livt_hf.hub.contents import PATH_OPTIONS, TEXT_OPTIONS, public_results, select_numbers
from livt_hf.long_tail.losses import LOSSES
from livt_hf.recipes.publish import main
from livt_hf.recipes.publish_data import PublishDataSettings
from livt_hf.recipes.publish_data import main as publish_data
from livt_hf.results import Results

SIZES = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=4
)
NAMES = {0: "cat", 1: "dog", 2: "newt"}
# One process plays three users, one after the other: what the next one imports is refused until then.
CLIENT = """
import contextlib, io, json, os, re, sys
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
answers["timm"] = model(transform(Image.open("image.jpg")).unsqueeze(0))[0].tolist()
answers["timm labels"] = model.pretrained_cfg["label_names"]
answers["timm without"] = not {"transformers", "livt_hf"} & set(sys.modules)

Refuse.names = {"livt_hf"}
from transformers import AutoImageProcessor, pipeline
classify = pipeline("image-classification", model="org/livt", revision=first)
scores = {a["label"]: a["score"] for a in classify("image.jpg", function_to_apply="none", top_k=None)}
answers["plain"] = [scores[name] for name in ("cat", "dog", "newt")]
answers["plain without"] = "livt_hf" not in sys.modules

Refuse.names = set()
from huggingface_hub import HfApi, ModelCard
from livt_hf import LiViTForImageClassification
load = LiViTForImageClassification.from_pretrained
pixels = AutoImageProcessor.from_pretrained("org/livt")(Image.open("image.jpg"), return_tensors="pt")
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
from livt_hf.hub import Origin, Publication, publish_dataset
features = Features(image=ImageFeature(), label=ClassLabel(names=["cat", "newt"]))
def split(name, labels):
    paths = [os.path.abspath(f"{name}-{i}.png") for i in range(len(labels))]
    for path in paths:
        Image.fromarray(torch.randint(0, 255, (8, 8, 3), dtype=torch.uint8).numpy()).save(path)
    return Dataset.from_dict({"image": paths, "label": labels}, features=features)
splits = DatasetDict(train=split("train", [1] * 3 + [0] * 30), test=split("test", [0, 1, 0, 1]))
origin = Origin("Exponential: n_i = int(30 * 10^-i).", seed=7, source="uoft-cs/cifar10")
publish_dataset(splits, Publication("org/data", license="mit"), origin)
rows = lambda splits: {n: [(r["image"].tobytes().hex(), r["label"]) for r in s] for n, s in splits.items()}
back = load_dataset("org/data")
answers["data"] = rows(back) == rows(splits) and back["train"].features == features

from livt_hf.data import load_long_tailed
from livt_hf.data.shards import shard_lengths
streams = load_long_tailed("org/data", streaming=True)
answers["streamed"] = {name: [shard_lengths(stream), len(list(stream))] for name, stream in streams.items()}

from livt_hf.recipes.publish_data import main
for name, count in {"cat": 10, "newt": 5}.items():
    os.makedirs(f"own/{name}")
    for i in range(count):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(f"own/{name}/{i}.png")
command = ["own", "org/own", "--imbalance_factor", "4", "--license", "mit"]
with contextlib.redirect_stdout(io.StringIO()) as printed:
    main([*command, "--dry_run"])
answers["listed"] = printed.getvalue().splitlines()
answers["uploaded by a dry run"] = HfApi().repo_exists("org/own", repo_type="dataset")
with contextlib.redirect_stdout(io.StringIO()):
    main(command)
answers["own"] = {name: len(split) for name, split in load_dataset("org/own").items()}
answers["own is private"] = HfApi().dataset_info("org/own").private
print(json.dumps(answers))
"""


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between the client's retries
    with hub_server() as server:
        yield server


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures")


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / "image.jpg"
    # Twice as wide as high: the margins of the centre crop are whole pixels, where timm and transformers agree.
    pixels = (torch.rand(40, 80, 3, generator=torch.Generator().manual_seed(0)) * 255).byte().numpy()
    Image.fromarray(pixels).save(path, quality=95)
    return path


def make_run(folder, results, model, **arguments):
    """Make a finished run whose records name paths of Jane's machine, with files that must stay on it."""
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    eval_processor(16, [0.5, 0.4, 0.3], [0.2, 0.25, 0.3]).save_pretrained(folder)
    (folder / "results.json").write_text(results.to_json())
    arguments = {"epochs": 10, "source": "/home/jane/my data", "output_dir": str(folder), "flip": True, **arguments}
    (folder / "arguments.yaml").write_text(yaml.safe_dump(arguments))
    line = {"update": 1, "loss": 0.5, "eval": {"accuracy": 0.3, "few": None}, "event": f"saved {folder}"}
    (folder / "log.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "report").mkdir()
    report = {"model": "data/ward 3/x", "dataset": results.dataset, "split": results.split, "note": "jane"}
    rules = results.rules | {"posterior, prior of jane.json": {"accuracy": 0.5}}
    report |= {"rules": rules, "intervals": dict.fromkeys(rules, {"few": [0.1, 0.2]})} if results.metrics else {}
    (folder / "report" / "evaluation.json").write_text(json.dumps(report))
    (folder / "report" / "classes.csv").write_text("class,name,accuracy,path\n0,cat,0.5,/home/jane/cat.png\n")
    for name in ("reconstructions.png", "report/reliability-0.png", "report/classes.png", "report/patient7.png"):
        Image.new("RGB", (8, 8)).save(folder / name)
    for name in ("report.html", "report.md", "predictions.parquet", "predictions.csv"):
        (folder / "report" / name).write_text("patient7 of jane")
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    (folder / "checkpoints" / "step-1" / "optimizer.bin").write_bytes(b"states")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.manual_seed(0)
    config = LiViTConfig(**SIZES, class_counts=[500, 40, 5], id2label=NAMES, label2id={n: i for i, n in NAMES.items()})
    model = LiViTForImageClassification(config)
    torch.nn.init.normal_(model.classifier.weight, std=0.5)
    results = replace(RESULTS, pretrained="/home/jane/runs/pretrain-glyphs-micro/1", pretrained_local=True)
    folder = tmp_path_factory.mktemp("jane") / "runs" / "finetune-x" / "1"
    return make_run(folder, results, model, note=f"token {TOKEN}")


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


def put(run, hub, repo_id="org/livt", token=TOKEN, **options):
    options = {"license": "apache-2.0"} | options
    return publish(run, Publication(repo_id, **options), HfApi(endpoint=hub.endpoint, token=token))


def prepare(run, folder: Path, repo_id="org/livt") -> Path:
    return prepare_publication(run, folder, Publication(repo_id, license="mit"))


PUBLISHED = {"config.json", "model.safetensors", "preprocessor_config.json", "README.md", "results.json"}
PUBLISHED |= {"arguments.yaml", "log.jsonl", "class_counts.png", "report/classes.csv"}
PUBLISHED |= {"report/reliability-0.png", "report/evaluation.json"}
PICTURES = {"reconstructions.png", "report/classes.png"}


def test_everything_a_model_needs_is_uploaded_to_a_private_repository_and_nothing_else(run, hub):
    put(run, hub)
    assert set(hub.files("org/livt")) == PUBLISHED | {".gitattributes", ".eval_results/cifar100.yaml"}
    assert HfApi(endpoint=hub.endpoint, token=TOKEN).model_info("org/livt").private
    with pytest.raises(RepositoryNotFoundError):
        HfApi(endpoint=hub.endpoint, token=False).model_info("org/livt")
    put(run, hub, "org/open", public=True)
    assert not HfApi(endpoint=hub.endpoint, token=False).model_info("org/open").private


def test_the_published_files_name_no_path_no_user_and_no_token(run, pretraining_run, hub, tmp_path):
    put(run, hub, with_pictures=True)
    put(pretraining_run, hub, "org/mgp")
    for repo_id in ("org/livt", "org/mgp"):
        for name, content in hub.files(repo_id).items():
            for secret in (b"jane", b"/home", str(tmp_path.parent).encode(), TOKEN.encode(), b"my data", b"patient7"):
                assert secret not in content, (name, secret)


def test_the_numbers_of_a_run_are_published_as_they_are(run, tmp_path):
    folder = prepare(run, tmp_path / "out")
    results = Results.read(run / "results.json")
    shortened = replace(results, pretrained="(local)/pretrain-glyphs-micro/1")
    assert Results.read(folder / "results.json") == shortened
    assert yaml.safe_load((folder / "arguments.yaml").read_text()) == {"epochs": 10, "flip": True}
    line = {"update": 1, "loss": 0.5, "eval": {"accuracy": 0.3, "few": None}}
    assert json.loads((folder / "log.jsonl").read_text()) == line
    evaluation = json.loads((folder / "report" / "evaluation.json").read_text())
    assert evaluation["rules"] == results.rules and evaluation["dataset"] == results.dataset
    assert evaluation.keys() == {"dataset", "split", "rules", "intervals"}
    assert (folder / "report" / "classes.csv").read_text().split() == ["class,name,accuracy", "0,cat,0.5"]


def test_pictures_of_the_datasets_images_are_uploaded_only_when_asked_for(run, pretraining_run, hub):
    for folder, repo_id in ((run, "org/livt"), (pretraining_run, "org/mgp")):
        put(folder, hub, repo_id, with_pictures=True)
        assert set(hub.files(repo_id)) > PICTURES and b"(reconstructions.png)" in hub.files(repo_id)["README.md"]
        put(folder, hub, repo_id)  # those of the publication before go too
        assert not PICTURES & set(hub.files(repo_id))
        assert not [name for name in PICTURES if name.encode() in hub.files(repo_id)["README.md"]]


def test_of_names_with_a_slash_only_those_on_the_hub_are_published_whole(run, tmp_path):
    places = {"dataset": "data/birds", "pretrained": "org/mgp"}
    results = replace(RESULTS, **places, dataset_local=True, pretrained_local=False)
    model = LiViTForImageClassification.from_pretrained(run)
    folder = prepare(make_run(tmp_path / "run", results, model, **places), tmp_path / "out")
    arguments = yaml.safe_load((folder / "arguments.yaml").read_text())
    for published in (json.loads((folder / "results.json").read_text()), arguments):
        assert (published["dataset"], published["pretrained"]) == ("(local)/birds", "org/mgp")


def test_text_is_published_in_the_fields_of_the_whitelist_only():
    record = {"a": "text", "b": [1, "text", {"a": 2.5, "c": "text"}], "c": True, "d": None, "e": ["kept"]}
    assert select_numbers(record, ["e"]) == {"b": [1, {"a": 2.5}], "c": True, "d": None, "e": ["kept"]}


def test_records_within_the_results_are_published_without_other_text():
    head, parts = {"solver": "exact", "strength": 0.1}, [{"part": "head", "scores": {"nll": 0.5}}]
    results = replace(RESULTS, head=head, parts=parts, framing={"chosen": "crop"}, loss="mine")
    noted = replace(results, head=head | {"file": "jane"}, parts=[parts[0] | {"where": "jane"}])
    assert public_results(noted) == public_results(results) == results


def test_every_option_is_decided_on():
    """A new option whose values are text joins one of these, or stays on the machine."""
    private = {"plugin", "source", "lists", "output_dir", "resume", "trackers", "hub_model_id", "hub_license"}
    private |= {"where", "exclude", "group_from", "box_columns"}  # patterns and values of the user's own tables
    for settings in (PretrainSettings, FinetuneSettings):
        kinds = {name: str(declared.kind) for name, declared in settings.options().items()}
        texts = {name for name, kind in kinds.items() if "str" in kind or "Literal" in kind}
        assert texts - {*TEXT_OPTIONS, *PATH_OPTIONS} <= private
        assert set(settings.names("is_path")) <= private | set(PATH_OPTIONS)


def test_the_report_that_is_published_is_the_newest_that_agrees_with_the_results(run, tmp_path, caplog):
    own = shutil.copytree(run, tmp_path / "run")
    results = Results.read(own / "results.json")

    def report(number: int, dataset: str, worse: float = 0.0, **more) -> None:
        rules = {rule: metrics | {"ece": metrics["ece"] + worse} for rule, metrics in results.rules.items()}
        (own / f"report-{number}").mkdir()
        summary = {"dataset": dataset, "split": results.split, "rules": rules} | more
        path = own / f"report-{number}" / "evaluation.json"
        path.write_text(json.dumps(summary))
        (own / f"report-{number}" / "classes.csv").write_text(f"count\n{number}\n")
        os.utime(path, (2e9 + number, 2e9 + number))

    def published(name: str) -> Path:
        return prepare(own, tmp_path / name) / "report/classes.csv"

    report(2, results.dataset)
    report(3, results.dataset, worse=0.3)  # from before a calibration
    report(4, "other birds")
    report(5, results.dataset, thresholds={"many_above": 50, "few_below": 20})
    report(6, results.dataset, rules=dict(reversed(results.rules.items())))  # judged by another rule
    assert published("first").read_text().split() == ["count", "2"]
    shutil.rmtree(own / "report-2")
    assert published("second").read_text().startswith("class,name,accuracy")
    shutil.rmtree(own / "report")
    assert not published("third").exists()
    assert "has no report on the model as it is now" in caplog.text


def test_names_of_classes_may_look_like_paths_but_not_name_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/jane")  # of this machine it may be /, which is nobody's

    def published(*names: str) -> Path:
        config = LiViTConfig(**SIZES, class_counts=[5] * len(names), id2label=dict(enumerate(names)))
        folder = tmp_path / str(len(names))
        own = make_run(folder / "run", replace(RESULTS, pretrained=None), LiViTForImageClassification(config))
        return prepare(own, folder / "out") / "config.json"

    names = ("/m/01abc", "~tilde", "/a/b & c")
    assert tuple(json.loads(published(*names).read_text())["id2label"].values()) == names
    with refusal(None, "config.json", "'/home/jane'"):
        published("cat", "/home/jane/birds/robin")


def test_a_config_is_published_without_what_its_class_does_not_declare(tmp_path):
    model = AutoModelForImageClassification.from_pretrained(wrapped_timm(tmp_path / "timm"))
    balance(model, class_counts=[5, 3, 1])
    model.config.note, model.config.pretrained_cfg["file"] = "of jane", "/home/jane/weights.pth"
    own = make_run(tmp_path / "run", replace(RESULTS, model_type="timm_wrapper", pretrained=None), model)
    (own / "preprocessor_config.json").unlink()
    folder = prepare(own, tmp_path / "out")
    assert "jane" not in (folder / "config.json").read_text()
    before, after = (AutoModelForImageClassification.from_pretrained(path).eval() for path in (own, folder))
    pixels = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(after(pixels).logits, before(pixels).logits)
    assert after.config.long_tail["class_counts"] == [5, 3, 1]
    mean = [AutoImageProcessor.from_pretrained(path).data_config["mean"] for path in (own, folder)]
    assert mean[0] == mean[1]


@pytest.fixture(scope="module")
def answers(run, pretraining_run, picture, tmp_path_factory) -> dict:
    """What a fresh process finds after two publications of a model, one for timm and a private pretraining run."""
    home = tmp_path_factory.mktemp("home")
    (home / "image.jpg").write_bytes(picture.read_bytes())
    model = LiViTForImageClassification.from_pretrained(run)
    for parameter in model.classifier.parameters():
        torch.nn.init.zeros_(parameter)
    second = make_run(tmp_path_factory.mktemp("runs") / "finetune-x" / "2", RESULTS, model)
    with hub_server() as hub:
        first = put(run, hub, tag="v1")
        put(second, hub)
        put(run, hub, "org/livt-timm", form="timm")
        put(pretraining_run, hub, "org/mgp")
        answers = json.loads(hub.run(CLIENT, home, first.oid))
        files = {name: hub.files(f"org/{name}", kind="datasets") for name in ("data", "own")}
        return answers | {"data files": files["data"], "own files": files["own"], "home": str(home)}


def test_plain_transformers_and_timm_alone_serve_the_published_model_with_equal_logits(answers, logits):
    assert answers["plain without"] and answers["plain"] == pytest.approx(logits("torchvision"), abs=1e-5)
    assert answers["timm without"] and answers["timm"] == pytest.approx(logits("pil"), abs=1e-5)
    assert answers["timm labels"] == list(NAMES.values())


def test_pipeline_turns_by_exif_and_clips_16_bit_grey_as_the_card_says(run, picture, tmp_path):
    folder = prepare(run, tmp_path / "publication")
    classify = pipeline("image-classification", model=str(folder), function_to_apply="none", top_k=None)

    def scores(image):
        return {answer["label"]: answer["score"] for answer in classify(image)}

    grey = torch.linspace(0, 65535, 16 * 16).round().to(torch.int32).view(16, 16).numpy().astype("uint16")
    Image.fromarray(grey).save(tmp_path / "grey.png")
    decoded = read_rgb(tmp_path / "grey.png")
    assert decoded.float().mean() == pytest.approx(127.5, abs=1)  # the upper eight bits
    clipped = Image.fromarray(255 * (grey >= 255).astype("uint8") + (grey * (grey < 255)).astype("uint8"))
    assert scores(str(tmp_path / "grey.png")) == pytest.approx(scores(clipped.convert("RGB")), abs=1e-5)
    assert scores(to_pil_image(decoded)) != pytest.approx(scores(str(tmp_path / "grey.png")), abs=1e-3)

    exif = Image.Exif()
    exif[0x0112] = 6  # turn by a quarter to the right
    Image.open(picture).save(tmp_path / "turned.jpg", quality=95, exif=exif)
    upright = to_pil_image(read_rgb(tmp_path / "turned.jpg"))
    assert scores(str(tmp_path / "turned.jpg")) == pytest.approx(scores(upright), abs=1e-4)


def test_the_same_repository_gives_back_the_trainable_model_with_its_head(answers, logits):
    assert answers["pinned"] == pytest.approx(logits("torchvision"), abs=1e-5)
    assert answers["gradient"] > 0 and answers["config"] == ["bal_bce", [500, 40, 5]]


def test_after_a_second_publication_the_first_is_still_there_by_commit_and_tag_and_without_the_network(answers):
    assert answers["head"] == [0, 0, 0] != answers["pinned"] == answers["tagged"] == answers["cached"]


def test_a_private_pretraining_run_starts_a_fine_tuning_for_those_with_the_token(answers):
    assert answers["start"] == 2 and "org/mgp" in answers["private"]


def test_the_results_are_readable_from_the_hub_in_both_forms_and_the_code_on_the_card_runs(answers):
    assert answers["results"]["accuracy"] == answers["index"]["Top-1 accuracy"] == RESULTS.metrics["accuracy"]
    assert answers["used"]


def test_a_published_pretraining_run_is_a_stock_vitmae(pretraining_run, tmp_path):
    folder = prepare(pretraining_run, tmp_path / "publication", "org/mgp")
    pixels, noise = torch.randn(2, 3, 16, 16), torch.rand(2, 16)
    with torch.inference_mode():
        ours = LiViTForPreTraining.from_pretrained(pretraining_run).eval()(pixels, noise=noise)
        stock = ViTMAEForPreTraining.from_pretrained(folder).eval()(pixels, noise=noise)
    torch.testing.assert_close(stock.logits, ours.logits)
    card = ModelCard.load(folder / "README.md")
    assert card.data.pipeline_tag == "image-feature-extraction" and "0.580" in card.text


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:99])])
def test_a_run_without_its_weights_or_with_half_of_them_is_not_published(run, pretraining_run, hub, tmp_path, damage):
    for whole in (run, pretraining_run):
        broken = shutil.copytree(whole, tmp_path / whole.parent.name)
        damage(broken / "model.safetensors")
        with refusal(None, broken):
            put(broken, hub)
    assert not hub.repos


@pytest.mark.parametrize("public", [True, False])
def test_a_repository_that_exists_takes_a_publication_only_as_it_is(run, hub, public):
    HfApi(endpoint=hub.endpoint, token=TOKEN).create_repo("org/livt", private=not public)
    with refusal("public", "org/livt", "is public" if public else "is private"):
        put(run, hub, public=not public)
    assert set(hub.files("org/livt")) == {".gitattributes"}
    put(run, hub, public=public)
    assert set(hub.files("org/livt")) >= PUBLISHED


def test_the_files_are_listed_with_their_sizes_before_the_upload_starts(run, hub, caplog):
    caplog.set_level(logging.INFO, "livt_hf")
    hub.fail("/api/repos/create", "cut")
    with pytest.raises(PublishError):
        put(run, hub)
    assert not hub.repos and "to the private repository org/livt" in caplog.text
    for name in PUBLISHED | {".eval_results/cifar100.yaml"}:
        assert re.search(rf"^ *[\d,]+ bytes  {re.escape(name)}$", caplog.text, flags=re.MULTILINE), name


@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("/api/repos/create", 429),
        ("/api/models/org/livt", 500),
        ("/preupload/", "cut"),
        ("/_lfs/", "silent"),
        ("/_lfs/", "cut"),
        ("/commit/", "cut"),
    ],
)
def test_a_hub_that_fails_publishes_nothing_and_the_next_try_everything(run, hub, where, how, monkeypatch):
    hub.fail(where, how)
    command = f"livt publish {run} org/livt --license apache-2.0 --tag v1"
    with monkeypatch.context() as patch:
        patch.setattr("livt_hf.hub.publication.HUB_TIMEOUT", 0.05)
        with pytest.raises(PublishError, match=re.escape(command)):
            put(run, hub, tag="v1")
    assert not hub.repos or set(hub.files("org/livt")) == {".gitattributes"} and not hub.repo("org/livt").tags
    hub.recover()
    put(run, hub, tag="v1")
    assert set(hub.files("org/livt")) >= PUBLISHED and len(hub.repo("org/livt").commits) == 2


def test_a_commit_whose_answer_is_lost_is_not_called_invisible(run, hub):
    hub.fail("/commit/", "lost")
    with pytest.raises(PublishError, match="is visible there"):
        put(run, hub)
    assert set(hub.files("org/livt")) >= PUBLISHED
    before = hub.repo("org/livt").commits[0].oid
    publication, api = Publication("org/livt"), HfApi(endpoint=hub.endpoint, token=TOKEN)
    hub.fail("/api/models/org/livt", 500)
    assert publication.describe_state(api, before) == "whether the run is visible there is unknown"


def test_a_line_that_recovers_needs_no_second_try(run, hub):
    hub.fail("/_lfs/", "cut", times=1)
    put(run, hub)
    assert set(hub.files("org/livt")) >= PUBLISHED


def test_publishing_again_replaces_shards_of_the_model_before(run, hub):
    api = HfApi(endpoint=hub.endpoint, token=TOKEN)
    api.create_repo("org/livt")
    for name in ("model-00001-of-00002.safetensors", "my_notes.txt"):
        api.upload_file(path_or_fileobj=b"old", path_in_repo=name, repo_id="org/livt")
    put(run, hub, public=True)
    assert "model-00001-of-00002.safetensors" not in hub.files("org/livt")
    assert "my_notes.txt" in hub.files("org/livt")


def test_an_unreachable_hub_names_the_command_for_later(run):
    publication = Publication("org/livt", "cc-by-nc-4.0", "timm", public=True, with_pictures=True)
    command = f"livt publish {run} org/livt --license cc-by-nc-4.0 --form timm --public --with_pictures"
    with pytest.raises(PublishError, match=re.escape(command)):
        publish(run, publication, HfApi(endpoint="http://127.0.0.1:9", token=TOKEN))


def test_a_failure_after_the_upload_says_what_is_visible_and_how_to_go_on(run, hub):
    put(run, hub, public=True, tag="v1")
    with pytest.raises(PublishError, match="published and public .* Tag v1 already exists") as caught:
        put(run, hub, public=True, tag="v1")
    commit = hub.repo("org/livt").commits[-1].oid
    assert str(caught.value).endswith(f"hf repos tag create org/livt v1 --revision {commit}")


def test_a_licence_that_the_hub_does_not_know_is_refused_in_its_words(run, hub):
    with pytest.raises(PublishError, match='"license" must be one of'):
        put(run, hub, license="mine")
    assert set(hub.files("org/livt")) == {".gitattributes"}


def test_who_is_not_logged_in_is_told_how(run, hub):
    for token in (False, "hf_wrong"):
        with refusal(None, "org/livt", "`hf auth login`"):
            put(run, hub, token=token)


def test_the_command_writes_the_publication_to_a_folder_or_says_what_is_wrong(run, tmp_path, capsys):
    argv = [str(run), "org/livt", "--folder", str(tmp_path / "publication")]
    main(argv)
    assert {path.name for path in (tmp_path / "publication").iterdir()} >= {"README.md", "model.safetensors"}
    assert f"Nothing was uploaded; look at {tmp_path / 'publication'}." in capsys.readouterr().out
    with refusal("folder", tmp_path / "publication"):
        main(argv)
    with refusal("repo_id"):
        main([str(run)])


def test_a_dry_run_on_own_images_lists_the_files_and_no_picture_of_the_images(run, tmp_path, capsys):
    results = replace(RESULTS, dataset="/data/clinic", dataset_local=True, imbalance_factor=None, pretrained="none")
    own = make_run(tmp_path / "run", results, LiViTForImageClassification.from_pretrained(run))
    with refusal("license", "/data/clinic"):
        main([str(own), "org/clinic", "--dry_run"])
    main([str(own), "org/clinic", "--dry_run", "--license", "mit"])
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[-1] for line in lines[:-1]} == PUBLISHED and lines[-1] == "Nothing was uploaded."
    main([str(own), "org/clinic", "--dry_run", "--license", "mit", "--with_pictures"])
    assert {line.split()[-1] for line in capsys.readouterr().out.splitlines()[:-1]} == PUBLISHED | PICTURES


def test_the_command_loads_the_plugin_that_the_run_was_trained_with(run, tmp_path, monkeypatch):
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path))
    source = "from livt_hf.losses import LOSSES, register_loss\n"
    source += "register_loss('my_ce', activation='softmax', balanced=True)(LOSSES['ce'].function)\n"
    (tmp_path / "my_losses.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LOSSES, "my_ce", LOSSES["bal_ce"])
        model = LiViTForImageClassification.from_pretrained(run, loss="my_ce")
        plugin = {"plugin": str(tmp_path / "my_losses.py")}
        own = make_run(tmp_path / "run", replace(RESULTS, loss="my_ce", pretrained="none"), model, **plugin)
    with refusal("plugin", "'my_ce'"):
        prepare_publication(own, tmp_path / "out", Publication("org/livt"))
    main([str(own), "org/livt", "--folder", str(tmp_path / "publication")])
    with refusal("space", "my_ce"):  # before anything is uploaded
        main([str(own), "org/livt", "--space"])
    LOSSES.pop("my_ce")
    card = (tmp_path / "publication" / "README.md").read_text()
    assert "loss `my_ce`, tau 1," in card and "The loss `my_ce` is not part of livt_hf: before" in card
    assert str(tmp_path) not in (tmp_path / "publication" / "arguments.yaml").read_text()


def test_an_unfinished_run_and_a_cross_validation_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with refusal("run", "no results.json", "no arguments.yaml"):
        prepare(tmp_path, tmp_path / "publication")
    whole = tmp_path / "run"
    (whole / "fold-1").mkdir(parents=True)
    for folder in (whole, whole / "fold-1"):
        (folder / "results.json").write_text(replace(RESULTS, split="2 folds").to_json())
    with refusal("run", whole / "fold-1"):
        prepare(whole, tmp_path / "publication")


def test_a_pushed_dataset_comes_back_equal_with_counts_rule_and_seed(answers):
    assert answers["data"]
    card = answers["data files"]["README.md"].decode()
    assert "n_i = int(30 * 10^-i). Seed: 7." in card and "license: mit" in card and "dataset_info" in card
    assert "| train | 33 | 2 | 30 | 3 | 10 | 0 | 1 | 1 |" in card and "| newt | 3 | 2 |" in card
    assert not [name for name, content in answers["data files"].items() if answers["home"].encode() in content]


def test_a_dataset_of_the_hub_is_streamed_with_the_number_of_its_images(answers):
    assert answers["streamed"] == {"train": [[33], 33], "test": [[4], 4]}


def test_a_folder_becomes_a_private_dataset_whose_card_says_how_it_was_divided(answers):
    assert answers["listed"][-1] == "Nothing was uploaded." and not answers["uploaded by a dry run"]
    assert answers["listed"][0].startswith("To the private repository org/own") and answers["own is private"]
    assert answers["own"] == {"train": 8 + 2, "test": 2 + 1}  # a fifth of 10 and of 5 set aside, then 8 and 8 / 4
    assert [line.split(" images")[0] for line in answers["listed"][1:3]] == ["  train: 10", "  test: 3"]
    card = answers["own files"]["README.md"].decode()
    assert "int(n_max * 4^(-i / (C - 1)))" in card and "The test split is not the dataset's own" in card
    assert "| train | 10 | 2 | 8 | 2 | 4 |" in card and "extended|" not in card


@pytest.mark.parametrize(
    ("words", "argument"), [(["glyphs"], "repo_id"), ([".", "org/own"], "license"), ([], "dataset")]
)
def test_a_dataset_command_that_lacks_something_names_it(words, argument):
    with refusal(argument):
        PublishDataSettings.parse(words)


def test_a_table_may_name_links_to_train_on_but_what_they_lead_to_is_not_published(tmp_path, capsys):
    for place in ("own", "elsewhere"):
        (tmp_path / place).mkdir()
        for number in range(6):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / place / f"{number}.png")
    (tmp_path / "own/table.csv").write_text("image,label\n" + "".join(f"{i}.png,{'ab'[i % 2]}\n" for i in range(6)))
    command = [str(tmp_path / "own/table.csv"), "org/own", "--license", "mit", "--dry_run"]
    (tmp_path / "own/0.png").unlink()
    (tmp_path / "own/0.png").symlink_to("4.png")
    publish_data(command)
    (tmp_path / "own/0.png").unlink()
    (tmp_path / "own/0.png").symlink_to("../elsewhere/0.png")
    assert sum(map(len, load_dataset(PublishDataSettings.parse(command).data).values())) == 6
    with refusal("dataset", "1 images", tmp_path / "own/0.png"):
        publish_data(command)


def test_a_dataset_with_a_broken_image_is_not_published_until_it_is_left_out(tmp_path, capsys):
    for number in range(10):
        (tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "ab"[number % 2] / f"{number}.png")
    (tmp_path / "a/broken.png").write_bytes(b"no image")
    command = [str(tmp_path), "org/own", "--license", "mit", "--dry_run"]
    with refusal("on_broken", "a/broken.png"):
        publish_data(command)
    publish_data([*command, "--on_broken", "skip"])
    assert "Nothing was uploaded." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dataset": "glyphs"}, r"int\(n_max \* 100\^\(-i / \(C - 1\)\)\) training images, .* largest class\."),
        ({"rule": "balanced", "images_per_class": 9, "cap": True}, "keeps 9 .* fewer images keeps all of them."),
        ({"rule": "balanced", "validation_fraction": 0.5}, "Every class keeps 6 .* The validation split is not .*"),
        ({"validation_fraction": 0.5}, "The training images are those of the dataset. The validation split is not .*"),
    ],
)
def test_the_card_of_a_dataset_says_what_became_of_its_training_images(pictures, options, said):
    settings = PublishDataSettings.build(**{"dataset": str(pictures), "repo_id": "org/x", "license": "mit"} | options)
    assert re.fullmatch(f".*{said}", origin_of(load_dataset(settings.data), settings.data).rule)


def test_the_card_of_a_dataset_says_by_what_images_were_left_out_and_names_the_licence(pictures):
    left_out = {"exclude_labels": "class0,class3", "license": "mit"}
    settings = PublishDataSettings.build(dataset=str(pictures), repo_id="org/x", **left_out)
    data = load_dataset(settings.data)
    card = dataset_card(data, Publication("org/x", license="mit"), origin_of(data, settings.data)).text
    assert "by `--exclude_labels class0,class3`." in card and "those of the dataset" not in card
    assert "under the licence mit." in card and "| class1 | 18 |" in card


def test_the_card_of_a_dataset_with_several_labels_counts_each_image_once():
    features = Features({"image": Value("string"), "label": List(ClassLabel(names=["a", "b", "c"]))})
    rows = {"image": ["x"] * 3, "label": [[0, 1], [1], [0, 1, 2]]}
    data = DatasetDict(train=Dataset.from_dict(rows, features))
    assert "| train | 3 |" in dataset_card(data, Publication("org/x", license="mit"), Origin("", 0, None)).text


def test_a_dataset_whose_data_does_not_arrive_says_that_its_card_is_there(hub, monkeypatch):
    def cut(*arguments, **options):
        raise ConnectionResetError("cut")

    monkeypatch.setattr("livt_hf.hub.datasets.HfApi", partial(HfApi, endpoint=hub.endpoint, token=TOKEN))
    monkeypatch.setattr("datasets.DatasetDict.push_to_hub", cut)
    settings = PublishDataSettings.build(dataset="glyphs", repo_id="org/glyphs")
    data = load_dataset(settings.data)
    with pytest.raises(PublishError, match="in org/glyphs, which is private, the card is complete .*cut"):
        publish_dataset(data, Publication("org/glyphs"), origin_of(data, settings.data))
    assert set(hub.files("org/glyphs", kind="datasets")) == {".gitattributes", "README.md"}
