"""One small LightningModule a paper. Adding a method: its file, a line here, `conf/method/<name>.yaml`, a test."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from embedlab.errors import UserError

if TYPE_CHECKING:
    from embedlab.config.method import MethodConfig
    from embedlab.engine.module import Method

METHODS: dict[str, str] = {
    "simcse": "embedlab.methods.simcse:SimCSE",
    "jtcse": "embedlab.methods.jtcse:JTCSE",
    "tncse": "embedlab.methods.jtcse:TNCSE",
    "distil": "embedlab.methods.distil:Distil",
    "ensemble": "embedlab.methods.ensemble:Ensemble",
    "promptbert": "embedlab.methods.promptbert:PromptBERT",
    "bepa": "embedlab.methods.bepa:BEPA",
    "masked_lm": "embedlab.methods.masked_lm:MaskedLM",
    "causal_lm": "embedlab.methods.causal_lm:CausalLM",
    "csesfp": "embedlab.methods.csesfp:CSESFP",
    "prompteol": "embedlab.methods.prompteol:PromptEOL",
}


def method_class(name: str) -> type[Method]:
    """The module of a method by its configuration name."""
    if name not in METHODS:
        raise UserError("unknown method", key="method.name", value=name, fix=", ".join(METHODS))
    module, _, attribute = METHODS[name].partition(":")
    return getattr(import_module(module), attribute)


def method_config(values: dict[str, Any]) -> MethodConfig:
    """The typed configuration of a method from plain values."""
    from embedlab.config.build import from_dict, section

    section(values, "method")
    return from_dict(method_class(values.get("name", "")).config_class, values, "method")
