"""Runs before the run: a configuration may name stages, each trained in a sub-folder, whose results it needs.

A stage is the main run's configuration with some keys changed::

    stages:
      stage1_a:                      # trained in <run folder>/stage1_a
        result: method.tower1        # the key that gets <run folder>/stage1_a/export
        seed_offset: 1000            # added to the main run's seed
        optimizer: {lr: 1.5e-5}      # the rest: sections of a configuration
    method: {name: jtcse, tower1: null, ...}

A section that names something else than the main run's (``method: {name: simcse, ...}``, ``backbone: {source:
fresh, ...}``) replaces it whole, any other is merged into it key by key. A stage whose ``result`` has a value
already is left out, and so is one that is finished. ``result`` may lead into a later stage
(``stages.stage2.method.tower1``); if that one is left out, so is the earlier one.
"""

from __future__ import annotations

import copy
import gc
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedlab.config.build import check_values
from embedlab.config.read import read_values
from embedlab.config.run import RunConfig, differences
from embedlab.config.run_files import read_numbers
from embedlab.distributed.devices import launched
from embedlab.errors import UserError, one_of
from embedlab.run.callbacks.checkpoints import find_checkpoint, kept_in
from embedlab.run.check import check_run
from embedlab.run.resume import holds
from embedlab.run.run_folder import AFTER, owned

log = logging.getLogger(__name__)

TrainOne = Callable[[dict[str, Any], Path], int]
"""(configuration, folder) -> exit status."""

_SECTIONS = (
    *("backbone", "adapter", "method", "pooling", "template", "data", "optimizer", "trainer", "logger"),
    *("callbacks", "evaluation", "step", "unpad"),
)
_IDENTITY = {
    "backbone": ("source", "name"),
    **dict.fromkeys(("adapter", "method", "pooling"), ("name",)),
    "template": ("text",),
}
_OF_NO_MATTER = ("logger", "callbacks")
_LATER = {"unpad": "auto"}
"""Keys that recorded runs of before do not have, and what these did: by itself, whatever is new."""


@dataclass(frozen=True)
class Stage:
    """One run before the main one.

    Args:
        name: of the stage and of its sub-folder.
        result: the dotted key that gets its exported encoder.
        seed_offset: added to the main run's seed.
        overrides: sections of the configuration that differ.
    """

    name: str
    result: str
    seed_offset: int
    overrides: dict[str, Any]

    @classmethod
    def read(cls, name: str, content: Any) -> Stage:
        """From its place under ``stages``; ``UserError`` names what is wrong."""
        key = f"stages.{name}"
        if not re.fullmatch(r"\w[\w.-]*", str(name)):  # it names a folder
            told = "a stage has a name of letters, digits, dots and dashes"
            raise UserError(told, key="stages", value=name, fix="first, for example")
        if not isinstance(content, dict):
            raise UserError(
                "a stage is a group of keys", key=key, value=content, fix=f"{key}.result=method.tower1"
            )
        rest = dict(content)
        result, offset = rest.pop("result", None), rest.pop("seed_offset", 0)
        if not isinstance(result, str) or "." not in result:
            told, fix = "a stage names the key that gets its result", f"{key}.result=method.tower1"
            raise UserError(told, key=f"{key}.result", value=result, fix=fix)
        if type(offset) is not int or offset < 0:
            what: dict[str, Any] = {"key": f"{key}.seed_offset", "value": offset}
            raise UserError("must be a number from 0 on", **what, fix=f"{key}.seed_offset=0")
        if unknown := sorted(set(rest) - set(_SECTIONS)):
            known = ("result", "seed_offset", *_SECTIONS)
            raise UserError(
                "unknown key of a stage", key=f"{key}.{unknown[0]}", fix=one_of(unknown[0], known)
            )
        return cls(name, result, offset, rest)

    def values(self, main: dict[str, Any]) -> dict[str, Any]:
        """The whole configuration of this stage."""
        merged = {key: copy.deepcopy(main[key]) for key in _SECTIONS if key in main}
        for section, change in self.overrides.items():
            merged[section] = merge(merged.get(section), change, _IDENTITY.get(section, ()))
        merged["seed"] = main["seed"] + self.seed_offset
        merged["ckpt_path"] = None
        return merged


def merge(base: Any, change: Any, identity: tuple[str, ...] = ()) -> Any:
    """``change`` on top of ``base``, key by key; a dictionary that names another thing replaces it whole."""
    if not isinstance(base, dict) or not isinstance(change, dict):
        return copy.deepcopy(change)
    if any(key in change and change[key] != base.get(key) for key in identity):
        return copy.deepcopy(change)
    return {**base, **{key: merge(base.get(key), value) for key, value in change.items()}}


def has_stages(values: dict[str, Any]) -> bool:
    """Whether the configuration names stages; raises UserError where ``stages`` is something else."""
    stages = values.get("stages")
    if stages and not isinstance(stages, dict):
        raise UserError(
            "stages are groups of keys by their names", key="stages", value=stages, fix="stages={}"
        )
    return bool(stages)


def run_stages(values: dict[str, Any], folder: Path, train_one: TrainOne) -> tuple[int, dict[str, Any]]:
    """Train every stage that is wanted and not finished.

    Args:
        values: the composed configuration, ``stages`` among it.
        folder: of the main run; ``stages_dir`` (relative to it) is where the stages' folders are, so that the
            trials of a sweep may share them.
        train_one: runs one configuration in one folder.

    Returns:
        The exit status (not 0: that of the stage that failed), and the configuration of the main run with the
        results filled in.

    Raises:
        UserError: a stage that is no valid run, before anything is trained; a finished stage whose
            configuration is not the present one.
    """
    if launched():
        raise UserError(
            "stages start their own processes", key="stages", fix="call embedlab train without torchrun"
        )
    home = _home(values, folder)
    check_values(RunConfig, {"seed": values.get("seed")}, "")  # to which those of the stages are added
    content = copy.deepcopy(values)
    wanted = _wanted(content)
    _check(content, wanted, home)
    resume = values.get("ckpt_path") == "last"
    if resume and not any(_has_begun(place) for place in (folder, *(home / name for name in wanted))):
        find_checkpoint("last", folder)  # says that there is none
    _tell_left_out(content, wanted)
    for name in wanted:
        stage = Stage.read(name, content["stages"][name])
        own = stage.values(content)
        place = home / name
        # The trials of a sweep that share a stage wait for the first.
        with owned(place, "stages_dir", wait=True):
            if finished(place, own):
                log.info("Stage %s is finished (%s).", name, place)
            else:
                goes_on = kept_in(place) and _difference(place, own) is None
                own["ckpt_path"] = "last" if goes_on else None
                log.info("Stage %s %s (%s).", name, "goes on" if goes_on else "begins", place)
                status = train_one(own, place)
                if status:
                    return status, content
                _release()
        _set(content, stage.result, _result(place))
    main = {k: v for k, v in content.items() if k not in ("stages", "stages_dir")}
    if resume and wanted and not kept_in(folder):
        main["ckpt_path"] = None  # the interruption was in a stage
    return 0, main


def _home(values: dict[str, Any], folder: Path) -> Path:
    """Where the stages' folders are."""
    given = values.get("stages_dir")
    if not isinstance(given, str | None):
        raise UserError("not a path", key="stages_dir", value=given, fix="stages_dir=FOLDER, or null")
    return Path(os.path.normpath(folder / (given or "")))


def _result(place: Path) -> str:
    """What a stage's ``result`` gets."""
    return str((place / "export").resolve())


def _wanted(values: dict[str, Any]) -> list[str]:
    """The stages whose result is not given, nor leads only to a stage that is left out; in order.

    A result for ``backbone.path`` is not wanted either where another kind of backbone has been chosen.
    """
    found: list[str] = []
    for name, content in reversed(values["stages"].items()):
        stage = Stage.read(name, content)
        into = stage.result.split(".")[1] if stage.result.startswith("stages.") else None
        given = _get(values, stage.result, f"stages.{name}.result") is not None
        unused = stage.result == "backbone.path" and values["backbone"].get("source") != "local"
        if not given and not unused and (into is None or into in found):
            found.append(name)
    return found[::-1]


def _tell_left_out(values: dict[str, Any], wanted: list[str]) -> None:
    """Another start than the recipe's (``backbone.path=DIR``) takes a stage's place: that is to be seen."""
    for name, content in values["stages"].items():
        if name not in wanted:
            key = content["result"]
            given = _get(values, key, f"stages.{name}.result")
            why = f"{key}={given} is given" if given is not None else "nothing takes its result"
            log.info("Stage %s is left out: %s.", name, why)


def finished(folder: Path, values: dict[str, Any]) -> bool:
    """Whether a stage's folder holds the whole result of this configuration.

    Raises:
        UserError: it holds that of another one.
    """
    if not ((folder / AFTER).is_file() and (folder / "export").is_dir()):
        return False
    odd = _difference(folder, values)
    if odd is not None:
        key, was, now = odd
        raise UserError(
            f"this stage is finished with another configuration: {key} was {was}",
            file=folder,
            key=key,
            value=now,
            fix="take another hydra.run.dir, or remove the stage's folder",
        )
    return True


def summary(folder: Path, values: dict[str, Any]) -> None:
    """Print what each stage and the main run came to, one row each."""
    from embedlab.evaluation.core.suite import final_metrics
    from embedlab.evaluation.core.table import score_table
    from embedlab.run.finish import BEFORE

    home = _home(values, folder)
    places = [(name, home / name) for name in values["stages"] if (home / name / AFTER).is_file()]
    runs: dict[str, list[dict[str, float]]] = {}
    if places and (places[0][1] / BEFORE).is_file():
        runs["before"] = [read_numbers(places[0][1] / BEFORE)]
    runs |= {name: [read_numbers(place / AFTER)] for name, place in places}
    if not places or not (folder / AFTER).is_file():
        return
    runs["result"] = [read_numbers(folder / AFTER)]
    if any(scores for (scores,) in runs.values()):
        score_table(runs, final_metrics(), "The run and its stages", "One seed: n=1.").print()


def _check(values: dict[str, Any], wanted: list[str], home: Path) -> None:
    """Reject any part of the whole that cannot run, before the first stage trains.

    A finished stage needs nothing any more; where all are, nothing trains before the main run, which checks itself.
    """
    from embedlab.data.sources import check_source
    from embedlab.run.finish import check_final
    from embedlab.run.parse import parse_run

    content = copy.deepcopy(values)
    left: dict[str | None, dict[str, Any]] = {}
    unseen = set()  # runs whose backbone a stage is going to make, which cannot be looked at yet
    for name in wanted:
        stage = Stage.read(name, content["stages"][name])
        own = stage.values(content)
        if not finished(home / name, own):
            left[name] = own
            *scope, section, _ = stage.result.split(".")
            if section == "backbone":
                unseen.add(scope[-1] if scope else None)
        _set(content, stage.result, _result(home / name))
    if left:
        left[None] = content
    for of, own in left.items():
        config = parse_run(own)
        if of not in unseen:
            check_run(config)
        check_final(config.evaluation)
        check_source(config.data)


def _has_begun(folder: Path) -> bool:
    return bool(kept_in(folder)) or (folder / "export").is_dir()


def _release() -> None:
    """Give a finished stage's memory back before the next one asks for it."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _get(values: dict[str, Any], key: str, named_by: str) -> Any:
    node: Any = values
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            told, fix = (
                "a stage's result goes to a key that is not there",
                "a key of the run, such as method.tower1",
            )
            raise UserError(told, key=named_by, value=key, fix=fix)
        node = node[part]
    return node


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    node = values
    for part in path:
        node = node[part]
    node[last] = value


def _difference(folder: Path, values: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """The first key in which the run in a folder was another: its name, the value there and here."""
    recorded = folder / "config.yaml"
    there = read_values(recorded) if recorded.is_file() else {}
    if not isinstance(there, dict):
        raise UserError("holds no configuration", file=recorded, fix="remove the stage's folder")
    for key, was, now in differences(_of_matter(there), _of_matter(values)):
        # A key that the record lacks is of a later version; off, it does what was done then.
        if not (was is None and now is False and not holds(there, key.split("."))):
            return key, was, now
    return None


def _of_matter(values: dict[str, Any]) -> dict[str, Any]:
    return {key: values.get(key, _LATER.get(key)) for key in ("seed", *_SECTIONS) if key not in _OF_NO_MATTER}
