"""The file of `embedlab fit --config`: a composed configuration's values, in LightningCLI's sections."""

from __future__ import annotations

import ast
import datetime
import os
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass, make_dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from embedlab.cli.compose import compose
from embedlab.config.adapter import AdapterConfig
from embedlab.config.backbone import BackboneConfig
from embedlab.config.build import section
from embedlab.config.data import DataConfig
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.trainer import CallbacksConfig, LoggerConfig, ScoringConfig, TrainerConfig
from embedlab.distributed.devices import launched
from embedlab.errors import UserError
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


def model(
    backbone: BackboneConfig,
    method: dict[str, Any],
    pooling: dict[str, Any],
    adapter: AdapterConfig = AdapterConfig(),  # noqa: B008 - frozen
    template: dict[str, Any] | None = None,
    optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008 - frozen
    step: str = "auto",
    unpad: bool | str = "auto",
) -> Any:
    """A method around the encoder that it trains; its arguments are the sections of ``conf/``."""
    raise NotImplementedError("the run makes it: a method needs the trainer's precision and the data's kind")


_RECORDS: dict[str, Any] = {
    "data": DataConfig, "logger": LoggerConfig, "callbacks": CallbacksConfig, "evaluation": ScoringConfig,
}  # fmt: skip


def add_sections(parser: Any) -> None:
    """What a file has beside Lightning's own keys, to a parser of jsonargparse."""
    from jsonargparse.typing import register_type

    parser.add_function_arguments(model, "model")
    register_type(_Texts, list, _texts, fail_already_registered=False)
    for name, record in _RECORDS.items():
        parser.add_class_arguments(_with_quick_lists(record), name)
    parser.add_argument("--stages", type=dict[str, Any], default={}, help="Runs before this one.")
    parser.add_argument("--stages_dir", type=str | None, default=None, help="Where their folders are.")


class _Texts:
    """A list of texts, for the parser alone: of a `list[str]` jsonargparse copies the whole list for each item, which
    takes minutes for 20,000 files. What is no such list, or is appended to one, is a `list[str]` as before."""


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError("no list of texts")
    return value


def _with_quick_lists(record: Any) -> Any:
    """A record whose lists of texts may also be `_Texts`."""
    hints = get_type_hints(record)
    made = [
        (f.name, _Texts | hints[f.name] if list[str] in get_args(hints[f.name]) else hints[f.name], copy(f))
        for f in fields(record)
    ]
    found = make_dataclass(record.__name__, made, frozen=True)
    found.__doc__, found.__module__ = record.__doc__, record.__module__
    return found


def hint_of(key: str) -> Any:
    """The type of a key (``data.limit``, ``model.backbone.name``); None where its section is no record."""
    hint: Any = None
    known = _RECORDS | {"model": model}
    for name in key.split("."):
        hint = known.get(name)
        known = get_type_hints(hint) if is_dataclass(hint) or hint is model else {}
    return hint


def from_file(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run file's content as the values of a composed configuration.

    Args:
        content: by section, as a parser gives it.

    Returns:
        The values, and the arguments of Lightning's trainer that go beyond them.

    Raises:
        UserError: an argument of the trainer whose part this project does by itself.
    """
    given = _lists(dict(section(content["trainer"] or {}, "trainer")))
    given.pop("default_root_dir", None)
    content = {key: _plain(value) for key, value in content.items() if key not in ("config", "trainer")}
    own = {key: given.pop(key) for key in _OWN if key in given}
    defaults = {f.name: f.default for f in fields(TrainerConfig)}
    if not isinstance(own.get("strategy", ""), str):  # an object of Lightning's, made by its class_path
        given["strategy"] = own.pop("strategy")
        own["strategy"] = type(given["strategy"]).__name__
    values = {
        "seed": content["seed_everything"],
        "ckpt_path": content.get("ckpt_path"),
        **content["model"],
        "data": content["data"],
        "trainer": {key: defaults[key] if own.get(key) is None else own[key] for key in _OWN},
        **{key: content.get(key) for key in SECTIONS},
    }
    return values, _extra(given)


def _extra(given: dict[str, Any]) -> dict[str, Any]:
    defaults = trainer_defaults()
    extra = {k: v for k, v in given.items() if v != defaults[k]}
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


@cache
def trainer_defaults() -> dict[str, Any]:
    """Arguments of Lightning's trainer and their defaults, from its text: importing it takes seconds."""
    lightning = find_spec("lightning")
    file = Path(str(lightning and lightning.origin)).with_name("pytorch") / "trainer" / "trainer.py"
    text = file.read_text(encoding="utf-8")
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    arguments = next(node.args for node in functions if node.name == "__init__")
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {argument.arg: ast.literal_eval(default) for argument, default in pairs if default is not None}


def folder_of(trainer: Mapping[str, Any], values: Mapping[str, Any]) -> Path:
    """Where the run is: as the trainer's section says, or the same for all tries of a SLURM job, or a new one."""
    ckpt_path = values.get("ckpt_path")
    if (given := trainer.get("default_root_dir")) is not None:
        return Path(given)
    name = values["method"].get("name", "run")
    if "SLURM_JOB_ID" in os.environ:
        job = os.environ.get("SLURM_ARRAY_JOB_ID", os.environ["SLURM_JOB_ID"])
        task = os.environ.get("SLURM_ARRAY_TASK_ID")
        return Path("runs") / f"slurm-{job}{'' if task is None else f'-{task}'}-{name}"
    if launched() or ckpt_path in ("last", "auto"):
        why = "ranks need the same folder" if launched() else f"ckpt_path={ckpt_path} is looked for in it"
        raise UserError(f"which folder the run is in: {why}", key="trainer.default_root_dir",
                        fix="--trainer.default_root_dir=DIR")  # fmt: skip
    now = datetime.datetime.now()
    return Path("runs") / now.strftime("%Y-%m-%d") / f"{now:%H-%M-%S}-{name}"


def _plain(section: Any) -> Any:
    """A section as YAML gives it back: no tuples, no enumerations."""
    return yaml.safe_load(yaml.safe_dump(_lists(section)))


def _lists(value: Any) -> Any:
    if isinstance(value, dict):  # `__path__`: of the section's own file, which a parser adds
        return {k: _lists(v) for k, v in value.items() if k != "__path__"}
    if isinstance(value, list | tuple):
        return [_lists(v) for v in value]
    return str(value) if isinstance(value, Path) else value
