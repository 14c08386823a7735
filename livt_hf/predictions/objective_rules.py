"""The decision rule for an objective: the posterior under pi^t, with the exponent stored or chosen on a record."""

import torch
from torch import Tensor

from livt_hf.errors import LiVTError
from livt_hf.long_tail.objectives import choose_exponents
from livt_hf.long_tail.priors import class_prior, tempered_prior
from livt_hf.predictions.blocks import Source, read_groups
from livt_hf.predictions.record import Predictions, PredictionsInfo
from livt_hf.predictions.rules import GIVEN, DecisionRule, deployment_label


def rule_for_objective(info: PredictionsInfo, objective: str, validation: Source | None = None) -> DecisionRule:
    """Return the posterior rule under the prior pi^t for an objective.

    Args:
        info: of the predictions to decide on. The exponent is the one stored with its model's calibration.
        objective: a name of `livt_hf.long_tail.objectives.OBJECTIVES`.
        validation: a labelled record of images that the model was not trained on, and that nothing is measured on, to
            choose the exponent on instead.

    Returns:
        The rule.
    """
    settings = info.long_tail
    if info.multi_label or info.no_posterior is not None:
        reason = info.no_posterior or "an image may have several labels"
        raise LiVTError(f"objective {objective} needs class probabilities ({reason}); leave it out.", "objective")
    if settings is None:
        raise LiVTError(f"objective {objective} is chosen for one model; decide on its folds one by one.", "objective")
    prior = class_prior(settings.class_counts, settings.num_images)
    if validation is not None:
        exponent = _choose_on(validation, info, prior, objective)
    elif settings.trade_off is None:
        raise LiVTError(
            f"objective {objective} has no exponent, for the model is not calibrated on images that it was not "
            "trained on; calibrate it (livt calibrate), or name a labelled record of such images with choose_on.",
            argument="objective",
        )
    else:
        exponent = settings.trade_off["exponents"][objective]
    label = f"{deployment_label(objective)}, pi^{exponent:g}"
    return DecisionRule(GIVEN, label, tuple(tempered_prior(prior, exponent).tolist()))


def _choose_on(validation: Source, info: PredictionsInfo, prior: Tensor, objective: str) -> float:
    """Choose an exponent on a labelled record, which must be no test set."""
    record = validation if isinstance(validation, Predictions) else Predictions.load(validation)
    split = record.column("split")
    if record.labels is None or (record.labels < 0).any():
        raise LiVTError("choose_on needs a label of every image; name a labelled record.", "choose_on")
    if split is not None and "test" in split:
        raise LiVTError("choose_on has images of the split test; choose on others, such as validation.", "choose_on")
    if record.info.class_names != info.class_names:
        raise LiVTError("choose_on has other classes; name a record of the same model.", "choose_on")
    log_posterior = torch.from_numpy(record.posterior("training")).log()
    labels, groups = torch.from_numpy(record.labels), read_groups(record)
    return choose_exponents(log_posterior, labels, prior, [objective], groups=groups)[objective].exponent
