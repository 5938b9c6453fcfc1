"""What every method's configuration shares: it checks itself and its neighbours before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from embedlab.encoders.normalization import PREPARATIONS
from embedlab.errors import UserError

if TYPE_CHECKING:
    from embedlab.config.backbone import BackboneInfo
    from embedlab.config.pooling import PoolingConfig
    from embedlab.config.run import RunConfig
    from embedlab.config.template import Template


def check_tau(tau: float) -> None:
    """UserError for a temperature that divides by nothing."""
    if not tau > 0:
        raise UserError("the temperature must be positive", key="method.tau", value=tau)


def check_eval_text(name: str, key: str = "eval_text") -> None:
    """UserError for a preparation that there is not."""
    if name not in PREPARATIONS:
        known = ", ".join(PREPARATIONS)
        raise UserError("unknown preparation", key=f"method.{key}", value=name, fix=known)


@dataclass(frozen=True)
class MethodConfig:
    name: str

    @property
    def preparation(self) -> str:
        """How a text is prepared when it is encoded after training (`embedlab.encoders.normalization`)."""
        return "raw"

    @property
    def idle(self) -> bool:
        """Whether there is nothing to train: the encoder is exported and scored as it is."""
        return False

    @property
    def towers(self) -> int:
        """Encoders that the result is made of."""
        return 1

    @property
    def needs_others(self) -> bool:
        """Whether the loss compares a sentence with others of its batch, so that one alone teaches nothing."""
        return hasattr(self, "tau")

    def check(
        self, info: BackboneInfo, pooling: PoolingConfig, template: Template | None, data: str, in_views: bool
    ) -> list[str]:
        """Reject a combination that has no meaning (``UserError``); return warnings for those known to be poor.

        Args:
            info: of the backbone.
            pooling: of the encoder.
            template: around each sentence, if any.
            data: name of the data module: ``wikipedia``, ``nli`` or ``parallel``.
            in_views: unused by most; True when the data is packed running text.
        """
        return []

    def check_run(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        """The same for what only the whole run shows, such as lengths; after `check`."""
        return []
