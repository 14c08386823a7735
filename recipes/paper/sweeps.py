"""The paper's ablations: what varies in each, and the table and plot its results make."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from livt_hf.hub.paper import paper_table
from livt_hf.results import Results
from livt_hf.settings import FinetuneSettings

REPORTED = ("accuracy", "many", "medium", "few", "ece")


@dataclass(frozen=True)
class Variant:
    """One row of an ablation: options of either stage over the base configs. `pretrain` None trains from scratch."""

    label: str
    finetune: dict = field(default_factory=dict)
    pretrain: dict | None = field(default_factory=dict)
    # Where the paper has this row: what to look for in the sweep's table.
    paper: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    title: str
    variants: list[Variant]
    axis: str = "variant"
    table: str | None = None


def _losses(names: list[str], **extra) -> list[Variant]:
    hard = {"mixup": 0, "cutmix": 0}
    return [
        Variant(name, {"loss": name} | (hard if name in ("lade", "ib") else {}) | extra, paper={"loss": name})
        for name in names
    ]


def _values(option: str, values: list[float], stage: str = "finetune", **fixed) -> list[Variant]:
    return [Variant(f"{value:g}", **{stage: {option: value} | fixed}) for value in values]


_TAUS = [0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
_LAMBDAS = [1.0, 2.0, 3.0, 4.0, 5.0]
_DEIT = {"loss": "bce", "augmentation": "three_augment", "optimizer": "lamb", "layer_decay": 1.0, "pooling": "cls"}
_DEIT |= {
    "erase": 0,
    "clip_grad": 1.0,
    "adam_beta2": 0.999,
    "weight_decay": 0.02,
}  # as finetune-imagenet-lt-deit3.yaml
_SCRATCH = {"layer_decay": 1.0}

SWEEPS: dict[str, Sweep] = {
    "losses": Sweep(
        "The proposed bias on CE and BCE", _losses(["ce", "bal_ce", "bce", "bal_bce"]), "loss", "bias-ablation"
    ),
    "rebalancing": Sweep(
        "Rebalancing strategies",
        _losses(["ce", "cb_ce", "cb_bce", "ldam", "lade", "ib", "nt_bce", "bal_ce", "bal_bce"]),
        "loss",
        "loss-on-vit",
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
    "recipes": Sweep(
        "Training recipes",
        [
            Variant("ViT", _SCRATCH | {"loss": "ce"}, None, {"method": "ViT"}),
            Variant("DeiT III", _DEIT, None, {"method": "DeiT III"}),
            Variant("MAE", {"loss": "ce"}, paper={"method": "MAE"}),
            Variant("LiVT", {"loss": "bal_bce"}, paper={"method": "LiVT"}),
        ],
        "recipe",
        "performance-imagenet-lt",
    ),
    "stages": Sweep(
        "What each stage adds",
        [
            Variant("MGP, then Bal-BCE"),
            Variant("MGP, then BCE", {"loss": "bce"}),
            Variant("from scratch, Bal-BCE", _SCRATCH, None),
        ],
        "training",
    ),
    "transfer": Sweep(
        "Pretraining data: long-tailed against balanced",
        [
            Variant(
                f"{data}, {loss}",
                {"loss": loss},
                {"dataset": f"imagenet-{data.lower()}"},
                {"pretrain_dataset": f"imagenet-{data.lower()}", "loss": loss},
            )
            for loss in ("ce", "bal_bce")
            for data in ("BAL", "LT")
        ],
        "pretraining data, loss",
        "performance-transfer",
    ),
    "mask_ratio": Sweep("Mask ratio", _values("mask_ratio", [0.25, 0.5, 0.75, 0.9], "pretrain"), "mask ratio"),
    "decode_ratio": Sweep("Decoded share", _values("decode_ratio", [1.0, 0.5, 0.25], "pretrain"), "decode ratio"),
}


def paper_row(sweep: Sweep, variant: Variant, base: FinetuneSettings) -> dict | None:
    """The paper's numbers (percent) for a variant, ViT-B at 224 where there are several."""
    if sweep.table is None or not variant.paper:
        return None
    wanted = variant.paper | {"dataset": base.dataset, "model_size": "base", "image_size": 224}
    for row in paper_table(sweep.table):
        same_tail = row.get("imbalance_factor") in (None, base.imbalance_factor)
        if same_tail and all(row.get(key) == value for key, value in wanted.items()):
            return {name: row[name] for name in REPORTED if name in row}
    return None


def summarise(
    results: dict[str, list[Results]],
    paper: Callable[[str], dict | None] = lambda _: None,
    pretraining: dict[str, list[Results]] | None = None,
) -> list[dict]:
    """One row per variant: mean and deviation (percent) over its seeds, and the paper's numbers where it has them.

    `pretraining` holds the first stages of the runs, given where the variants differ in them.
    """
    rows = []
    for label, runs in results.items():
        row = {"variant": label, "seeds": len(runs)}
        for name in REPORTED:
            values = [100 * run.metrics[name] for run in runs if run.metrics[name] is not None]
            row[name] = statistics.fmean(values) if values else None
            row[f"{name}_deviation"] = statistics.stdev(values) if len(values) > 1 else None
        posterior = [100 * run.posterior["accuracy"] for run in runs if run.posterior]
        row["posterior_accuracy"] = statistics.fmean(posterior) if posterior else None
        row["minutes"] = statistics.fmean(run.seconds / 60 for run in runs)
        first = pretraining[label] if pretraining else []
        row["pretrain_minutes"] = statistics.fmean(run.seconds / 60 for run in first) if first else None
        row["paper"] = paper(label)
        rows.append(row)
    return rows


def table_rows(rows: list[dict]) -> list[dict]:
    """The summary as people read it: `mean ± deviation`, the paper's overall accuracy beside."""

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
            line["paper (ViT-B)"] = row["paper"]["accuracy"] if row["paper"] else "-"
        table.append(line)
    return table
