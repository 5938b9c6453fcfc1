"""What every method's configuration shares: it checks itself and its neighbours before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from embedlab.errors import UserError
from embedlab.encoders.normalization import PREPARATIONS
from embedlab.config.build import build, section

if TYPE_CHECKING:
    from embedlab.backbones import BackboneInfo
    from embedlab.pooling import PoolingConfig
    from embedlab.encoders.tokenization import Template
    from embedlab.config.run import RunConfig

C = TypeVar("C")


def from_dict(cls: type[C], values: dict[str, Any], group: str) -> C:
    """Build a configuration dataclass from plain values.

    Raises:
        UserError: an unknown key, or a value of another type than its field's, by key.
    """
    section(values, group)
    known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - known)
    if unknown:
        raise UserError(f"unknown key; {group} has {', '.join(sorted(known))}", key=f"{group}.{unknown[0]}")
    return build(cls, {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}, group)


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
        """Of a text that is encoded after training, one of `embedlab.encoders.normalization`; training takes it as it is."""
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
