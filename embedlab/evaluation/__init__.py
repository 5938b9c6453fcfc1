"""Scoring encoders: anything with `encode(list[str]) -> [n, D]` becomes named scores with their protocol.

Nothing here knows of Hydra, and of Lightning only `finetune`, which trains. `SUITES["sts"](encoder, settings)`
runs a suite; its code is imported then.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from embedlab.errors import UserError

Runner = Callable[[Any, Mapping[str, Any]], tuple[dict[str, float], dict[str, Any]]]
"""(encoder, settings) -> (flat scores "task/metric", protocol block)."""


class Suites(Mapping[str, Runner]):
    """Suites by name, "module:function", imported when asked for.

    A suite whose module is not there (an optional part) is not listed.
    """

    def __init__(self, targets: Mapping[str, str]) -> None:
        self._targets = dict(targets)

    def register(self, name: str, target: str) -> None:
        """Adds a suite: `target` is "package.module:function"."""
        self._targets[name] = target

    def __getitem__(self, name: str) -> Runner:
        if name not in self:
            raise UserError("no such suite", key="suite", value=name, fix=f"choose from {', '.join(self)}")
        module, function = self._targets[name].split(":")
        runner: Runner = getattr(importlib.import_module(module), function)
        return runner

    def __contains__(self, name: object) -> bool:
        if name not in self._targets:
            return False
        return importlib.util.find_spec(self._targets[str(name)].split(":")[0]) is not None

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._targets if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


DIRECT = (
    "sts", "transfer", "retrieval", "robustness", "geometry", "lee", "mteb", "cls_energy", "pawsx",
    "bitext", "languages", "sts_multilingual", "xretrieval", "emoji",
)  # fmt: skip
FINE_TUNED = ("xnli", "qa", "glue")

_ROOMS = {
    "sts": "sts", "sts_multilingual": "sts", "lee": "sts", "transfer": "transfer", "retrieval": "retrieval",
    "bitext": "bitext", "xretrieval": "bitext", "emoji": "bitext", "languages": "probes", "geometry": "probes",
    "robustness": "probes", "cls_energy": "probes", "pawsx": "probes", "mteb": "mteb",
}  # fmt: skip

SUITES = Suites(
    {name: f"embedlab.evaluation.{_ROOMS[name]}.{name}:run" for name in DIRECT}
    | {name: f"embedlab.evaluation.finetune.{name}:run" for name in FINE_TUNED}
)
