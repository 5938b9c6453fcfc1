"""The sections of a configuration that are checked without torch, which takes seconds to load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from embedlab.config.backbone import BackboneConfig
from embedlab.config.build import from_dict
from embedlab.config.trainer import CallbacksConfig, LoggerConfig, ScoringConfig, TrainerConfig
from embedlab.data.kinds import data_config
from embedlab.errors import UserError

_CLASSES = {
    "backbone": BackboneConfig,
    "trainer": TrainerConfig,
    "logger": LoggerConfig,
    "callbacks": CallbacksConfig,
    "evaluation": ScoringConfig,
}


def light_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those sections of a composed configuration, typed, by name.

    Raises:
        UserError: one is missing; an unknown key or a value out of range.
    """
    for name in ("data", *_CLASSES):
        if name not in values:
            raise UserError("a section of the configuration is missing", key=name)
    typed: dict[str, Any] = {name: from_dict(cls, values[name], name) for name, cls in _CLASSES.items()}
    return typed | {"data": data_config(values["data"])}
