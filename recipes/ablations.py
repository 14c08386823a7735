"""The paper's ablations: what varies in each, and the table and plot its results make."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from livt_hf.cli.training_settings import FinetuneSettings
from livt_hf.hub.paper import paper_table
from livt_hf.long_tail.loss_table import LOSSES
from livt_hf.predictions.rules import ARGMAX, UNIFORM
from livt_hf.results import Results

REPORTED = ("accuracy", "many", "medium", "few", "ece")


@dataclass(frozen=True)
class Variant:
    """One row of an ablation: options of either stage over the base configs. `pretrain` None trains from scratch."""

    label: str
    finetune: dict = field(default_factory=dict)
    pretrain: dict | None = field(default_factory=dict)
    # What names this row in the sweep's tables of the paper, beside the settings of the run; empty: it is not there.
    paper: dict = field(default_factory=dict)
    # By dataset: the config of the second stage that takes the place of the dataset's own.
    configs: dict[str, str] = field(default_factory=dict)
    # The variant whose fine-tuned model this one goes on from, in place of a pretraining.
    start: "Variant | None" = None
    # Whether its own pretraining is run even where the others start from a given checkpoint.
    from_own_images: bool = False


@dataclass(frozen=True)
class Sweep:
    title: str
    variants: list[Variant]
    axis: str = "variant"
    tables: tuple[str, ...] = ()
    compares_losses: bool = False  # any other loss may be a variant too


_HARD = {"mixup": 0, "cutmix": 0}  # for what is defined for hard labels only
_FROZEN = _HARD | {"erase": 0}  # features of a frozen backbone cannot be mixed


def loss_variant(name: str) -> Variant:
    """Return the variant that trains with a loss; one that needs hard labels gets neither mixup nor cutmix."""
    return Variant(name, {"loss": name} | ({} if LOSSES[name].soft_labels else _HARD), paper={"loss": name})


def _values(option: str, values: list[float], stage: str = "finetune", **fixed) -> list[Variant]:
    return [Variant(f"{value:g}", **{stage: {option: value} | fixed}) for value in values]


def _sizes(sizes: list[str], losses: list[str]) -> list[Variant]:
    """Return variants of every size with every loss. The config of ViT-B is the dataset's own."""
    return [
        Variant(
            f"{size}, {loss}",
            {"model_size": size, "loss": loss},
            {"model_size": size},
            {"method": "LiVT"},
            {} if size == "base" else {"imagenet-lt": f"finetune-imagenet-lt-{size}"},
        )
        for size in sizes
        for loss in losses
    ]


def _recipe(method: str, finetune: dict, pretrain: dict | None, configs: dict[str, str]) -> Variant:
    return Variant(method, finetune, pretrain, {"method": method}, configs)


def _at_384(method: str, finetune: dict, **first) -> Variant:
    """Return a recipe at 384 pixels: its second stage or, where it has one stage, a fine-tuning of its model."""
    configs = {data: f"finetune-{data}-384" for data in ("imagenet-lt", "inat18", "places-lt")}
    paper = {"method": method}
    return Variant(f"{method}, 384", {"image_size": 384} | finetune, paper=paper, configs=configs, **first)


_TAUS = [0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
_LAMBDAS = [1.0, 2.0, 3.0, 4.0, 5.0]
# What makes a recipe on data for which the paper has no row, and so no config: as in the configs named below.
_VIT = {"loss": "ce", "layer_decay": 1.0, "pooling": "cls"}
_DEIT = {"loss": "bce", "augmentation": "three_augment", "optimizer": "lamb", "layer_decay": 1.0, "pooling": "cls"}
_DEIT |= {"erase": 0, "clip_grad": 1.0, "adam_beta2": 0.999, "weight_decay": 0.02}
_SCRATCH = ("imagenet-lt", "imagenet-bal", "imagenet-1k", "inat18")
VIT = _recipe("ViT", _VIT, None, dict.fromkeys(_SCRATCH, "finetune-imagenet-lt-vit"))
DEIT = _recipe("DeiT III", _DEIT, None, dict.fromkeys(_SCRATCH, "finetune-imagenet-lt-deit3"))
MAE = _recipe("MAE", {"loss": "ce"}, {}, {"imagenet-lt": "finetune-imagenet-lt-mae"})
LIVT = _recipe("LiVT", {"loss": "bal_bce"}, {}, {})
_1K = {"dataset": "imagenet-1k"}
DEIT_1K = Variant("DeiT III on ImageNet-1K", _DEIT | _1K, None, configs=DEIT.configs)
# As many images as ImageNet-LT has: that long-tailed and balanced data transfer alike is a claim about equal numbers.
_TRANSFERRED = {
    "BAL": {"dataset": "imagenet-bal", "images_per_class": 116},
    "LT": {"dataset": "imagenet-lt"},
}

SWEEPS: dict[str, Sweep] = {
    "losses": Sweep(
        "The proposed bias on CE and BCE",
        [loss_variant(name) for name in ("ce", "bal_ce", "bce", "bal_bce")],
        "loss",
        ("bias-ablation",),
        compares_losses=True,
    ),
    "rebalancing": Sweep(
        "Rebalancing strategies",
        [
            *map(loss_variant, "ce cb_ce cb_bce focal ldam lade ib nt_bce bal_ce bal_bce".split()),
            # Not in the paper, but expected beside it: Kang et al.'s sampling and cRT, and LDAM as Cao et al. have it.
            Variant("ce, balanced sampling", {"loss": "ce", "sampler": "balanced"}),
            Variant("cRT", {"tune": "head", "loss": "ce", "sampler": "balanced"} | _FROZEN, start=loss_variant("ce")),
            Variant("ldam, DRW", {"loss": "ldam", "normalised_classifier": True, "drw_start": 0.8}),
        ],
        "loss",
        ("loss-on-vit",),
        compares_losses=True,
    ),
    "sizes": Sweep(
        "Model sizes",
        _sizes(["tiny", "small", "base", "large"], ["ce", "bal_ce", "bce", "bal_bce"]),
        "size, loss",
        ("bias-ablation",),
    ),
    "bias": Sweep(
        "Which theorem's bias a BCE gets",
        [Variant("none", {"loss": "bce"}), *(Variant(name, {"bias": name}) for name in ("ce", "bce"))],
        "bias",
    ),
    "tau": Sweep("Strength of the bias", [Variant("0", {"loss": "bce"}), *_values("tau", _TAUS)], "tau"),
    "nt_lambda": Sweep("Negative-tolerant BCE", _values("nt_lambda", _LAMBDAS, loss="nt_bce"), "lambda"),
    "bal_nt_lambda": Sweep("Negative-tolerant Bal-BCE", _values("nt_lambda", _LAMBDAS, loss="bal_nt_bce"), "lambda"),
    "head_start": Sweep(
        "Where the classifier starts",
        [
            Variant(f"{loss}, {start}", {"loss": loss, "head_start": start})
            for loss in ("bce", "bal_bce")
            for start in ("prior", "zero")
        ],
    ),
    "optimizer": Sweep(
        "Which optimizer fine-tunes", [Variant(name, {"optimizer": name}) for name in ("adamw", "muon")], "optimizer"
    ),
    "recipes": Sweep(
        "Training recipes",
        [VIT, DEIT, MAE, LIVT],
        "recipe",
        ("performance-imagenet-lt", "performance-iNat", "pretrain-recips"),
    ),
    "resolution": Sweep(
        "Training recipes at a higher resolution",
        [
            VIT,
            DEIT,
            MAE,
            LIVT,
            _at_384("ViT", {"loss": "ce", "pooling": "cls"}, start=VIT),
            _at_384("DeiT III", {"loss": "bce", "pooling": "cls"}, start=DEIT),
            _at_384("MAE", {"loss": "ce"}),
            _at_384("LiVT", {}),
        ],
        "recipe, pixels",
        ("resolution", "performance-imagenet-lt", "performance-iNat"),
    ),
    "places": Sweep(
        "Training recipes after a pretraining on ImageNet-1K",
        [
            Variant("DeiT III", {"loss": "bce", "pooling": "cls"}, paper={"method": "DeiT III"}, start=DEIT_1K),
            _recipe("MAE", {"loss": "ce"}, _1K, {}),
            _recipe("LiVT", {"loss": "bal_bce"}, _1K, {}),
            _at_384("LiVT", {}, pretrain=_1K),
        ],
        "recipe",
        ("performance-place",),
    ),
    "deit_bias": Sweep(
        "The proposed bias on DeiT III",
        [
            Variant(
                loss,
                _DEIT | {"loss": loss},
                None,
                {"method": "DeiT III"},
                {"imagenet-lt": "finetune-imagenet-lt-deit3-balbce"},
            )
            for loss in ("bce", "bal_bce")
        ],
        "loss",
        ("deit-bal",),
    ),
    "stages": Sweep(
        "What each stage adds",
        [
            Variant("MGP, then Bal-BCE"),
            Variant("MGP, then BCE", {"loss": "bce"}),
            Variant("from scratch, Bal-BCE", {"layer_decay": 1.0}, None),
        ],
        "training",
    ),
    "transfer": Sweep(
        "Pretraining data: long-tailed against balanced",
        [
            Variant(f"{data}, {loss}", {"loss": loss}, pretrain, {"pretrain_dataset": pretrain["dataset"]})
            for loss in ("ce", "bal_bce")
            for data, pretrain in _TRANSFERRED.items()
        ],
        "pretraining data, loss",
        ("performance-transfer",),
    ),
    "mask_ratio": Sweep("Mask ratio", _values("mask_ratio", [0.25, 0.5, 0.75, 0.9], "pretrain"), "mask ratio"),
    "decode_ratio": Sweep("Decoded share", _values("decode_ratio", [1.0, 0.5, 0.25], "pretrain"), "decode ratio"),
}


def paper_rows(sweep: Sweep, variant: Variant, run: FinetuneSettings, pretrained_on: str | None) -> list[dict]:
    """Return the paper's rows for a run of these settings, pretrained on a dataset, None if unknown.

    A recipe stands beside the paper's number only where it is the paper's: its size, resolution and pretraining data
    agree. Losses are also compared at other sizes: with the paper's ViT-B, which the table then names.
    """
    if not variant.paper:
        return []
    size, pixels = run.model.model_size, run.model.image_size or 224
    same = variant.paper | {"dataset": run.data.dataset}
    rows = [
        row
        for table in sweep.tables
        for row in paper_table(table)
        if all(row.get(key) == value for key, value in same.items())
        and row.get("loss") in (None, run.loss.loss)
        and row.get("imbalance_factor") in (None, run.data.imbalance_factor)
    ]
    exact = [
        row
        for row in rows
        if (row["model_size"], row["image_size"]) == (size, pixels)
        and pretrained_on in (None, row.get("pretrain_dataset", run.data.dataset))
    ]
    other_size = [row for row in rows if (row["model_size"], row["image_size"]) == ("base", 224)]
    return exact or (other_size if "loss" in variant.paper else [])


def summarise(
    results: dict[str, list[Results]],
    paper: Callable[[str], dict | None] = lambda _: None,
    pretraining: dict[str, list[Results]] | None = None,
) -> list[dict]:
    """Return one row per variant: mean and std (percent) over its seeds, and the paper's numbers where it has them.

    `pretraining` holds the first stages of the runs, given where the variants differ in them.
    """
    rows = []
    for label, runs in results.items():
        row = {"variant": label, "seeds": len(runs)}
        measured = [run.rules.get(ARGMAX, run.metrics) for run in runs]  # as the paper measures
        for name in REPORTED:
            values = [100 * metrics[name] for metrics in measured if metrics.get(name) is not None]
            row[name] = statistics.fmean(values) if values else None
            row[f"{name}_deviation"] = statistics.stdev(values) if len(values) > 1 else None
        posterior = [100 * run.rules[UNIFORM]["accuracy"] for run in runs if UNIFORM in run.rules]
        row["posterior_accuracy"] = statistics.fmean(posterior) if posterior else None
        row["minutes"] = statistics.fmean(run.seconds / 60 for run in runs)
        first = pretraining[label] if pretraining else []
        row["pretrain_minutes"] = statistics.fmean(run.seconds / 60 for run in first) if first else None
        row["paper"] = paper(label)
        rows.append(row)
    return rows


def table_rows(rows: list[dict]) -> list[dict]:
    """Return the summary as a table of text: `mean ± std`, the paper's overall accuracy beside."""

    def cell(row: dict, name: str) -> str:
        if row[name] is None:
            return "-"
        deviation = row[f"{name}_deviation"]
        return f"{row[name]:.1f}" + (f" ± {deviation:.1f}" if deviation is not None else "")

    table = []
    for row in rows:
        line = {"variant": row["variant"]} | {name: cell(row, name) for name in REPORTED}
        posterior = row["posterior_accuracy"]
        line |= {"posterior rule": "-" if posterior is None else f"{posterior:.1f}", "seeds": row["seeds"]}
        if any(other.get("pretrain_minutes") for other in rows):
            minutes = row.get("pretrain_minutes")
            line["MGP, minutes"] = "-" if minutes is None else f"{minutes:.1f}"
        if any(other["paper"] for other in rows):
            paper = row["paper"]
            line["paper"] = f"{paper['accuracy']} (ViT-{paper['model_size'][0].upper()})" if paper else "-"
        table.append(line)
    return table
