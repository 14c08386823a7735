"""The exact head: the optimum of its loss, cross-validated without leaks, the same however it is computed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from livt_hf.errors import LiVTError
from livt_hf.long_tail.config import LongTailConfig
from livt_hf.long_tail.head import LongTailHead
from livt_hf.training import exact_head
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
    counts = labels.sum(0) if several else np.bincount(labels)
    if several:
        options |= {"num_train_images": len(labels), "test_prior": None}
    kind = "multi_label_classification" if several else "single_label_classification"
    long_tail = LongTailConfig(loss=loss, class_counts=counts.tolist(), **options)
    module = LongTailHead(SimpleNamespace(num_labels=4, problem_type=kind, long_tail=long_tail)).train()
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
    long_tail = LongTailConfig(loss=balanced, class_counts=COUNTS)
    config = SimpleNamespace(num_labels=4, problem_type="single_label_classification", long_tail=long_tail)
    torch.testing.assert_close(first.bias - second.bias, LongTailHead(config).logit_bias, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        first.out_of_fold - second.out_of_fold, LongTailHead(config).logit_bias.expand(99, -1), atol=1e-4, rtol=1e-4
    )


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


def test_a_class_of_one_image_is_learned_and_its_image_is_marked_as_unseen(data):
    features, labels = data
    labels = labels.copy()
    row = np.flatnonzero(labels == 2)[0]
    labels[row] = 4
    for loss in ("bal_ce", "bal_bce"):
        head = fit_exact_head(features, labels, loss=loss)
        assert head.weight.shape == (5, 12) and torch.isfinite(head.out_of_fold).all()
        assert head.unseen.nonzero().flatten().tolist() == [row]
        counts = np.bincount(labels).tolist()
        config = SimpleNamespace(
            num_labels=5,
            problem_type="single_label_classification",
            long_tail=LongTailConfig(loss=loss, class_counts=counts),
        )
        posterior = LongTailHead(config).training_posterior(head.out_of_fold[row]).exp()
        assert posterior[4].item() == pytest.approx(1 / 99, rel=1e-4)  # nothing is known but the prior
        assert logits_of(head, features[[row]]).argmax() == 4


def test_a_weaker_penalty_fits_closer_and_the_best_strength_is_kept(data):
    features, labels = data
    rows = []
    head = fit_exact_head(features, labels, loss="bal_ce", callback=rows.append)
    assert rows == head.path and [row["strength"] for row in rows] == sorted(
        (r["strength"] for r in rows), reverse=True
    )
    assert rows[0]["strength"] == 10 and len(rows) < len(exact_head.STRENGTHS)  # two worse ones end the path
    assert head.strength == min(rows, key=lambda row: row["nll"])["strength"]
    fitted = (
        logits_of(head, features)
        + LongTailHead(
            SimpleNamespace(
                num_labels=4,
                problem_type="single_label_classification",
                long_tail=LongTailConfig(loss="bal_ce", class_counts=COUNTS),
            )
        ).logit_bias
    )
    loss = torch.nn.functional.cross_entropy(fitted, torch.from_numpy(labels)).item()
    assert loss < min(row["nll"] for row in rows)


@pytest.mark.parametrize("select", ["accuracy", "mean_class_accuracy", "macro_f1", "balanced"])
def test_the_strength_is_the_best_by_the_selected_score(data, select):
    head = fit_exact_head(*data, loss="bal_ce", select=select)
    assert head.strength == max(head.path, key=lambda row: row[select])["strength"]


def test_several_labels(data):
    features, labels = data[0], several_labels(data[1])
    head = fit_exact_head(features, labels, loss="bal_bce")
    assert head.out_of_fold.shape == (99, 4) and not head.unseen.any()
    prior = labels.mean(0)
    chance = -(labels * np.log(prior) + (1 - labels) * np.log1p(-prior)).sum(1).mean()
    assert min(row["nll"] for row in head.path) < chance
    assert head.strength == min(head.path, key=lambda row: row["nll"])["strength"]


def test_the_same_arguments_give_the_same_bits(data):
    first, second = (fit_exact_head(*data, loss="bal_bce") for _ in range(2))
    assert torch.equal(first.weight, second.weight) and torch.equal(first.out_of_fold, second.out_of_fold)


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


def test_the_state_of_another_problem_or_a_damaged_one_is_not_taken(data, tmp_path):
    features, labels = data
    fit_exact_head(features, labels, loss="bal_ce", cache=tmp_path)
    other = features + np.float32(0.5) * (np.arange(99) == 0)[:, None]
    for change in ({"loss": "ce"}, {"loss": "bal_ce", "seed": 1}, {"loss": "bal_ce", "features": other}):
        rows = []
        fit_exact_head(**{"features": features, "labels": labels} | change, cache=tmp_path, callback=rows.append)
        assert rows
    (state,) = tmp_path.iterdir()
    state.write_bytes(state.read_bytes()[:100])
    rows = []
    fit_exact_head(features, labels, loss="ce", cache=tmp_path, callback=rows.append)
    assert rows


def test_features_in_a_file_are_read_in_blocks_to_the_same_head(data, tmp_path, monkeypatch):
    features, labels = data
    expected = fit_exact_head(features, labels, loss="bal_bce", strengths=[0.1])
    np.save(tmp_path / "features.npy", features)
    monkeypatch.setattr(exact_head, "_IN_MEMORY", 300)
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
    with pytest.raises(LiVTError) as error:
        fit_exact_head(**{"features": data[0], "labels": data[1]} | change)
    assert error.value.argument == argument and value in str(error.value)
