"""The file of `embedlab fit --config`: a composed configuration's values, in LightningCLI's sections."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from embedlab.cli.compose import compose
from embedlab.config.trainer import TrainerConfig
from embedlab.errors import UserError
from embedlab.files import like
from embedlab.run.parse import parse_run

MODEL = ("backbone", "adapter", "method", "pooling", "template", "optimizer", "step", "unpad")
"""What makes a model; ``data`` is a section of its own in both."""
SECTIONS = ("logger", "callbacks", "evaluation", "stages", "stages_dir")
"""Sections beside Lightning's own."""
_OWN = tuple(f.name for f in fields(TrainerConfig))
_OWNED = {
    "accumulate_grad_batches": "model.optimizer.accumulate",
    "gradient_clip_val": "model.optimizer.clip",
    "gradient_clip_algorithm": "model.optimizer.clip",
    "val_check_interval": "evaluation.every",
    "check_val_every_n_epoch": "evaluation.every",
    "limit_val_batches": "evaluation.sts_dir",
    "num_sanity_val_steps": "evaluation.every",
    "enable_checkpointing": "callbacks.checkpoint",
    "enable_progress_bar": "callbacks.progress",
    "enable_model_summary": "callbacks.progress",
    "use_distributed_sampler": "data.shuffle",
    "reload_dataloaders_every_n_epochs": "data.shuffle",
    "fast_dev_run": "trainer.max_steps",
    "overfit_batches": "data.limit",
    "barebones": "callbacks.progress",
}
"""Arguments of Lightning's trainer whose part this project does by itself, and the key that says how."""
_FOLDER = "hydra.run.dir="


def print_run_file(argv: Sequence[str]) -> int:
    """`embedlab train … --cli-config`: print the file; returns 0.

    Raises:
        UserError: the arguments compose to no run, or to a sweep.
    """
    if sweep := next((a for a in argv if a in ("-m", "--multirun")), None):
        raise UserError(f"a file holds one run, and {sweep} asks for several", fix="--cli-config without it")
    values: dict[str, Any] = compose("train", [a for a in argv if not a.startswith("hydra.")])
    parse_run({k: v for k, v in values.items() if k not in ("stages", "stages_dir")})
    folder = next((a.removeprefix(_FOLDER) for a in reversed(argv) if a.startswith(_FOLDER)), None)
    command = " ".join(argv)
    print(f"# embedlab train {command}\n# Run it: embedlab fit --config FILE")
    print(yaml.safe_dump(as_file(values, folder), sort_keys=False, allow_unicode=True), end="")
    return 0


def as_file(values: dict[str, Any], folder: str | None) -> dict[str, Any]:
    """A composed configuration as the content of a run file.

    Args:
        values: plain, resolved.
        folder: of the run; None: a new one each time.
    """
    trainer = dict(values["trainer"])
    if trainer.get("precision") == "auto":
        trainer["precision"] = None
    template = values.get("template")
    model = {key: values.get(key) for key in MODEL}
    model["template"] = template if template and template.get("text") else None
    return {
        "seed_everything": values["seed"],
        "trainer": {**trainer, "default_root_dir": folder},
        "model": model,
        "data": values["data"],
        **{key: values.get(key) for key in SECTIONS},
        "ckpt_path": values.get("ckpt_path"),
    }


def from_file(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run file's content as the values of a composed configuration.

    Returns:
        The values, and the arguments of Lightning's trainer that go beyond them.

    Raises:
        UserError: an argument of the trainer whose part this project does by itself.
    """
    given = {k: v for k, v in content["trainer"].items() if k != "default_root_dir"}
    own = {key: given.pop(key) for key in _OWN if key in given}
    defaults = {f.name: f.default for f in fields(TrainerConfig)}
    if not isinstance(own.get("strategy", ""), str):  # an object of Lightning's, made by its class_path
        given["strategy"] = own.pop("strategy")
        own["strategy"] = type(given["strategy"]).__name__
    trainer = {key: defaults[key] if own.get(key) is None else own[key] for key in _OWN}
    values = {
        "seed": content["seed_everything"],
        "ckpt_path": content.get("ckpt_path"),
        **content["model"],
        "data": content["data"],
        "trainer": trainer,
        **{key: content.get(key) for key in SECTIONS},
    }
    return values, _extra(given)


def _extra(given: dict[str, Any]) -> dict[str, Any]:
    from lightning.pytorch import Trainer

    parameters = inspect.signature(Trainer.__init__).parameters
    extra = {k: v for k, v in given.items() if v != parameters[k].default}
    for key in sorted(set(extra) & set(_OWNED)):
        raise UserError(
            "this project does that by itself",
            key=f"trainer.{key}",
            value=extra[key],
            fix=f"set {_OWNED[key]}",
        )
    for key in ("callbacks", "logger", "plugins"):
        if key in extra:
            extra[key] = [v for v in (extra[key] if isinstance(extra[key], list) else [extra[key]]) if v]
    return extra


def check_named(argv: Sequence[str]) -> None:
    """UserError where ``--config`` names no file; asked before Lightning is loaded, which takes seconds."""
    for place, argument in enumerate(argv):
        flag, equals, value = argument.partition("=")
        if flag in ("-c", "--config") and (equals or place + 1 < len(argv)):
            path = Path(value if equals else argv[place + 1]).expanduser()
            if not path.exists() and ":" not in str(path):  # the values themselves may stand there
                fix = like(path) or "a file that embedlab train … --cli-config printed"
                raise UserError("no such file", key="config", value=str(path), fix=fix)
