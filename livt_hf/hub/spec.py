"""HubSpec: whether and how a finished run is published. Nothing here imports torch."""

from dataclasses import dataclass

from livt_hf.specs import Spec, option


@dataclass(frozen=True)
class HubSpec(Spec):
    """Hub: publish the finished run."""

    push_to_hub: bool = option(False, "publish the finished run", common=True, may_change_on_resume=True)
    hub_model_id: str | None = option(None, "organisation/name on the Hub", common=True, may_change_on_resume=True)
    hub_public: bool = option(
        False, "make the Hub repository public; without it the repository is private", may_change_on_resume=True
    )
    hub_license: str | None = option(
        None,
        "licence of the published weights, as the Hub spells it; must be named for own data and for weights that "
        "started from somebody else's checkpoint",
        common=True,
        may_change_on_resume=True,
    )
