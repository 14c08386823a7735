import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refusal

import livt_hf.metrics
from livt_hf.metrics import (
    LongTailMetrics,
    MultiLabelMetrics,
    bootstrap_intervals,
    confusions,
    group_sizes,
    long_tail_metrics,
    one_against_rest,
    ranking_means,
    shot_groups,
)

COUNTS = [500, 101, 100, 60, 20, 19, 3]


def slow_and_obvious(logits, labels, counts, bins=15):
    """The definitions, image by image and class by class."""
    num_classes = len(counts)
    right, top5, confidences, first = [], [], [], []
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        ranking = sorted(range(num_classes), key=lambda j: (-row[j], j))
        first.append(ranking[0])
        right.append(ranking[0] == label)
        top5.append(label in ranking[:5])
        confidences.append(1 / sum(math.exp(z - max(row)) for z in row))
    of_class = {
        c: [r for r, y in zip(right, labels.tolist(), strict=True) if y == c] for c in set(labels.tolist())
    }  # fmt: skip
    accuracy = {c: sum(r) / len(r) for c, r in of_class.items()}

    def mean_over(wanted):
        values = [a for c, a in accuracy.items() if wanted(counts[c])]
        return sum(values) / len(values) if values else None

    def precision_and_f1(c):
        predicted = sum(p == c for p in first)
        hits = sum(of_class[c])
        return hits / predicted if predicted else 0, 2 * hits / (predicted + len(of_class[c]))

    def macro(place, wanted=lambda n: True):
        values = [precision_and_f1(c)[place] for c in accuracy if wanted(counts[c])]
        return sum(values) / len(values) if values else None

    gaps, sizes = [], []
    for b in range(bins):
        inside = [i for i, c in enumerate(confidences) if b / bins < c <= (b + 1) / bins]
        if inside:
            gap = sum(confidences[i] for i in inside) - sum(right[i] for i in inside)
            gaps.append(abs(gap) / len(inside))
            sizes.append(len(inside))
    groups = {"many": lambda n: n > 100, "medium": lambda n: 20 <= n <= 100, "few": lambda n: n < 20}
    return {
        "accuracy": sum(right) / len(right),
        "top5": sum(top5) / len(top5) if num_classes >= 5 else None,
        **{name: mean_over(wanted) for name, wanted in groups.items()},
        "mean_class_accuracy": mean_over(lambda n: True),
        "worst_class_accuracy": min(accuracy.values()),
        "macro_precision": macro(0),
        "macro_f1": macro(1),
        **{f"{name}_precision": macro(0, wanted) for name, wanted in groups.items()},
        **{f"{name}_f1": macro(1, wanted) for name, wanted in groups.items()},
        "ece": sum(g * n for g, n in zip(gaps, sizes, strict=True)) / len(right),
        "mce": max(gaps),
        "mean_confidence": sum(confidences) / len(confidences),
        "num_images": len(right),
        "num_nan": 0,
    }


def random_case(seed, images=200, counts=COUNTS, ties=False):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(counts), (images,), generator=generator)
    logits = 2 * torch.randn(images, len(counts), generator=generator)
    logits[torch.arange(images), labels] += 1.5
    return (logits.round() if ties else logits), labels


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("seed", "images"), [(0, 200), (1, 57), (2, 1), (3, 2)])
def test_metrics_equal_the_definitions_worked_out_image_by_image(seed, images, ties):
    logits, labels = random_case(seed, images, ties=ties)
    assert long_tail_metrics(logits, labels, COUNTS) == pytest.approx(slow_and_obvious(logits, labels, COUNTS))


def test_metrics_equal_the_definitions_where_classes_and_a_whole_group_have_no_test_image():
    logits, labels = random_case(4)
    keep = (labels == 0) | (labels == 3)
    metrics = long_tail_metrics(logits[keep], labels[keep], COUNTS)
    assert metrics == pytest.approx(slow_and_obvious(logits[keep], labels[keep], COUNTS))
    assert metrics["few"] is None
    assert "NaN" not in json.dumps(metrics)


def test_blocks_of_rows_do_not_change_the_result(monkeypatch):
    logits, labels = random_case(5)
    whole = long_tail_metrics(logits, labels, COUNTS)
    monkeypatch.setattr("livt_hf.predictions.metrics._BLOCK", 7 * 13)
    assert long_tail_metrics(logits, labels, COUNTS) == whole


def test_twenty_and_a_hundred_training_images_are_medium():
    assert shot_groups(COUNTS).tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert shot_groups([3, 2, 1], many_above=2, few_below=2).tolist() == [0, 1, 2]
    assert group_sizes([101, 100, 20, 19]) == {"many": 1, "medium": 2, "few": 1}
    assert group_sizes([50]) == {"many": 0, "medium": 1, "few": 0}


@pytest.mark.parametrize(
    ("logits", "labels", "counts", "expected"),
    [
        (  # a group weighs its classes equally, overall accuracy its images
            torch.eye(2)[[0, 0, 0, 0]],
            [0, 0, 0, 1],
            [500, 500],
            {"accuracy": 0.75, "many": 0.5, "medium": None, "worst_class_accuracy": 0.0},
        ),
        (torch.eye(2), [0, 0], [500, 5], {"many": 0.5, "medium": None, "few": None}),  # the last is not tested
        (torch.zeros(10, 10), range(10), [50] * 10, {"accuracy": 0.1, "top5": 0.5}),  # the first classes are taken
        (torch.eye(4), range(4), [50] * 4, {"top5": None}),
        (torch.eye(5), range(5), [50] * 5, {"top5": 1}),
        (torch.zeros(2, 2), [0, 1], [50, 50], {"ece": 0, "mce": 0}),  # half sure, and one of two is right
        (
            torch.full((2, 3), math.nan),
            [0, 1],
            [50] * 3,
            {"accuracy": 0, "ece": None, "mce": None, "mean_confidence": None, "num_nan": 2},
        ),
        (  # a class that is masked
            torch.tensor([[1.0, 1.0, -math.inf]]),
            [0],
            [50] * 3,
            {"accuracy": 1, "num_nan": 0, "mean_confidence": 0.5},
        ),
    ],
)
def test_metrics_of_a_few_images_are_those_one_works_out(logits, labels, counts, expected):
    metrics = long_tail_metrics(logits, torch.tensor(labels), counts)
    assert {name: metrics[name] for name in expected} == expected


def test_a_confidence_on_an_edge_belongs_to_the_bin_below():
    metrics = LongTailMetrics([50, 50], bins=2, confidence="given")
    metrics.update(torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.0, 0.0]]), torch.tensor([0, 0, 1]))
    assert [row["images"] for row in metrics.bins] == [2, 1]
    assert metrics.bins[1] == {"low": 0.5, "high": 1.0, "images": 1, "accuracy": 0.0, "confidence": 0.75}


def test_confidence_is_the_largest_softmax_sigmoid_or_given_probability():
    logits, labels = random_case(6)
    for name, probabilities in (("softmax", logits.softmax(-1)), ("sigmoid", logits.sigmoid())):
        ours = long_tail_metrics(logits, labels, COUNTS, confidence=name)
        given = long_tail_metrics(probabilities, labels, COUNTS, confidence="given")
        assert ours == pytest.approx(given, abs=1e-6)
        assert ours["mean_confidence"] == pytest.approx(probabilities.amax(-1).mean().item(), abs=1e-6)


def test_numpy_and_half_precision_logits_are_read_too():
    logits, labels = random_case(8, ties=True)  # whole numbers are exact in 16 bits
    expected = long_tail_metrics(logits, labels, COUNTS)
    assert long_tail_metrics(logits.numpy(), labels.numpy(), np.array(COUNTS)) == expected
    assert long_tail_metrics(logits.bfloat16(), labels.int(), COUNTS) == expected
    assert long_tail_metrics(logits.double().requires_grad_(), labels, COUNTS) == pytest.approx(expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_without_confidence_is_a_wrong_image_that_is_reported(value):
    logits, labels = random_case(9)
    labels[3] = 2
    logits[3] = torch.tensor([0, 0, value, 0, 0, 0, 0])
    metrics = long_tail_metrics(logits, labels, COUNTS)
    others = torch.arange(200) != 3
    without = long_tail_metrics(logits[others], labels[others], COUNTS)
    assert (metrics["num_nan"], metrics["num_images"]) == (1, 200)
    assert metrics["accuracy"] == pytest.approx(without["accuracy"] * 199 / 200)
    assert metrics["top5"] == pytest.approx(without["top5"] * 199 / 200)
    assert (metrics["ece"], metrics["mean_confidence"]) == (without["ece"], without["mean_confidence"])


def test_any_split_into_batches_and_processes_gives_the_same_state_to_the_bit():
    logits, labels = random_case(10)
    whole = LongTailMetrics(COUNTS)
    whole.update(logits, labels)
    first, second = LongTailMetrics(COUNTS), LongTailMetrics(COUNTS)
    for start in range(0, 200, 7):
        (first if start % 2 else second).update(logits[start : start + 7], labels[start : start + 7])
    loaded = LongTailMetrics(COUNTS)
    loaded.load_state_tensor(first.state_tensor() + second.state_tensor())
    assert torch.equal(loaded.state_tensor(), whole.state_tensor())
    assert loaded.compute() == whole.compute()


def test_memory_is_linear_in_classes_and_an_empty_batch_changes_nothing():
    metrics = LongTailMetrics([50] * 8142)
    metrics.update(torch.zeros(0, 8142), torch.zeros(0, dtype=torch.long))
    assert len(metrics.state_tensor()) == 5 * 8142 + 3 * 15 + 3
    assert metrics.state_tensor().sum() == 0


def test_the_class_table_lists_counts_accuracy_and_confidence():
    metrics = LongTailMetrics([500, 5, 50])
    metrics.update(torch.tensor([[9.0, 0, 0], [9.0, 0, 0]]), torch.tensor([0, 2]))
    rows = metrics.per_class(["cat", "dog", "eel"])
    assert [row["name"] for row in rows] == ["cat", "dog", "eel"]
    assert [row["group"] for row in rows] == ["many", "few", "medium"]
    assert [row["accuracy"] for row in rows] == [1.0, None, 0.0]
    assert [row["images"] for row in rows] == [1, 0, 1]
    assert rows[1]["confidence"] is None and rows[2]["confidence"] == pytest.approx(1, abs=1e-3)


def test_class_ids_give_what_logits_give_but_confidences():
    logits, labels = random_case(20)
    by_logits, by_ids = (long_tail_metrics(given, labels, COUNTS) for given in (logits, logits.argmax(-1)))
    only_of_scores = ("top5", "ece", "mce", "mean_confidence")
    assert by_ids == by_logits | dict.fromkeys(only_of_scores)
    metrics = LongTailMetrics(COUNTS)
    metrics.update(logits.argmax(-1), labels)
    assert all(row["confidence"] is None for row in metrics.per_class())


# Intervals


def accuracies_of_inat18(seed: int) -> tuple[np.ndarray, np.ndarray, float]:
    """400 classes with three images each, as iNat18: labels, predictions, and what the last half is right on."""
    truth = np.linspace(0.2, 0.95, 400)
    labels = np.arange(400).repeat(3)
    right = np.random.default_rng(seed).random(1200) < truth[labels]
    return labels, np.where(right, labels, (labels + 1) % 400), truth[200:].mean()


def test_intervals_cover_as_often_as_they_say():
    # Three images per class is where drawing n of n images would be too sure.
    shots, covered = shot_groups([50] * 200 + [5] * 200), 0
    for seed in range(100):
        labels, predictions, truth = accuracies_of_inat18(seed)
        intervals = bootstrap_intervals(labels, predictions, shots, resamples=100)
        low, high = intervals["few"]
        covered += low <= truth <= high
        assert low <= (labels == predictions)[600:].mean() <= high
        assert intervals["many"] is None
    assert 89 <= covered <= 99  # 95 - 2.6 standard deviations; always would be too unsure


@pytest.mark.parametrize(
    ("sizes", "rare"),
    [
        ([1] * 15 + [20] * 15, 0.35),  # classes of one image, taken for certain, made it 28 %
        (np.geomspace(1, 50, 30).round().astype(int), 0.6),
        ([3] * 30, 0.7),
    ],
    ids=["singles", "long tail", "three each"],
)
def test_intervals_of_mean_class_accuracy_cover_where_classes_have_one_image(sizes, rare):
    labels, rng, covered = np.arange(30).repeat(sizes), np.random.default_rng(0), 0
    truth = np.where(np.asarray(sizes) < 10, rare, 0.85)
    shots = shot_groups([5 if size < 10 else 500 for size in sizes])
    for _ in range(80):
        right = rng.random(len(labels)) < truth[labels]
        predictions = np.where(right, labels, (labels + rng.integers(1, 30, len(labels))) % 30)
        low, high = bootstrap_intervals(labels, predictions, shots, resamples=100)["mean_class_accuracy"]
        covered += low <= truth.mean() <= high
    assert 70 <= covered <= 79  # of 80: 95 % are 76, and a standard deviation is 2


def test_classes_seen_in_one_patient_only_are_not_taken_for_certain():
    labels, patients = np.arange(20).repeat(4), np.arange(20).repeat(4)  # one patient per class
    predictions = np.where(np.arange(20) < 10, np.arange(20), 0).repeat(4)
    low, high = bootstrap_intervals(labels, predictions, shot_groups([50] * 20), patients)["mean_class_accuracy"]
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(0.25 / 20), rel=0.2)  # as of 20 images, half of them right


def test_images_of_one_patient_widen_the_interval_as_if_there_were_only_patients():
    rng = np.random.default_rng(0)
    patients = np.arange(50).repeat(20)
    labels = np.zeros(1000, dtype=int)
    predictions = np.where(rng.random(50) < 0.7, 0, 1)[patients]  # all images of a patient are right, or all wrong
    shots = shot_groups([50, 50])
    widths = {}
    for name, clusters in (("images", None), ("patients", patients)):
        low, high = bootstrap_intervals(labels, predictions, shots, clusters)["accuracy"]
        widths[name] = high - low
    share = (predictions == 0).mean()
    assert widths["images"] == pytest.approx(2 * 1.96 * math.sqrt(share * (1 - share) / 1000), rel=0.15)
    assert widths["patients"] == pytest.approx(2 * 1.96 * math.sqrt(share * (1 - share) / 49), rel=0.15)


def test_of_a_handful_of_patients_one_less_is_drawn_so_that_the_variance_is_right():
    """The bounds of 5 draws of 6 are multiples of 1/5; those of 6 draws would be multiples of 1/6."""
    labels, predictions = np.zeros(12, dtype=int), np.array([0, 0, 0, 1, 1, 1]).repeat(2)
    bounds = bootstrap_intervals(labels, predictions, shot_groups([50, 50]), np.arange(6).repeat(2))["accuracy"]
    assert all(abs(5 * bound - round(5 * bound)) < 1e-9 for bound in bounds)


def test_intervals_repeat_and_there_is_none_for_a_faultless_model():
    labels, predictions, _ = accuracies_of_inat18(0)
    shots = shot_groups([50] * 400)
    assert bootstrap_intervals(labels, predictions, shots) == bootstrap_intervals(labels, predictions, shots)
    faultless = bootstrap_intervals(np.arange(7), np.arange(7), shot_groups(COUNTS))
    assert faultless["accuracy"] == faultless["macro_f1"] is None


# Against scikit-learn


@pytest.mark.parametrize(
    "case",
    ["random", "ties", "one image", "one class", "absent classes", "constant"],
)
def test_auroc_and_average_precision_equal_scikit_learns(case):
    sklearn = pytest.importorskip("sklearn.metrics")
    logits, labels = random_case(30, images=1 if case == "one image" else 150, ties=case == "ties")
    if case == "one class":
        labels[:] = 3
    if case == "absent classes":
        keep = (labels != 0) & (labels != 5)
        logits, labels = logits[keep], labels[keep]
    if case == "constant":
        logits[:] = 0
    present = sorted(set(labels.tolist()))
    rankings = one_against_rest(logits, labels)
    for c in range(7):
        targets = (labels == c).int()
        if c in present:
            theirs = sklearn.average_precision_score(targets, logits[:, c])
            assert rankings["average_precision"][c].item() == pytest.approx(theirs)
        if 0 < targets.sum() < len(targets):
            assert rankings["auroc"][c].item() == pytest.approx(sklearn.roc_auc_score(targets, logits[:, c]))
        else:
            assert rankings["auroc"][c].isnan()


def test_the_mean_auroc_is_scikit_learns_one_against_rest_also_in_blocks(monkeypatch):
    sklearn = pytest.importorskip("sklearn.metrics")
    logits, labels = random_case(31)
    expected = sklearn.roc_auc_score(labels, logits.softmax(-1), multi_class="ovr", average="macro")
    monkeypatch.setattr("livt_hf.predictions.metrics._SORTED", 400)  # two classes at a time
    rankings = one_against_rest(logits.softmax(-1), labels)
    means = ranking_means(rankings, shot_groups(COUNTS))
    assert means["auroc"] == pytest.approx(expected)
    assert means["few_auroc"] == pytest.approx(rankings["auroc"][5:].mean().item())


@pytest.mark.parametrize(
    ("logits", "labels", "value"),
    [
        (torch.zeros(3, 7), torch.zeros(2, dtype=torch.long), "2 labels"),
        (torch.zeros(2, 7), torch.tensor([0, 7]), "label 7"),
        (torch.zeros(2, 7), torch.tensor([-1, 0]), "label -1"),
        (torch.tensor([0, 7]), torch.tensor([0, 1]), "prediction 7"),
        (torch.zeros(2, 6), torch.tensor([0, 1]), "(images, 7)"),
        (torch.zeros(2, 7), torch.zeros(2, 7), "MultiLabelMetrics"),
    ],
)
def test_logits_and_labels_that_do_not_fit_are_refused(logits, labels, value):
    with refusal(None, value):
        long_tail_metrics(logits, labels, COUNTS)


def test_settings_that_mean_nothing_are_refused():
    for counts, settings, argument, value in (
        (COUNTS, {"confidence": "softmx"}, None, "softmx"),
        (COUNTS, {"many_above": 10, "few_below": 20}, "few_below", "both groups"),
        ([0.5, 0.5], {}, "class_counts", "counts"),
    ):
        with refusal(argument, value):
            LongTailMetrics(counts, **settings)
    with refusal(None, "3 is not in [0, 1]"):
        long_tail_metrics(torch.full((1, 7), 3.0), torch.tensor([0]), COUNTS, confidence="given")
    with refusal(None, "update"):
        LongTailMetrics(COUNTS).compute()
    with refusal(None, "bins"):
        LongTailMetrics(COUNTS).load_state_tensor(LongTailMetrics(COUNTS, bins=10).state_tensor())


def test_confusions_count_who_is_taken_for_whom():
    predictions, labels = torch.tensor([1, 1, 0, 2, 2, 1]), torch.tensor([0, 0, 0, 0, 2, 2])
    found = confusions(predictions, labels, [9, 8, 7], ["cat", "dog", "eel"])
    assert [(r["label"], r["predicted"], r["images"], r["share"]) for r in found] == [
        (0, 1, 2, 0.5),
        (0, 2, 1, 0.25),
        (2, 1, 1, 0.5),
    ]
    assert (found[0]["label_name"], found[0]["predicted_name"], found[0]["predicted_count"]) == ("cat", "dog", 8)
    found = confusions(torch.tensor([1, -1]), torch.tensor([0, 0]), [9, 8])  # of one image nothing is predicted
    assert [(row["predicted"], row["images"], row["share"]) for row in found] == [(1, 1, 0.5)]
    for dtype in (torch.uint8, torch.int16, torch.int64):  # among many classes also in small integers
        [row] = confusions(torch.tensor([199], dtype=dtype), torch.tensor([198], dtype=dtype), [1] * 200)
        assert (row["label"], row["predicted"]) == (198, 199)


def test_average_precision_equals_scikit_learns_also_with_equal_scores():
    average_precision_score = pytest.importorskip("sklearn.metrics").average_precision_score
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(60, 7, generator=generator).mul(8).round()
    targets = (torch.rand(60, 7, generator=generator) < 0.3).long()
    targets[:, 2] = 0
    metrics = MultiLabelMetrics(COUNTS)
    metrics.update(scores[:25], targets[:25])
    metrics.update(scores[25:], targets[25:])
    expected = [average_precision_score(targets[:, c], scores[:, c]) if c != 2 else None for c in range(7)]
    assert [row["average_precision"] for row in metrics.per_class()] == pytest.approx(expected)
    roc_auc_score = pytest.importorskip("sklearn.metrics").roc_auc_score
    areas = [roc_auc_score(targets[:, c], scores[:, c]) if c != 2 else None for c in range(7)]
    assert [row["auroc"] for row in metrics.per_class()] == pytest.approx(areas)
    result = metrics.compute()
    assert result["many"] == pytest.approx(np.mean(expected[:2]))
    assert result["medium"] == pytest.approx(np.mean(expected[3:5]))
    assert result["map"] == pytest.approx(np.mean([e for e in expected if e is not None]))
    assert (result["num_images"], result["num_nan"]) == (60, 0)


def test_a_nan_score_ranks_last_and_is_reported():
    metrics = MultiLabelMetrics([50])
    metrics.update(torch.tensor([[math.nan], [0.1]]), torch.tensor([[1], [0]]))
    assert metrics.compute() == {
        "map": 0.5, "many": None, "medium": 0.5, "few": None, "auroc": 0.0, "num_images": 2, "num_nan": 1
    }  # fmt: skip
    with refusal(None, "soft labels"):
        metrics.update(torch.zeros(1, 1), torch.full((1, 1), 0.5))


PREPARED = """
import os
import torch
from transformers import ViTConfig, ViTForImageClassification

torch.manual_seed(0)
training_images_of_each_class = [150, 30, 5]
logits, labels = torch.randn(12, 3), torch.arange(12) % 3
config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=8,
                   patch_size=4, num_labels=3)
model = ViTForImageClassification(config)
validation = [dict(pixel_values=torch.randn(3, 8, 8), labels=int(label)) for label in labels]
os.environ["ACCELERATE_USE_CPU"] = "1"
"""


def test_the_evaluate_module_agrees_offline_and_is_used_as_its_readme_says_alone_and_with_trainer(tmp_path):
    folder = Path(livt_hf.metrics.__file__).parent / "long_tail"
    blocks = re.findall(r"^```python\n(.*?)^```", (folder / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2 and "Trainer(" in blocks[1]
    logits, labels = random_case(12)
    np.savez(tmp_path / "case.npz", logits=logits, labels=labels)
    code = (
        "import evaluate, json, numpy as np\n"
        f"case = np.load('{tmp_path}/case.npz')\n"
        f"module = evaluate.load('{folder}')\n"
        f"kwargs = dict(class_counts={COUNTS}, few_below=10)\n"
        "at_once = module.compute(predictions=case['logits'], references=case['labels'], **kwargs)\n"
        "module.add_batch(predictions=case['logits'][:50].tolist(), references=case['labels'][:50].tolist())\n"
        "module.add_batch(predictions=case['logits'][50:], references=case['labels'][50:])\n"
        "in_parts = module.compute(**kwargs)\n"
        "ids = module.compute(predictions=case['logits'].argmax(-1), references=case['labels'], **kwargs)\n"
        "print(json.dumps([at_once, in_parts, ids]))\n"
    )
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([code, PREPARED, *blocks])],
        env=os.environ | offline | {"OMP_NUM_THREADS": "1"}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (agreed,) = (line for line in done.stdout.splitlines() if line.startswith("[{"))
    expected = long_tail_metrics(logits, labels, COUNTS, few_below=10)
    assert json.loads(agreed) == [
        expected,
        expected,
        long_tail_metrics(logits.argmax(-1), labels, COUNTS, few_below=10),
    ]
    assert 0 <= float(done.stdout.splitlines()[-1]) <= 1
