"""A composed configuration, read once: the shared sections without torch, then the method's and the pooling's own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

from embedlab.config.adapter import AdapterConfig
from embedlab.config.backbone import BackboneConfig
from embedlab.config.build import check_values, from_dict, section
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.run import RunConfig
from embedlab.config.template import Template
from embedlab.config.trainer import CallbacksConfig, LoggerConfig, ScoringConfig, TrainerConfig
from embedlab.data.kinds import data_config
from embedlab.errors import UserError, nearest
from embedlab.parts import part_record

_SHARED: dict[str, Any] = {
    "backbone": BackboneConfig,
    "trainer": TrainerConfig,
    "logger": LoggerConfig,
    "callbacks": CallbacksConfig,
    "evaluation": ScoringConfig,
    "adapter": AdapterConfig,
    "optimizer": OptimizerConfig,
}


def parse_shared(values: Mapping[str, Any]) -> dict[str, Any]:
    """The sections that every run has, typed, by the names of `RunConfig`; torch, which takes seconds, is not loaded.
    Method and pooling are as their files' text has them, or None.

    Raises:
        UserError: a section is missing; an unknown key or a value out of range.
    """
    # A key that no section resembles is a variable of an experiment's file, such as `arm`.
    sections = [f.name for f in fields(RunConfig) if f.name != "plain"]
    for key in values:
        near = nearest(key, sections, cutoff=0.8)
        if near and key not in (*sections, "stages"):
            raise UserError("unknown key", key=key, value=values[key], fix=f"did you mean {near[0]}?")
    for name in ("data", *_SHARED, "seed", "step", "method", "pooling"):
        if name not in values and name != "adapter":
            fix = f"{name}: and its keys, as embedlab train --cfg job prints them"
            raise UserError("a section of the configuration is missing", key=name, fix=fix)
    shared = {name: from_dict(record, values.get(name, {}), name) for name, record in _SHARED.items()}
    template = values.get("template")
    if template and section(template, "template").get("text"):
        shared["template"] = from_dict(Template, template, "template")
    else:
        shared["template"] = None
    for name, room in (("method", "methods"), ("pooling", "pooling")):
        shared[name] = _record(room, section(values[name], name), name)
    return shared | {"data": data_config(values["data"])} | _plain_values(values)


def parse_run(values: dict[str, Any], shared: Mapping[str, Any] | None = None) -> RunConfig:
    """The whole configuration.

    Args:
        values: as composed.
        shared: of `parse_shared`, where that has been read already.

    Raises:
        UserError: a missing section, an unknown key or a value out of range.
    """
    shared = parse_shared(values) if shared is None else shared
    from embedlab.methods import method_config
    from embedlab.pooling import pooling_config

    method, pooling = method_config(values["method"]), pooling_config(values["pooling"])
    return RunConfig(**{**shared, "method": method, "pooling": pooling, "plain": values})


def _record(room: str, values: Mapping[str, Any], name: str) -> Any:
    """The configuration of a part, as far as torch is not needed for it; None where it is.

    Raises:
        UserError: an unknown part or key, or a value out of range.
    """
    record = part_record(room, values.get("name"), f"{name}.name")
    if record is not None:
        with suppress(NameError):  # of what the text alone does not have
            return from_dict(record, values, name)
    return None


def _plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """What stands beside the sections."""
    # YAML has read true and false; LightningCLI hands them on as words.
    given = values.get("unpad", "auto")
    found = {
        "seed": values["seed"],
        "step": values["step"],
        "unpad": {"true": True, "false": False}.get(str(given).lower(), given),
        "ckpt_path": values.get("ckpt_path"),
    }
    check_values(RunConfig, found, "")
    return found
