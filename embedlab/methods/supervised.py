"""Training on one's own data: pairs, triplets, scored pairs or labelled texts, each by an objective for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor, nn

from embedlab.config.backbone import BackboneInfo
from embedlab.config.data import DataConfig, kind_name
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.run import RunConfig
from embedlab.encoders.base import Encoder
from embedlab.engine.module import Batch, LossOutput
from embedlab.errors import UserError, one_of
from embedlab.methods.simcse import encode_views
from embedlab.methods.supervised_losses import OBJECTIVES, LossConfig, Step
from embedlab.methods.teachers import TaughtMethod, load_teacher

Objective = Literal["in_batch", "cosent", "angle", "gist", "multi_positive", "sigmoid", "margin_mse", "kl"]
_PAIRS = ("pairs", "triplets", "nli", "parallel")
TAKES: dict[str, tuple[str, ...]] = {
    "in_batch": _PAIRS,
    "cosent": ("scored",),
    "angle": ("scored", "triplets", "nli"),
    "gist": _PAIRS,
    "multi_positive": ("labelled", "pairs", "parallel"),
    "sigmoid": _PAIRS,
    "margin_mse": ("triplets",),
    "kl": ("triplets",),
}
"""The kinds of data that have what an objective compares."""
_SOFTMAX: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("in_batch", "gist", "multi_positive"), ()), "angle": ("in_batch_weight",),
    **dict.fromkeys(("margin_mse", "kl"), ("add_in_batch",)),
}  # fmt: skip
_READ: tuple[tuple[str, dict[str, tuple[str, ...]]], ...] = (
    ("tau", _SOFTMAX),
    ("mask_duplicates", _SOFTMAX | {"sigmoid": ()}),
    ("gather_negatives", _SOFTMAX | dict.fromkeys(("sigmoid", "cosent", "angle"), ())),
    ("hard_negative_weight directions hardness", {"in_batch": ()}),
    ("hardness_strength", {"in_batch": ("hardness",)}),
    ("guide cached margin anchors positives", {"gist": ()}),
    ("margin_kind", {"gist": ("margin",)}),
    ("cosent_weight in_batch_weight angle_weight", {"angle": ()}),
    ("positive_from", {"angle": ("in_batch_weight",)}),
    ("scale", {"cosent": (), "angle": ("cosent_weight", "angle_weight")}),
    ("score_scale add_in_batch", {"margin_mse": (), "kl": ()}),
    ("temperature", {"kl": ()}),
)
READS = {key: readers for keys, readers in _READ for key in keys.split()}
"""The objectives that read a key, each with the keys one of which has to be on for that; what is not here all do."""
_NEGATIVES = ("triplets", "nli")
_ONLY_OF = {
    "positive_from": ("scored",),
    "hard_negative_weight": _NEGATIVES,
    "hardness=hard": _NEGATIVES,
}
"""The kinds of data that have what a key, or a value of it, is about, where not all of the objective's have."""
_LACKS = {"cosent": "score", "multi_positive": "label", "margin_mse": "scores", "kl": "scores"}


@dataclass(frozen=True)
class SupervisedConfig(LossConfig):
    kinds: ClassVar[tuple[str, ...]] = (*_PAIRS, "scored", "labelled")
    draws_dims: ClassVar[bool] = True

    name: str = "supervised"
    objective: Objective = "in_batch"
    """What the texts of a row are to satisfy; which kinds of data have what it compares: docs/your-own-data.md."""

    @property
    def can_unpad(self) -> bool:  # type: ignore[override]
        """Without a guide in the step: its own tokens would be counted with those of the trained views, which share one
        budget."""
        return self.guide is None or self.cached

    @property
    def needs_others(self) -> bool:
        return self.objective not in ("margin_mse", "kl")

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        warnings = super().check(info, run)
        sets = [one.config for one in run.data.sets.values()] or [run.data]
        objectives = [objective_of(self, run.data, data) for data in sets]
        for objective, data in zip(objectives, sets, strict=True):
            self._check_data(objective, data)
        if self.hard_negative_weight != 0 and (self.directions != "forward" or self.hardness is not None):
            raise UserError(
                "for the plain in-batch loss", key="method.hard_negative_weight", value=self.hard_negative_weight,
                fix="0, or method.directions=forward method.hardness=null",
            )  # fmt: skip
        if not any((self.cosent_weight, self.in_batch_weight, self.angle_weight)):
            key, fix = "method.in_batch_weight", "method.in_batch_weight=1"
            raise UserError("all three terms of angle have the weight 0", key=key, value=0, fix=fix)
        self._check_read([*zip(objectives, sets, strict=True)])
        if self.objective == "angle" and self.in_batch_weight == self.cosent_weight == 0:
            warnings.append(
                "method.objective=angle alone: its similarity takes opposite vectors for equal ones, and is not"
                " symmetric; leave method.in_batch_weight=1"
            )
        return warnings

    def _check_read(self, sets: Sequence[tuple[str, DataConfig]]) -> None:
        """UserError for a key that was set and that no data set's objective reads, as the others are set."""
        for key, readers in READS.items():
            if any(self._reads(key, *one) for one in sets):
                continue
            objectives = list(dict.fromkeys(objective for objective, _ in sets))
            told, fix = _or("objective=", objectives) + " does not read it", _or("method.objective=", readers)
            if own := next((name for name in objectives if name in readers), None):
                on = self._is_on(readers[own])
                fix = _or("data=", self._only_of(key) or ()) if on else _or("method.", readers[own])
                told += f" without {fix}"
            self.refuse_unread(key, told, fix)

    def _reads(self, key: str, objective: str, data: DataConfig) -> bool:
        switches, kinds = READS[key].get(objective), self._only_of(key)
        if switches is None or (kinds is not None and kind_name(data.name) not in kinds):
            return False
        return self._is_on(switches)

    def _only_of(self, key: str) -> tuple[str, ...] | None:
        return _ONLY_OF.get(key) or _ONLY_OF.get(f"{key}={getattr(self, key)}")

    def _is_on(self, switches: Sequence[str]) -> bool:
        return not switches or any(getattr(self, switch) for switch in switches)

    def _check_data(self, objective: str, data: DataConfig) -> None:
        kind = kind_name(data.name)
        if kind not in TAKES[objective]:
            readers = [one for one, kinds in TAKES.items() if kind in kinds]
            lacks = _LACKS.get(objective, "pair of an anchor and a positive")
            raise UserError(
                f"objective={objective}: data={data.name} has no {lacks}",
                key="method.objective",
                value=objective,
                fix=f"{_or('method.objective=', readers)}, or data={' or '.join(TAKES[objective])}",
            )
        if objective in ("margin_mse", "kl") and not data.scores:
            raise UserError(
                f"objective={objective}: needs a teacher's scores", key="data.scores", fix="data.scores=true"
            )
        if objective == "gist" and not self.guide:
            raise UserError(
                "objective=gist: needs method.guide",
                key="method.guide",
                fix="method.guide=FOLDER of an encoder",
            )

    def of(self, objective: str | None) -> SupervisedConfig:
        """The same for an objective (None: the method's own), with its temperature in numbers."""
        objective = objective or self.objective
        usual = 0.01 if objective == "gist" else 0.05
        tau = usual if self.tau is None else self.tau
        return replace(self, objective=cast("Objective", objective), tau=tau)

    def why_not_captured(self, data: DataConfig) -> str | None:
        """Why a captured step cannot compute it."""
        if self.matryoshka.dims_per_step != -1:
            return "has one course, and method.matryoshka.dims_per_step draws the dims of each"
        own = {objective_of(self, data, one.config) for one in data.sets.values()}
        return (
            "has the method's objective, and sets of this mix have others" if own - {self.objective} else None
        )


def _or(start: str, names: Iterable[str]) -> str:
    return f"{start}{' or '.join(names)}"


def objective_of(config: SupervisedConfig, data: DataConfig, one: DataConfig) -> str:
    """The objective of a data set: of a mix its own, where it has one.

    Raises:
        UserError: a name of none.
    """
    for name, each in data.sets.items():
        if each.config is one and each.objective is not None:
            if each.objective not in get_args(Objective):
                raise UserError(
                    "no such objective", key=f"data.mix.{name}.objective", value=each.objective,
                    fix=one_of(each.objective, get_args(Objective)),
                )  # fmt: skip
            return each.objective
    return config.objective


class Supervised(TaughtMethod):
    """The views of a row, encoded in one pass, and the objective of the data set that the batch is of."""

    config_class = SupervisedConfig
    config: SupervisedConfig

    def __init__(
        self,
        encoder: Encoder,
        config: SupervisedConfig,
        optimizer: OptimizerConfig,
        guide: Encoder | None = None,
        objectives: Mapping[str, str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(encoder, config, optimizer)
        self.objectives = dict(objectives or {})
        """Of the data sets of a mix that have one of their own."""
        self.seed = seed
        used = {*self.objectives.values()} or {config.objective}
        self._configs = {name: config.of(name) for name in used}
        if "sigmoid" in used:  # the first values of the paper
            self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))
            self.bias = nn.Parameter(torch.tensor(-10.0))
        self.teach_by([] if guide is None else [guide], config.cached)

    @classmethod
    def from_run(cls, run: RunConfig, tokenizer: Any = None) -> Supervised:
        config = cast("SupervisedConfig", run.method)
        objectives = {name: objective_of(config, run.data, one.config) for name, one in run.data.sets.items()}
        guided = "gist" in (objectives.values() if objectives else [config.objective])
        guide = load_teacher(str(config.guide), "method.guide") if guided else None
        return cls(cls.make_encoder(run, tokenizer), config, run.optimizer, guide, objectives, run.seed)

    def objective(self, data_set: str) -> str:
        """Of a set of a mix its own, where it has one."""
        return self.objectives.get(data_set, self.config.objective)

    def is_taught(self, data_set: str) -> bool:
        return self.objective(data_set) == "gist"

    def losses(self, batch: Batch) -> LossOutput:
        objective = self.objective(batch.get("data_set", ""))
        config = self._configs[objective]
        config = replace(config, matryoshka=config.matryoshka.drawn(self.seed, self.global_step))
        names = view_names(batch)
        views = [batch[name] for name in names]
        step = Step(
            config,
            encode_views(self.encoder, views),
            [view["hash"] for view in views],
            batch,
            lambda: list(self.teachers[0](batch, names).chunk(len(names))),
            self._learned,
        )
        output = OBJECTIVES[objective](step)
        if self._learned and objective != "sigmoid":
            # Of a mix: data-parallel training wants a gradient of every parameter in every step.
            name, loss = next(iter(output.losses.items()))
            output.losses[name] = loss + 0.0 * sum(self._learned)
        return output

    @property
    def _learned(self) -> tuple[Tensor, ...]:
        """Logarithm of the scale, and bias, of the sigmoid objective; () where no set has it."""
        return (self.log_scale, self.bias) if hasattr(self, "log_scale") else ()


def view_names(batch: Mapping[str, Any]) -> list[str]:
    """The views of a batch: anchor, positive and negatives by their numbers; or first and second; or the text."""
    first = [name for name in ("anchor", "source", "first", "text") if name in batch]
    second = [name for name in ("positive", "target", "second") if name in batch]
    negatives = [name for name in batch if name.partition("_")[0] == "negative"]
    return first + second + sorted(negatives, key=lambda name: int(name.partition("_")[2] or 1))
