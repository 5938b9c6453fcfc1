"""A run's configuration as a method's check reads it, without its files."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from embedlab.config.template import Template
from embedlab.pooling import pooling_config

ROLES = {
    "wikipedia": ("sentence",),
    "nli": ("anchor", "positive", "negative"),
    "parallel": ("source", "target"),
}


def run_of(
    data: str = "wikipedia",
    pooling: Any = "cls",
    template: Template | None = None,
    pack: int | None = None,
    max_length: int | None = 64,
    attention: str = "sdpa",
    strategy: str = "auto",
    batch_size: int = 64,
    drop_last: bool = True,
) -> Any:
    return SimpleNamespace(
        data=SimpleNamespace(
            name=data,
            names=(data,),
            sets={},
            roles=ROLES[data],
            pack=pack,
            max_length=max_length,
            batch_size=batch_size,
            drop_last=drop_last,
        ),
        pooling=pooling_config(pooling) if isinstance(pooling, str) else pooling,
        template=template,
        backbone=SimpleNamespace(attention=attention),
        trainer=SimpleNamespace(strategy=strategy, devices=1, num_nodes=1),
    )
