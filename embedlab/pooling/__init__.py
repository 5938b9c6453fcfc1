"""Hidden states to one vector a sentence. Adding a pooling: its file, `conf/pooling/<name>.yaml`, a test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from embedlab.config.backbone import BackboneInfo
from embedlab.config.build import from_dict, section
from embedlab.config.pooling import PoolingConfig
from embedlab.parts import part_class
from embedlab.pooling.base import Marks, Pooling

__all__ = ["Marks", "Pooling", "PoolingConfig", "build_pooling", "pooling_class", "pooling_config"]


def pooling_class(name: Any) -> type[Pooling]:
    """The module of a pooling by its configuration name.

    Raises:
        UserError: there is no such pooling; with the nearest name.
    """
    cls: type[Pooling] = part_class("pooling", name, Pooling, "pooling")
    return cls


def pooling_config(values: Mapping[str, Any] | str) -> PoolingConfig:
    """The typed settings of a pooling, from plain ones (``{"name": "mean"}``) or its name alone.

    Raises:
        UserError: an unknown pooling or key, with the nearest known one.
    """
    values = {"name": values} if isinstance(values, str) else dict(section(values, "pooling"))
    return from_dict(pooling_class(values.get("name")).config_class, values, "pooling")


def build_pooling(config: Mapping[str, Any] | str | PoolingConfig, info: BackboneInfo) -> Pooling:
    """The pooling of a configuration, on a backbone of this shape; new weights, where it has any."""
    if not isinstance(config, PoolingConfig):
        config = pooling_config(config)
    return pooling_class(config.name)(config, info)
