"""One small LightningModule a paper. Adding a method: its file, `conf/method/<name>.yaml`, a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from embedlab.config.build import from_dict, section
from embedlab.parts import part_class

if TYPE_CHECKING:
    from embedlab.config.run import MethodConfig
    from embedlab.engine.module import Method


def method_class(name: str) -> type[Method]:
    """The module of a method by its configuration name.

    Raises:
        UserError: there is no such method; with the nearest name.
    """
    from embedlab.engine.module import Method

    cls: type[Method] = part_class("methods", name, Method, "method.name")
    return cls


def method_config(values: dict[str, Any]) -> MethodConfig:
    """The typed configuration of a method from plain values.

    Raises:
        UserError: an unknown method or key, or a value of another type than its field's.
    """
    section(values, "method")
    return from_dict(method_class(values.get("name", "")).config_class, values, "method")
