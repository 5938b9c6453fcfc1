"""Hidden states to one vector a sentence. A new pooling is one file here and one line in `POOLINGS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from embedlab.config.build import build, section
from embedlab.config.pooling import PoolingConfig
from embedlab.errors import UserError
from embedlab.pooling.base import Marks, Pooling
from embedlab.pooling.cls import Cls, ClsConfig
from embedlab.pooling.cls_mlp import ClsMlp, ClsMlpConfig
from embedlab.pooling.controls import (
    FeatureMix,
    FeatureMixConfig,
    LastN,
    LastNConfig,
    ScalarMix,
    ScalarMixConfig,
)
from embedlab.pooling.first_last import FirstLast, FirstLastConfig
from embedlab.pooling.last import Last, LastConfig
from embedlab.pooling.marked import (
    Rep1,
    Rep1Config,
    Rep2,
    Rep2Config,
    RepConcat,
    RepConcatConfig,
    RepMean,
    RepMeanConfig,
)
from embedlab.pooling.mask import Mask, MaskConfig
from embedlab.pooling.mean import Mean, MeanConfig
from embedlab.pooling.s2sent import S2Sent, S2SentConfig

if TYPE_CHECKING:
    from embedlab.backbones import BackboneInfo

__all__ = ["POOLINGS", "Marks", "Pooling", "PoolingConfig", "build_pooling", "pooling_config"]

POOLINGS: dict[str, tuple[type[PoolingConfig], type[Pooling]]] = {
    "cls": (ClsConfig, Cls),
    "mean": (MeanConfig, Mean),
    "last": (LastConfig, Last),
    "mask": (MaskConfig, Mask),
    "first_last": (FirstLastConfig, FirstLast),
    "cls_mlp": (ClsMlpConfig, ClsMlp),
    "rep1": (Rep1Config, Rep1),
    "rep2": (Rep2Config, Rep2),
    "rep_mean": (RepMeanConfig, RepMean),
    "rep_concat": (RepConcatConfig, RepConcat),
    "s2sent": (S2SentConfig, S2Sent),
    "last_n": (LastNConfig, LastN),
    "scalar_mix": (ScalarMixConfig, ScalarMix),
    "feature_mix": (FeatureMixConfig, FeatureMix),
}


def pooling_config(values: Mapping[str, Any] | str) -> PoolingConfig:
    """The typed settings of a pooling, from plain ones (``{"name": "mean"}``) or its name alone.

    Raises:
        UserError: an unknown pooling or key, with the nearest known one.
    """
    values = {"name": values} if isinstance(values, str) else dict(section(values, "pooling"))
    name = values.get("name")
    if name not in POOLINGS:
        near = get_close_matches(str(name), POOLINGS, n=1)
        fix = f"pooling={near[0]}" if near else f"one of {', '.join(POOLINGS)}"
        raise UserError("unknown pooling", key="pooling", value=name, fix=fix)
    cls: Any = POOLINGS[name][0]
    known = [f.name for f in fields(cls)]
    for key, value in values.items():
        if key not in known:
            raise UserError(
                f"pooling={name} has no such key",
                key=f"pooling.{key}",
                value=value,
                fix=f"one of {', '.join(known)}",
            )
    config: PoolingConfig = build(
        cls, {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}, "pooling"
    )
    return config


def build_pooling(config: Mapping[str, Any] | str | PoolingConfig, info: BackboneInfo) -> Pooling:
    """The pooling of a configuration, on a backbone of this shape; new weights, where it has any."""
    if not isinstance(config, PoolingConfig):
        config = pooling_config(config)
    return POOLINGS[config.name][1](config, info)
