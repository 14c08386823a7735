"""bfloat16 where a CPU has it: when a trial is made, what it takes, and that its choice is kept."""

import itertools
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from recipe_runs import make_pictures
from refusals import refusal
from transformers import ResNetConfig, ResNetForImageClassification

from livt_hf import LiViTConfig, LiViTForImageClassification, precision
from livt_hf.cli.resume import automatic_options, keep_automatic_options, start_run
from livt_hf.cli.training_settings import FinetuneSettings
from livt_hf.data import eval_processor, load_long_tailed
from livt_hf.precision import BFLOAT16, FLOAT32, MIN_IMAGES, bfloat16_pays, resolve_precision
from livt_hf.predictions import Predictions
from livt_hf.predictions.predict import Predictor
from livt_hf.training import autotune, device
from livt_hf.training.device import choose_precision
from livt_hf.training.frozen import FrozenBackbone
from livt_hf.training.loop import make_accelerator

LARGE = torch.nn.Linear(1000, 1000)  # 1,001,000 parameters
SMALL = torch.nn.Linear(10, 10)
PIXELS = torch.linspace(-1, 1, 4000).reshape(4, 1000)
softmax = partial(torch.softmax, dim=-1)
OF_CPU = precision.has_cpu_bf16, precision.has_fast_cpu_bf16


@pytest.fixture(autouse=True)
def set_cpu(monkeypatch):
    """Stand in for the CPU: by default one that emulates bf16 slowly, whatever this machine has."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)

    def set_cpu(has_bf16: bool, is_fast: bool) -> None:
        for module in (precision, autotune):
            monkeypatch.setattr(module, "has_cpu_bf16", lambda: has_bf16)
        for module in (precision, device):
            monkeypatch.setattr(module, "has_fast_cpu_bf16", lambda: is_fast)

    set_cpu(False, False)
    yield set_cpu
    for function in OF_CPU:
        function.cache_clear()


@pytest.fixture
def timed(monkeypatch, set_cpu):
    """A CPU with bf16 on which a forward pass takes so many seconds, by a clock that stands in."""
    set_cpu(True, True)

    def set_seconds(float32: float, bfloat16: float) -> None:
        # Each precision is timed twice, by two looks at the clock.
        ticks = itertools.accumulate(itertools.cycle([0, float32, 0, float32, 0, bfloat16, 0, bfloat16]))
        monkeypatch.setattr(precision, "clock", lambda: next(ticks))

    return set_seconds


def changed_by(change: float):
    """Return a classifier of two classes whose first probability is 0.5, and by so much more in bfloat16."""

    def forward(pixels: torch.Tensor) -> torch.Tensor:
        p = 0.5 + change * torch.is_autocast_enabled("cpu")
        return torch.tensor([[p, 1 - p]]).log().expand(len(pixels), 2)

    return forward


@pytest.mark.parametrize(
    ("seconds", "change", "pays"),
    [
        ((1.06, 1.0), 0.0, True),
        ((1.04, 1.0), 0.0, False),
        ((1.0, 3.0), 0.0, False),
        ((3.0, 1.0), 0.019, True),
        ((3.0, 1.0), 0.021, False),
        ((3.0, 1.0), float("nan"), False),
    ],
)
def test_bfloat16_must_be_faster_by_5_percent_and_change_no_posterior_by_more_than_2(timed, seconds, change, pays):
    timed(*seconds)
    assert bfloat16_pays(changed_by(change), PIXELS, softmax) is pays


@pytest.mark.parametrize(
    ("requested", "model", "num_images", "able", "chosen"),
    [
        ("auto", LARGE, MIN_IMAGES, True, BFLOAT16),
        ("auto", LARGE, MIN_IMAGES - 1, True, FLOAT32),
        ("auto", SMALL, MIN_IMAGES, True, FLOAT32),
        ("auto", LARGE, MIN_IMAGES, False, FLOAT32),
        ("float32", LARGE, MIN_IMAGES, True, FLOAT32),
        ("bfloat16", SMALL, 1, True, BFLOAT16),
    ],
)
def test_few_images_and_small_models_are_not_tried_and_a_named_precision_is_taken(
    timed, monkeypatch, requested, model, num_images, able, chosen
):
    timed(3.0, 1.0)
    monkeypatch.setattr(precision, "has_cpu_bf16", lambda: able)
    tried = []
    read = lambda: tried.append(1) or PIXELS  # noqa: E731
    assert resolve_precision(requested, model, num_images, read, changed_by(0.0), softmax) == chosen
    assert bool(tried) is (requested == "auto" and chosen == BFLOAT16)
    assert resolve_precision("auto", LARGE, MIN_IMAGES, lambda: None, changed_by(0.0), softmax) == FLOAT32


NATIVE, EMULATED, SLOW = (True, True), (False, True), (False, False)  # AVX512-BF16, AVX-512 without it, AVX2


@pytest.mark.parametrize("cpu", [NATIVE, EMULATED, SLOW])
def test_training_and_prediction_agree_which_cpu_takes_bf16_by_name_and_by_itself(set_cpu, timed, monkeypatch, cpu):
    timed(3.0, 1.0)
    set_cpu(*cpu)
    has_bf16, is_fast = cpu
    predict = lambda requested: resolve_precision(  # noqa: E731
        requested, LARGE, MIN_IMAGES, lambda: PIXELS, changed_by(0.0), softmax
    )
    assert predict("auto") == (BFLOAT16 if has_bf16 else FLOAT32)
    assert resolve(monkeypatch, 0.1)[0].mixed_precision == ("bf16" if has_bf16 else "auto")
    if is_fast:
        assert (predict(BFLOAT16), choose_precision("bf16")) == (BFLOAT16, "bf16")
        return
    for argument, refuse in (("precision", partial(predict, BFLOAT16)), (None, partial(choose_precision, "bf16"))):
        with refusal(argument, "precision"):
            refuse()


@pytest.mark.parametrize(
    ("cpuinfo", "trial", "has_bf16", "is_fast"),
    [
        ("flags : avx512f avx512_bf16", 0, True, True),
        ("flags : amx_bf16", 0, True, True),
        ("flags : avx512f avx512_bf16", 1, False, False),
        ("flags : avx512f avx512_bf16", -4, False, False),  # an illegal instruction
        ("flags : avx512f", 0, False, True),
        ("flags : avx2", 1, False, False),
        (None, 0, False, True),  # no Linux
    ],
)
def test_what_a_cpu_announces_is_believed_only_after_a_trial_and_tried_once(
    monkeypatch, cpuinfo, trial, has_bf16, is_fast
):
    def read_text(path: Path) -> str:
        if cpuinfo is None:
            raise FileNotFoundError(path)
        return cpuinfo

    trials = []
    run = lambda *_, **__: trials.append(1) or SimpleNamespace(returncode=trial)  # noqa: E731
    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(precision.subprocess, "run", run)
    for function in OF_CPU:
        function.cache_clear()
        monkeypatch.setattr(precision, function.__name__, function)
    assert [[function() for function in OF_CPU] for _ in range(2)] == 2 * [[has_bf16, is_fast]]
    assert len(trials) == 1


@pytest.mark.parametrize(("times", "is_fast"), [(0.2, True), (5.0, True), (75.0, False)])
def test_bf16_that_takes_as_long_as_emulation_without_avx_512_is_not_fast(monkeypatch, times, is_fast):
    seconds = iter([times, 1.0])

    def run(command: list[str], **_) -> SimpleNamespace:
        with pytest.raises(SystemExit) as end:
            exec(command[-1], {})
        return SimpleNamespace(returncode=int(end.value.code))

    monkeypatch.setattr(torch, "ones", lambda *_, dtype: torch.zeros(1, 1))
    monkeypatch.setattr("timeit.repeat", lambda *_, **__: [next(seconds)])
    monkeypatch.setattr(precision.subprocess, "run", run)
    OF_CPU[1].cache_clear()
    assert OF_CPU[1]() is is_fast


def test_processes_that_chose_different_precisions_take_float32(monkeypatch):
    for other, agreed in ((BFLOAT16, BFLOAT16), (FLOAT32, FLOAT32)):
        monkeypatch.setattr(precision, "gather_object", lambda here: [*here, other])  # noqa: B023
        assert precision.agree_on_precision(BFLOAT16) == agreed


def resolve(monkeypatch, in_bf16: float, module=LARGE, **options):
    """Resolve the options of a training whose updates take a second in float32, and so many in bf16."""
    accelerator = Accelerator(cpu=True)
    seconds = lambda *_: in_bf16 if accelerator.mixed_precision == "bf16" else 1.0  # noqa: E731
    monkeypatch.setattr(autotune, "measure_update_seconds", seconds)
    monkeypatch.setattr(autotune, "clock", lambda: 0.0)
    spec = FinetuneSettings.build(dataset="glyphs", **{"epochs": 20, "warmup_epochs": 0} | options).optimization
    task = SimpleNamespace(loader=SimpleNamespace(updates_per_epoch=10), slow_final_epochs=0, module=module)
    return autotune.resolve_auto_options(spec, task, accelerator, began=0.0), accelerator


@pytest.mark.parametrize(("in_bf16", "chosen"), [(0.5, "bf16"), (0.94, "bf16"), (0.96, "no"), (500.0, "no")])
def test_training_takes_bf16_if_updates_are_faster_by_5_percent_and_says_so(
    timed, monkeypatch, capsys, in_bf16, chosen
):
    spec, accelerator = resolve(monkeypatch, in_bf16)
    assert (spec.mixed_precision, accelerator.mixed_precision) == (chosen, chosen)
    assert f"mixed_precision {chosen}: " in capsys.readouterr().err
    layer = torch.nn.Linear(2, 2)
    with accelerator.autocast():
        assert layer(torch.ones(1, 2)).dtype == (torch.bfloat16 if chosen == "bf16" else torch.float32)


def test_the_hours_of_a_training_are_filled_with_epochs_of_the_chosen_precision(timed, monkeypatch):
    spec, _ = resolve(monkeypatch, 0.5, hours=1.0)
    assert (spec.mixed_precision, spec.epochs) == ("bf16", 3600 // 5)


@pytest.mark.parametrize(
    "options",
    [{"epochs": 19}, {"max_steps": 199}, {"hours": 0.05}, {"module": SMALL}, {"mixed_precision": "no"}],
)
def test_no_trial_of_bf16_is_made_where_it_cannot_pay(timed, monkeypatch, options):
    spec, accelerator = resolve(monkeypatch, 0.1, **options)
    assert spec.mixed_precision == options.get("mixed_precision", "auto") and accelerator.mixed_precision == "no"


def test_a_resumed_training_keeps_the_chosen_precisions(tmp_path):
    asked = FinetuneSettings.build(dataset="glyphs", output_dir=str(tmp_path / "run"))
    run = start_run(asked.replace(mixed_precision="bf16", precision="bfloat16", framing="own"))
    assert {"mixed_precision", "precision"} <= set(automatic_options(asked))
    kept = keep_automatic_options(asked, run)
    assert (kept.optimization.mixed_precision, kept.model.precision) == ("bf16", "bfloat16")


def test_a_run_that_chose_bf16_is_bit_for_bit_the_run_of_bf16(timed, monkeypatch):
    """What `resolve_auto_options` sets later is what Accelerate sets at first."""
    named = make_accelerator(FinetuneSettings.build(dataset="glyphs", mixed_precision="bf16").optimization)
    states = [(named.mixed_precision, named.native_amp, named.scaler)]
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    outputs = [named.prepare_model(model)(torch.ones(1, 8))]
    named.state._reset_state(reset_partial_state=True)
    chosen = resolve(monkeypatch, 0.5)[1]
    states.append((chosen.mixed_precision, chosen.native_amp, chosen.scaler))
    torch.manual_seed(0)
    outputs.append(chosen.prepare_model(torch.nn.Linear(8, 8))(torch.ones(1, 8)))
    assert states[0] == states[1] and torch.equal(*outputs)


@pytest.fixture
def backbone(tmp_path, monkeypatch, set_cpu):
    """A frozen ResNet on 64 pictures, and a CPU with bf16 for which both are large enough."""
    set_cpu(True, True)
    monkeypatch.setenv("LIVT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(precision, "MIN_IMAGES", 8)
    monkeypatch.setattr(precision, "MIN_PARAMETERS", 8)
    sizes = dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    model = ResNetForImageClassification(ResNetConfig(**sizes, num_labels=4))
    processor, data = eval_processor(16, [0.5] * 3, [0.2] * 3), load_long_tailed(str(make_pictures(tmp_path / "p")))
    return partial(FrozenBackbone, model, processor, Accelerator(cpu=True)), data["train"]


def test_features_of_each_precision_are_cached_by_themselves(backbone, tmp_path):
    build, images = backbone
    features = {name: np.array(build(precision=name).features(images)) for name in (FLOAT32, BFLOAT16)}
    keys = [json.loads(path.read_text()) for path in (tmp_path / "runs" / "features").glob("*/key.json")]
    assert sorted(key.get("precision", FLOAT32) for key in keys) == [BFLOAT16, FLOAT32]
    assert (features[FLOAT32] != features[BFLOAT16]).any()
    np.testing.assert_allclose(features[FLOAT32], features[BFLOAT16], atol=0.1)
    assert features[BFLOAT16].dtype == np.float32


@pytest.mark.parametrize(("seconds", "chosen"), [((3.0, 1.0), BFLOAT16), ((1.0, 3.0), FLOAT32)])
def test_auto_computes_features_in_the_precision_of_a_trial_or_in_the_one_that_is_cached(
    backbone, timed, seconds, chosen
):
    build, images = backbone
    timed(*seconds)
    for seed, rows in ((0, range(40)), (0, range(64)), (1, range(50, 60))):
        frozen = build(precision="auto", seed=seed)
        frozen.features(images.select(rows))
        assert frozen.precision == chosen
        timed(*reversed(seconds))  # now a trial would say the other


@pytest.fixture
def classifier(tmp_path, tiny, monkeypatch):
    """A classifier and ten pictures for which a trial is made."""
    monkeypatch.setattr(precision, "MIN_IMAGES", 8)
    monkeypatch.setattr(precision, "MIN_PARAMETERS", 8)
    model = LiViTForImageClassification(LiViTConfig(**tiny, class_counts=[50, 40, 5]))
    model.save_pretrained(tmp_path / "model")
    eval_processor(16, [0.5] * 3, [0.2] * 3).save_pretrained(tmp_path / "model")
    files = [tmp_path / f"{number}.png" for number in range(10)]
    for number, file in enumerate(files):
        Image.new("RGB", (16, 16), (20 * number, 90, 200)).save(file)
    return str(tmp_path / "model"), files


def test_a_record_of_predictions_names_the_precision_and_is_completed_in_it(classifier, timed, tmp_path):
    model, files = classifier
    timed(3.0, 1.0)
    first = Predictor(model)
    begun = list(first.predict_to(tmp_path / "record", files, batch_size=4))
    assert {part.info.precision for part in begun} == {BFLOAT16}
    assert begun[0].logits.dtype == np.float32
    timed(1.0, 3.0)  # now a trial would say float32
    again = Predictor(model)
    list(again.predict_to(tmp_path / "record", files, batch_size=4))
    assert again.info.precision == Predictions.load(tmp_path / "record").info.precision == BFLOAT16
    with refusal("path", "another record"):
        list(Predictor(model, precision=FLOAT32).predict_to(tmp_path / "record", files, batch_size=4))
    (fresh,) = Predictor(model).predict(files)
    assert fresh.info.precision == FLOAT32


def test_a_record_is_completed_with_another_batch_size(classifier, tmp_path):
    model, files = classifier
    predictor, files = Predictor(model, precision=FLOAT32), files * 11
    assert len(next(predictor.predict_to(tmp_path / "record", files, batch_size=1))) == 100  # and killed
    assert [len(part) for part in predictor.predict_to(tmp_path / "record", files, batch_size=2)] == [100, 10]
