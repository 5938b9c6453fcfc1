"""Finished runs, read from their folders, grouped over seeds."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from embedlab.config.read import read_record
from embedlab.config.run import SAME_RECIPE
from embedlab.config.run_files import SCORES as SCORES
from embedlab.config.run_files import TRIAL, TrialEnd, read_scores_of_run
from embedlab.encoders.folder import same_encoder
from embedlab.errors import UserError, printable
from embedlab.evaluation import suite_names
from embedlab.evaluation.core.protocol import read_scores
from embedlab.evaluation.core.suite import joined
from embedlab.files import existing_folder

log = logging.getLogger(__name__)
_SEED = re.compile(r"[-_.]?(?:seed)?\d+$")
# arms, recipe, recipes: tables of an experiment, in which its arms are looked up; what was found there is in the
# sections.
_SAME_RECIPE = SAME_RECIPE | {"seed", "arms", "recipe", "recipes"}


@dataclass(frozen=True)
class Run:
    """One run with its scores.

    Args:
        folder: of the run.
        scores: ``task/metric``.
        config: resolved, plain.
        training: steps, seconds, device, seed and so on, as the run wrote them.
        protocol: how each suite was scored.
    """

    folder: Path
    scores: Mapping[str, float]
    config: Mapping[str, Any]
    training: Mapping[str, Any]
    protocol: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        return next(
            (int(s) for s in (self.training.get("seed"), self.config.get("seed")) if s is not None), -1
        )


@dataclass(frozen=True)
class Group:
    """Runs of one recipe, which differ in the seed alone.

    Args:
        label: the settings that set the recipe off from the others, in the words of a command line.
        varied: the same by key.
        runs: of the recipe, a seed each.
        arm: what an experiment, or whoever named the folders, calls it; "": nothing.
    """

    label: str
    varied: Mapping[str, Any]
    runs: tuple[Run, ...]
    arm: str = ""

    @property
    def name(self) -> str:
        """What tables and figures call the recipe."""
        return self.arm or self.label

    def values(self, metric: str) -> dict[int, float]:
        """A score of every run that has it.

        Args:
            metric: such as ``sts7/spearman``.

        Returns: seed to value; NaN is left out.
        """
        found = {r.seed: r.scores[metric] for r in self.runs if metric in r.scores}
        return {seed: value for seed, value in found.items() if not math.isnan(value)}


@dataclass(frozen=True)
class Unfinished:
    """A trial of a sweep.

    Args:
        folder: of the trial.
        status: as the sweep wrote it, such as ``failed``.
        overrides: of the sweep's command line for this trial.
    """

    folder: Path
    status: str
    overrides: Sequence[str] = ()


def find_runs(folders: Iterable[Path]) -> tuple[list[Run], list[Unfinished]]:
    """Every run at or below the folders that wrote its scores, and the trials of sweeps that did not.

    The stages of a run (sub-folders of its own) are part of it, not runs of the report. A run whose scores cannot be
    read is left out with a line in the log: it may be writing them.

    Args:
        folders: of runs or sweeps.

    Returns: the runs, and the trials without scores.

    Raises:
        UserError: a folder that is not there, or holds no run.
    """
    runs: list[Run] = []
    unfinished: list[Unfinished] = []
    for folder in folders:
        existing_folder(folder, "give the folder of a run or a sweep")
        before = len(runs)
        known: list[Path] = []
        for path in sorted(folder.rglob(SCORES), key=lambda p: (len(p.parts), str(p))):
            if any(parent in known for parent in path.parent.parents) or path.parent.name == "export":
                continue
            try:
                run = read_run(path)
            except UserError as error:
                log.warning("Left out: %s", error)
                continue
            if run is not None:
                known.append(path.parent)
                runs.append(run)
        for path in sorted(folder.rglob("trial.yaml")):
            if path.parent not in known:
                unfinished.append(_trial(path.parent))
        if len(runs) == before and not unfinished:
            raise UserError(
                "there is no finished run in this folder", file=folder, fix="a folder with scores.json"
            )
    return runs, unfinished


def read_run(path: Path) -> Run | None:
    """The run that wrote a ``scores.json``, with what `embedlab evaluate` put into its ``scores/`` later.

    Args:
        path: of the file.

    Returns: the run; None: the file is of an evaluation, not of a run.

    Raises:
        UserError: a damaged file.
    """
    found = read_scores_of_run(path)
    if found is None:
        return None
    config, protocol = found.config or {}, found.protocol or {}
    scores, protocols = _with_later(path.parent, found.numbers, protocol, config)
    return Run(path.parent, scores, config, found.training or {}, protocols)


def _with_later(
    folder: Path, scores: dict[str, float], protocol: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[dict[str, float], dict[str, Any]]:
    """A run's scores and protocols with what ``embedlab evaluate`` put into its ``scores/``: those of the encoder that
    the run made, read as it reads it (another pooling, or weights of later training, make another encoder). What is
    left out is logged."""
    later: dict[str, dict[str, float]] = {}
    protocols: dict[str, Any] = {}
    for path in sorted((folder / "scores").glob("*.json")):
        try:
            found, block = read_scores(path)
        except UserError as error:
            log.warning("Left out: %s", error)
            continue
        # (A comparison of two encoders is no suite.)
        if block["suite"] not in suite_names():
            continue
        if not _of_this_run(block, path.stem, protocol, config):
            log.warning(
                "Left out: %s is of another checkpoint, or of another reading of it", printable(str(path))
            )
            continue
        limited = [w for w in block["warnings"] if str(w).startswith("limit=")]
        if limited:
            log.warning("Left out: %s (%s)", printable(str(path)), printable(str(limited[0])))
            continue
        later[block["suite"]] = later.get(block["suite"], {}) | found
        protocols[block["suite"]] = block
    for suite, found in later.items():
        # The run's own stand where it scored the suite itself (runs of before protocols do not tell).
        own = suite in protocol or not protocol
        scores = {**found, **scores} if own else joined(scores, found, suite)
    return scores, {**protocols, **protocol}


def _of_this_run(
    block: Mapping[str, Any], stem: str, protocol: Mapping[str, Any], config: Mapping[str, Any]
) -> bool:
    """Whether the scores in the file ``stem`` are of the encoder that the run made, read as it reads it, and of its
    vectors, not of codes."""
    if block.get("store") is not None:
        return False
    own = [of["checkpoint"] for of in protocol.values() if of.get("checkpoint") is not None]
    if own:
        return any(same_encoder(str(block["checkpoint"]), str(checkpoint)) for checkpoint in own)
    # A run that scored nothing tells no checkpoint: then the name of the file says that nothing was changed.
    read = block["pooling"].get("name") if isinstance(block["pooling"], dict) else None
    return (read, block["suite"]) == ((config.get("pooling") or {}).get("name"), stem)


def _trial(folder: Path) -> Unfinished:
    """What the sweep wrote of the trial in this folder, finished or not."""
    try:
        end = read_record(folder / TRIAL, TrialEnd)
    except UserError:
        end = TrialEnd()
    return Unfinished(folder, end.status, end.overrides)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs of equal configuration, seed apart, together.

    Two runs of one recipe and one seed are one result: the later folder counts.

    Args:
        runs: in any order.

    Returns: a group a recipe, labelled by the keys in which the recipes differ.
    """
    flat = [_recipe(run) for run in runs]
    keys = sorted({key for config in flat for key in config})
    absent = object()
    varied = [k for k in keys if len({_hashable(c.get(k, absent)) for c in flat}) > 1]
    groups: dict[tuple[Any, ...], dict[int, tuple[dict[str, Any], Run]]] = {}
    for run, config in zip(runs, flat, strict=True):
        what = tuple(_hashable(config.get(k, absent)) for k in varied)
        groups.setdefault(what, {})[run.seed] = ({k: config[k] for k in varied if k in config}, run)
    result = []
    changes = {run.folder: _overrides(run.folder) for run in runs}
    shared = set.intersection(*map(set, changes.values())) if changes else set()
    every = [next(iter(members.values()))[0] for members in groups.values()]
    for members in groups.values():
        settings, first = next(iter(members.values()))
        shown = {k: v for k, v in settings.items() if v is not None}
        label = ", ".join(o for o in changes[first.folder] if o not in shared) or _label(shown, every)
        label = label or str((first.config.get("method") or {}).get("name", "run"))
        result.append(Group(label, shown, tuple(run for _, run in members.values())))
    labels = [g.label for g in result]
    common = os.path.commonpath([run.folder for run in runs]) if runs else ""
    result = [
        g
        if labels.count(g.label) == 1
        else replace(g, label=f"{g.label} ({os.path.relpath(g.runs[0].folder, common)})")
        for g in result
    ]
    # A sweep's own settings are shorter and truer than the names of its folders.
    return result if any(changes.values()) else _with_arms(result)


def _with_arms(groups: Sequence[Group]) -> list[Group]:
    """The groups with the names of their arms, where all have one of their own: the experiment's (``arm=``), or what is
    the same in the names of the folders of all seeds (``mean-0``, ``mean-1``)."""
    found = []
    for group in groups:
        named = {str(run.config.get("arm") or _SEED.sub("", run.folder.name)) for run in group.runs}
        found.append(named.pop() if len(named) == 1 else "")
    own = len(set(found)) == len(found) > 1 and not any(name.isdecimal() or not name for name in found)
    return [replace(g, arm=name) for g, name in zip(groups, found, strict=True)] if own else list(groups)


def _recipe(run: Run) -> dict[str, Any]:
    """What makes the recipe of a run, by dotted keys. Neither the seed does, nor the seed in the path of another run
    that the method begins with (a tower, a teacher)."""
    every = _flatten({k: v for k, v in run.config.items() if k not in _SAME_RECIPE})
    settings = {key: value for key, value in every.items() if key not in _SAME_RECIPE}
    scoring = run.config.get("evaluation") or {}
    # What ``auto`` came to; and what the weights were selected by does more than watch.
    if (selected := run.training.get("select")) is not None:
        settings["evaluation.select"] = selected
    if selected == "dev" and scoring.get("dev") is not None:
        settings["evaluation.dev"] = scoring["dev"]
    unscored = scoring.get("sts_dir") is None and scoring.get("dev") is None
    if (how := settings.get("evaluation.select")) == "last" or (unscored and how != "loss"):
        settings.pop("evaluation.every", None)  # scorings that select nothing
    of_seed = re.compile(rf"(?:(?<=seed)|(?<=[-_=/])){run.seed}(?=/|$)")
    return {
        key: of_seed.sub("SEED", value)
        if key.startswith("method.") and isinstance(value, str) and "/" in value
        else value
        for key, value in settings.items()
    }


def _label(settings: Mapping[str, Any], every: Sequence[Mapping[str, Any]]) -> str:
    """What tells a recipe from the others, in the words of a command line.

    Where parts of different names differ (``pooling=mean`` and ``pooling=s2sent``), the name says the rest; further
    keys of the part are shown if other recipes have the same name and another value.
    """
    words = []
    for key, value in settings.items():
        part, _, rest = key.partition(".")
        named = f"{part}.name"
        if rest == "name":
            words.append(f"{part}={value}")
        elif named in settings:
            peers = [s for s in every if s.get(named) == settings[named]]
            if len({_hashable(s.get(key)) for s in peers}) > 1:
                words.append(f"{key}={value}")
        else:
            words.append(f"{key}={value}")
    return ", ".join(words)


def _overrides(folder: Path) -> list[str]:
    """What a sweep's command changed for this trial, the seed apart."""
    return [o for o in _trial(folder).overrides if not o.lstrip("+").startswith("seed=")]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _hashable(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, (dict, list)) else value
