"""The exact head: the optimum of its loss, cross-validated without leaks, the same however it is computed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import refusal
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score, log_loss

from livt_hf.long_tail.config import LongTailConfig
from livt_hf.long_tail.head import LongTailHead
from livt_hf.training import exact_head, head_solver
from livt_hf.training.exact_head import assign_folds, fit_exact_head

COUNTS = (60, 25, 10, 4)


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    """Features (99, 12) of four overlapping classes on different scales, one feature constant, and their labels."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), COUNTS)
    features = rng.normal(size=(99, 12)) + 0.7 * rng.normal(size=(4, 12))[labels]
    features = features * rng.uniform(0.1, 10, 12) + rng.normal(0, 5, 12)
    features[:, 7] = 3.0
    order = rng.permutation(99)
    return features[order].astype(np.float32), labels[order]


def standardise(features: np.ndarray) -> np.ndarray:
    std = features.std(0, dtype=np.float64)
    return (features - features.mean(0, dtype=np.float64)) / np.where(std > 1e-6, std, np.inf)


def logits_of(head, features: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(features).float() @ head.weight.T + head.bias


def several_labels(labels: np.ndarray) -> np.ndarray:
    rows = np.eye(4, dtype=np.int64)[labels]
    rows[::5, 1] = 1
    rows[3] = 0
    return rows


def build_head(loss: str, labels: np.ndarray, **options) -> LongTailHead:
    """The head of a model that was trained on these labels."""
    kind, counts = "single_label_classification", np.bincount(labels) if labels.ndim == 1 else labels.sum(0)
    if labels.ndim == 2:
        kind, options = "multi_label_classification", options | {"num_train_images": len(labels), "test_prior": None}
    long_tail = LongTailConfig(loss=loss, class_counts=counts.tolist(), **options)
    return LongTailHead(SimpleNamespace(num_labels=len(counts), problem_type=kind, long_tail=long_tail))


@pytest.mark.parametrize("strength", [1.0, 0.01])
@pytest.mark.parametrize("rows", [99, 40])  # more images than features, and (repeated features) fewer
def test_cross_entropy_has_the_optimum_of_logistic_regression(data, strength, rows):
    features, labels = data[0][:rows], data[1][:rows]
    if rows < 99:
        features = np.concatenate([features, features**2, np.sin(features), np.cos(features)], axis=1)
    head = fit_exact_head(features, labels, loss="ce", strengths=[strength])
    x = standardise(features)
    reference = LogisticRegression(C=1 / (strength * rows), tol=1e-10, max_iter=10_000).fit(x, labels)
    ours = logits_of(head, features).softmax(-1).numpy()
    np.testing.assert_allclose(ours, reference.predict_proba(x), atol=1e-4)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("ce", {}),
        ("bal_ce", {"tau": 0.5}),
        ("bce", {}),
        ("bal_bce", {}),
        ("bal_bce", {"test_prior": None}),
        ("bal_ce", {"label_smoothing": 0.1}),
        ("bal_bce", {"label_smoothing": 0.1}),
        ("ce", {"class_weights": [1, 2, 4, 8]}),
        ("bce", {"class_weights": [1, 2, 4, 8], "label_smoothing": 0.05}),
        ("cb_ce", {}),
        ("bal_bce", {"multi_label": True}),
        ("bce", {"multi_label": True}),
    ],
)
def test_the_gradient_of_the_heads_own_loss_vanishes(data, loss, options):
    """The loss is that of `LongTailHead` in training mode plus the penalty on standardised features."""
    features, labels = data
    options = dict(options)
    several = options.pop("multi_label", False)
    labels = several_labels(labels) if several else labels
    head = fit_exact_head(features, labels, loss=loss, strengths=[0.05], **options)
    module = build_head(loss, labels, **options).train()
    long_tail = module.settings
    std, mean = features.std(0, dtype=np.float64), features.mean(0, dtype=np.float64)
    weight = (head.weight.double() * torch.from_numpy(std)).requires_grad_()
    bias = (head.bias.double() + head.weight.double() @ torch.from_numpy(mean)).requires_grad_()
    logits = torch.from_numpy(standardise(features)) @ weight.T + bias
    targets = torch.from_numpy(labels)
    scale = module.class_weight[targets].mean() if long_tail.weighted_from is not None else 1.0
    if long_tail.label_smoothing and long_tail.weighted_from is not None:
        smooth = long_tail.label_smoothing
        scale = (module.class_weight[targets] * (1 - smooth) + module.class_weight.mean() * smooth).mean()
    (module(logits, targets) / scale + 0.025 * weight.square().sum()).backward()
    assert weight.grad.abs().max() < 1e-4 and bias.grad.abs().max() < 1e-4


@pytest.mark.parametrize(("plain", "balanced"), [("ce", "bal_ce"), ("bce", "bal_bce")])
def test_a_balanced_loss_only_moves_the_bias(data, plain, balanced):
    """The bias is not penalised, so both have the same training posterior."""
    features, labels = data
    first, second = (fit_exact_head(features, labels, loss=loss) for loss in (plain, balanced))
    assert first.strength == second.strength
    torch.testing.assert_close(first.weight, second.weight)
    moved = build_head(balanced, labels).logit_bias
    torch.testing.assert_close(first.bias - second.bias, moved, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(first.out_of_fold - second.out_of_fold, moved.expand(99, -1), atol=1e-4, rtol=1e-4)
    again = fit_exact_head(features, labels, loss=plain)
    assert torch.equal(first.weight, again.weight) and torch.equal(first.out_of_fold, again.out_of_fold)


def test_out_of_fold_logits_are_those_of_a_head_without_the_fold(data):
    features, labels = data
    head = fit_exact_head(features, labels, loss="ce", strengths=[0.1])
    x = standardise(features)
    for number in range(5):
        out = head.fold == number
        reference = LogisticRegression(C=10 / (~out).sum(), tol=1e-10, max_iter=10_000).fit(x[~out], labels[~out])
        ours = head.out_of_fold[torch.from_numpy(out)].softmax(-1).numpy()
        assert set(labels[~out]) == set(range(4))
        np.testing.assert_allclose(ours, reference.predict_proba(x[out]), atol=0.01)


def test_the_labels_of_a_fold_do_not_reach_its_own_logits(data):
    features, labels = data
    fold = np.arange(99) % 3
    changed = np.where(fold == 1, 0, labels)
    first, second = (fit_exact_head(features, y, loss="ce", folds=fold, strengths=[0.1]) for y in (labels, changed))
    own = torch.from_numpy(fold == 1)
    torch.testing.assert_close(first.out_of_fold[own], second.out_of_fold[own], atol=0.05, rtol=0)
    assert not torch.allclose(first.out_of_fold[~own], second.out_of_fold[~own], atol=0.3, rtol=0)


def test_a_group_is_in_one_fold_and_classes_are_spread():
    labels = np.repeat([0, 1, 2], [60, 30, 10])
    groups = np.arange(100) // 3
    fold = assign_folds(labels, 5, groups)
    assert all(len(set(fold[groups == group])) == 1 for group in set(groups))
    assert all(len(set(fold[labels == label])) >= 3 for label in range(3))
    assert sorted(set(fold)) == [0, 1, 2, 3, 4]
    assert len(set(assign_folds(labels, 5, np.arange(100) // 50))) == 2  # two patients
    assert (assign_folds(labels, 5, groups, seed=1) != fold).any()
    several = np.stack([np.ones(100), labels == 1, labels == 2], axis=1).astype(int)
    assert (np.bincount(assign_folds(several, 5)[labels == 2]) == 2).all()  # by the rarest label of an image


def test_a_class_of_one_image_is_learned_and_its_image_is_marked_as_unseen(data):
    features, labels = data
    labels = labels.copy()
    row = np.flatnonzero(labels == 2)[0]
    labels[row] = 4
    for loss in ("bal_ce", "bal_bce"):
        head = fit_exact_head(features, labels, loss=loss)
        assert head.weight.shape == (5, 12) and torch.isfinite(head.out_of_fold).all()
        assert head.unseen.nonzero().flatten().tolist() == [row]
        posterior = build_head(loss, labels).training_posterior(head.out_of_fold[row]).exp()
        assert posterior[4].item() == pytest.approx(1 / 99, rel=1e-4)  # nothing is known but the prior
        assert logits_of(head, features[[row]]).argmax() == 4


@pytest.mark.parametrize("loss", ["bal_ce", "bal_bce"])
def test_a_fold_whose_head_knows_one_class_alone_says_the_prior(loss):
    """Both classes are in groups of their own, and the second one is in a single group."""
    labels = np.repeat([0, 1], [40, 10])
    groups, features = np.repeat([0, 1, 2], [20, 20, 10]), np.random.default_rng(0).normal(size=(50, 6))
    head = fit_exact_head(features + 2 * labels[:, None], labels, groups=groups, loss=loss)
    posterior = build_head(loss, labels).training_posterior(head.out_of_fold[labels == 1]).exp()
    torch.testing.assert_close(posterior, torch.tensor([[0.8, 0.2]]).expand(10, -1))
    assert head.strength == min(head.path, key=lambda row: row["nll"])["strength"] < 1


def test_a_weaker_penalty_fits_closer_and_the_best_strength_is_kept(data):
    features, labels = data
    rows = []
    head = fit_exact_head(features, labels, loss="bal_ce", callback=rows.append)
    strengths = [row["strength"] for row in rows]
    assert rows == head.path and strengths == sorted(strengths, reverse=True)
    assert rows[0]["strength"] == 10 and len(rows) < len(exact_head.STRENGTHS)  # two worse ones end the path
    assert head.strength == min(rows, key=lambda row: row["nll"])["strength"]
    fitted = logits_of(head, features) + build_head("bal_ce", labels).logit_bias
    loss = torch.nn.functional.cross_entropy(fitted, torch.from_numpy(labels)).item()
    assert loss < min(row["nll"] for row in rows)


@pytest.mark.parametrize(("loss", "several"), [("bal_ce", False), ("bal_bce", False), ("bal_bce", True)])
def test_what_is_kept_is_of_the_chosen_strength(data, loss, several):
    """Its path goes on for two strengths, whose logits and heads must not be taken."""
    features, labels = data[0], several_labels(data[1]) if several else data[1]
    head = fit_exact_head(features, labels, loss=loss, shrinkage=1)
    number = [row["strength"] for row in head.path].index(head.strength)
    assert number == len(head.path) - 3
    alone = fit_exact_head(features, labels, loss=loss, strengths=[head.strength])
    assert alone.path[0]["nll"] == pytest.approx(head.path[number]["nll"], rel=0.01)
    posterior, expected = (one.out_of_fold.sigmoid() for one in (head, alone))
    torch.testing.assert_close(posterior, expected, atol=0.02, rtol=0)
    assert head.out_of_fold.shape == (99, 4) and not head.unseen.any()
    if several:
        prior = labels.mean(0)
        chance = -(labels * np.log(prior) + (1 - labels) * np.log1p(-prior)).sum(1).mean()
        assert 0.5 * chance < head.path[number]["nll"] < chance
    weight, bias = head.shrunk
    first = torch.from_numpy(head.fold == 0)
    logits = torch.from_numpy(features)[first] @ weight.T + bias
    logits = logits - (head.out_of_fold[first] + build_head(loss, labels).logit_bias)
    if loss == "bal_ce":  # its logits are known up to a number
        logits = logits - logits.mean(1, keepdim=True)
    torch.testing.assert_close(logits, torch.zeros_like(logits), atol=0.15, rtol=0)


def test_a_shrunk_head_has_a_larger_strength_and_another_bias_for_unknown_classes(data):
    features, labels = data
    fold = (labels == labels.max()).astype(int) ^ 1  # the first fold has all images of the last class
    heads = [fit_exact_head(features, labels, loss="bal_ce", folds=fold, shrinkage=by).shrunk for by in (1, 20)]
    lengths = [weight.norm() for weight, _ in heads]
    assert lengths[1] < 0.7 * lengths[0]
    assert all(bias[-1] < -1000 for _, bias in heads)


def test_of_equally_good_strengths_the_strongest_is_taken():
    rows = [{"nll": 2.0, "accuracy": 0.5}, {"nll": 1.0, "accuracy": 0.7}, {"nll": 1.0, "accuracy": 0.7}]
    assert [exact_head._choose(rows, select) for select in ("nll", "accuracy")] == [1, 1]


@pytest.mark.parametrize("select", ["accuracy", "mean_class_accuracy", "macro_f1", "balanced"])
def test_the_strength_is_the_best_by_the_selected_score(data, select):
    head = fit_exact_head(*data, loss="bal_ce", select=select)
    assert head.strength == max(head.path, key=lambda row: row[select])["strength"]
    likeliest = min(range(len(head.path)), key=lambda number: head.path[number]["nll"])
    assert likeliest <= len(head.path) - 3  # where the likelihood still grows, the path goes on


def test_scores_are_those_of_scikit_learn(data):
    """Accuracy under the training prior pi, mean class accuracy under the uniform one, macro F1 under pi^0.5."""
    labels, logits = torch.from_numpy(data[1]), 2 * torch.randn(99, 4, generator=torch.Generator().manual_seed(0))
    scores, prior = exact_head.score_logits(build_head("ce", data[1]), logits, labels), torch.tensor(COUNTS) / 99
    decided = {t: (logits - (1 - t) * prior.log()).argmax(1) for t in (0, 0.5, 1)}
    assert scores["accuracy"] == pytest.approx(accuracy_score(labels, decided[1]))
    assert scores["mean_class_accuracy"] == pytest.approx(balanced_accuracy_score(labels, decided[0]))
    assert scores["macro_f1"] == pytest.approx(f1_score(labels, decided[0.5], average="macro"))
    assert scores["nll"] == pytest.approx(log_loss(labels, logits.double().softmax(1)), rel=1e-5)
    rows = torch.from_numpy(several_labels(data[1]))
    scores = exact_head.score_logits(build_head("bce", rows.numpy()), logits, rows)
    assert scores["macro_f1"] == pytest.approx(f1_score(rows, logits > 0, average="macro"))
    nll = sum(log_loss(rows[:, c], logits[:, c].sigmoid()) for c in range(4))
    assert scores["nll"] == pytest.approx(nll, rel=1e-5)


@pytest.mark.parametrize("label", [0, 1])
def test_a_label_that_does_not_vary_outside_of_a_fold_gets_its_prior_there(data, label):
    fold, labels = np.arange(99) % 5, several_labels(data[1])
    labels[:, 1] = np.where(fold == 0, 1 - label, label)
    head = fit_exact_head(data[0], labels, loss="bce", folds=fold)
    found = head.out_of_fold[torch.from_numpy(fold == 0), 1].sigmoid()
    torch.testing.assert_close(found, torch.full_like(found, labels[:, 1].mean()))


@pytest.mark.parametrize("done", [1, 2, 5])
def test_an_interrupted_path_continues_to_the_same_bits(data, tmp_path, done):
    whole = fit_exact_head(*data, loss="bal_ce")
    rows = []

    def stop(row):
        rows.append(row)
        if len(rows) == done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_exact_head(*data, loss="bal_ce", cache=tmp_path, callback=stop)
    later = []
    head = fit_exact_head(*data, loss="bal_ce", cache=tmp_path, callback=later.append)
    assert rows + later == head.path == whole.path
    for name in ("weight", "bias", "out_of_fold"):
        assert torch.equal(getattr(head, name), getattr(whole, name))
    again = []
    fit_exact_head(*data, loss="bal_ce", cache=tmp_path, callback=again.append)
    assert again == []  # the whole path is there


@pytest.mark.parametrize("change", ["nothing", "loss", "fold", "features", "labels", "strengths", "damage"])
def test_only_the_whole_state_of_the_same_problem_is_taken(data, tmp_path, change):
    features, labels = data
    problem = {"features": features, "labels": labels, "loss": "bal_ce", "folds": np.arange(99) % 5}
    fit_exact_head(**problem, cache=tmp_path)
    changes = {
        "loss": {"loss": "ce"},
        "fold": {"folds": np.arange(99)[::-1] % 5},
        "features": {"features": features + np.float32(0.5) * (np.arange(99) == 0)[:, None]},
        "labels": {"labels": np.roll(labels, 1)},  # as many of each class
        "strengths": {"strengths": [1.0, 0.1]},
    }
    if change == "damage":
        (state,) = tmp_path.iterdir()
        state.write_bytes(state.read_bytes()[:100])
    rows = []
    fit_exact_head(**problem | changes.get(change, {}), cache=tmp_path, callback=rows.append)
    assert bool(rows) == (change != "nothing")


def test_features_in_a_file_are_read_in_blocks_to_the_same_head(data, tmp_path, monkeypatch):
    features, labels = data
    expected = fit_exact_head(features, labels, loss="bal_bce", strengths=[0.1])
    np.save(tmp_path / "features.npy", features)
    monkeypatch.setattr(head_solver, "_IN_MEMORY", 300)
    head = fit_exact_head(np.load(tmp_path / "features.npy", mmap_mode="r"), labels, loss="bal_bce", strengths=[0.1])
    torch.testing.assert_close(head.weight, expected.weight, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(head.out_of_fold, expected.out_of_fold, atol=0.05, rtol=0)


@pytest.mark.parametrize(
    ("change", "argument", "value"),
    [
        ({"loss": "ldam"}, "loss", "ldam"),
        ({"select": "auroc"}, "select", "auroc"),
        ({"features": np.full((99, 12), np.nan)}, "features", "NaN"),
        ({"features": np.zeros(99)}, "features", "(99,)"),
        ({"groups": np.zeros(99)}, "folds", "groups"),
    ],
)
def test_exact_head_rejects(data, change, argument, value):
    with refusal(argument, value):
        fit_exact_head(**{"features": data[0], "labels": data[1]} | change)
