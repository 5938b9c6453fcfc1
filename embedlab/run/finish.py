"""The end of a run: export, scores before and after, and the line that says how to use the result."""

from __future__ import annotations

import importlib.util
import logging
import platform
import shlex
import sys
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer

from embedlab.config.run_files import read_numbers
from embedlab.data.contamination.overlap import Overlap
from embedlab.errors import UserError
from embedlab.evaluation.core.protocol import write_json
from embedlab.evaluation.core.suite import final_metrics, joined, keys_named, suite
from embedlab.evaluation.core.table import before_after_table
from embedlab.evaluation.held_out import held_out
from embedlab.run.callbacks.train_log import held_gib
from embedlab.run.check import resolved_packing, resolved_step
from embedlab.run.dev import KEYS, Dev, sts_folder
from embedlab.run.run_folder import AFTER as AFTER

if TYPE_CHECKING:
    from embedlab.config.run import RunConfig
    from embedlab.config.trainer import ScoringConfig
    from embedlab.data.module import SentenceDataModule
    from embedlab.encoders.base import Encoder
    from embedlab.run.callbacks.scoring import Selection

log = logging.getLogger(__name__)
BEFORE = "scores_before.json"


def overlap_of(config: RunConfig) -> Overlap | None:
    """The evaluation sets that the text is kept apart from, of the files of ``evaluation.sts_dir``.

    Raises:
        UserError: an unknown suite, no folder, a missing or broken file.
    """
    if not config.data.decontaminate:
        return None
    keys = ("data.decontaminate", "evaluation.sts_dir")
    return Overlap(held_out(config.data.decontaminate, config.evaluation.sts_dir, keys))


def settings_of(scoring: ScoringConfig, name: str) -> dict[str, Any]:
    """What a suite is scored with in a run: its own folder in ``evaluation.sts_dir``, where there is one."""
    return {"data_dir": suite(name).folder(sts_folder(scoring)), "sts_text": scoring.sts_text}


def scorable(scoring: ScoringConfig, name: str) -> bool:
    """Whether a suite can be scored here; says why one that a run may leave out cannot."""
    one = suite(name)
    if name == "sts" and scoring.sts_dir is None:
        log.info("No sts scores: evaluation.sts_dir names neither a folder of its files nor hub.")
        return False
    missing = [p for module, p in one.packages.items() if importlib.util.find_spec(module) is None]
    if one.optional and missing:
        log.info("No %s scores: %s is not installed (pip install 'embedlab[quickstart]').", name, missing[0])
    return not (one.optional and missing)


def check_final(scoring: ScoringConfig) -> dict[str, Any]:
    """Load what is scored at the end and needs no hub.

    Returns: the data of each suite; None where they come from the hub.

    Raises:
        UserError: a suite's data are not where ``evaluation.sts_dir`` says.
    """
    return {name: load_final(scoring, name, local=True) for name in scoring.final if not suite(name).optional}


def load_final(scoring: ScoringConfig, name: str, local: bool = False) -> Any:
    """The data of a suite of ``evaluation.final``.

    Args:
        scoring: of the run.
        name: of the suite.
        local: only those that need no hub.

    Raises:
        UserError: as of the suite, by the run's own keys.
    """
    one, folder = suite(name), sts_folder(scoring)
    with keys_named(KEYS, "evaluation.sts_dir=hub" if one.hub else None):
        try:
            return (one.local if local else one.load)(settings_of(scoring, name))
        except UserError as error:
            if error.key == "data_dir" and local:
                error.value = error.value and folder
                if "sts" not in one.folders:
                    error.fix = one.folder_to_give(folder)
                    error.key = KEYS["data_dir"]
            raise


class FinalEvaluation:
    """Scores the encoder before and after training on the same suites.

    Args:
        config, folder: of the run.
        encoder: that is trained.
        data: it is trained on.
        dev: the set that selects, where the run has one.
        part: whether the run is a stage of a larger one, whose result is what will be used.
        loaded: data of the suites, as of `check_final`; what is missing is loaded when it is scored.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        encoder: Encoder,
        data: SentenceDataModule,
        dev: Dev | None,
        part: bool = False,
        loaded: dict[str, Any] | None = None,
    ) -> None:
        self.config, self.folder, self.encoder, self.data, self.dev = config, folder, encoder, data, dev
        self.part, self._loaded = part, loaded or {}
        self.device: torch.device | None = None
        """Where to score; None: where the encoder is. Lightning has the model on the CPU before and after a fit."""
        self._last: dict[str, float] | None = None

    @cached_property
    def suites(self) -> list[str]:
        """Those of ``evaluation.final`` that this run can score; says once why one is left out."""
        scoring = self.config.evaluation
        return [name for name in dict.fromkeys(scoring.final) if scorable(scoring, name)]

    def before(self) -> None:
        """Score the untrained encoder, once a run."""
        path = self.folder / BEFORE
        if self.config.evaluation.before and not path.exists():
            scores, protocols = self.score()
            write_json(path, {"scores": scores, "protocol": protocols})

    def replaced(self) -> None:
        """Score the last weights, before the selected ones take their place."""
        if self.config.evaluation.last:
            self._last, _ = self.score()

    def after(self, trainer: Trainer, selection: Selection | None, seconds: float) -> dict[str, float]:
        """Export the encoder as it is now (selected), score it, print the table, write ``scores.json``."""
        best = selection.best if selection is not None else None
        training = {
            "steps": trainer.global_step,
            "selected_step": best.step if best is not None and best.step is not None else trainer.global_step,
            "select": self.config.evaluation.selection,
            "seconds": round(seconds, 1),
            "sentences": self.data.n_rows,
            "device": device_name(self.device or self.encoder.device),
            "seed": self.config.seed,
            "step": resolved_step(self.config),
            "unpad": resolved_packing(self.config),
            "precision": str(trainer.precision),
        }
        if (held := held_gib(self.device or self.encoder.device)) is not None:
            training["held_gib"] = round(held, 2)
        apart: dict[str, Any] = self.data.report.get("decontaminated") or {}
        if apart:
            training["decontaminated"] = apart
        self.encoder.card = {"training": training, "config": self.config.plain}
        self._export()
        scores, protocols = self.score()
        for name in protocols.keys() & set(apart.get("against", ())):
            note = f"{apart['rows']:,} rows of training text with evaluation texts were dropped"
            protocols[name]["notes"] = [*protocols[name]["notes"], note]
        self.encoder.card |= {"scores": scores, "protocol": protocols}
        self._export()
        content = {"scores": scores, "protocol": protocols, "training": training, "config": self.config.plain}
        if self.config.evaluation.last:
            last = scores if self._last is None else self._last
            content["last"] = {"step": trainer.global_step, "scores": last}
            own = self.config.evaluation.dev is not None  # no set that STS-B's test goes with
            gaps = {"selected": scores, "last": last}
            content["dev_minus_test"] = {k: None if own else dev_minus_test(v) for k, v in gaps.items()}
        write_json(self.folder / "data_report.json", self.data.report)
        write_json(self.folder / AFTER, content)
        self._print(scores, training)
        if self.config.evaluation.last:
            metric = "spearman" if self.dev is None else self.dev.metric
            print(beside_the_last(content, self.config.evaluation.dev or "STS-B dev", metric))
        return scores

    def _export(self) -> None:
        self.encoder.save(self.folder / "export")

    def score(self) -> tuple[dict[str, float], dict[str, Any]]:
        """The encoder as it is now: scores by name, and each suite's protocol."""
        scores: dict[str, float] = {}
        protocols: dict[str, Any] = {}
        home = self.encoder.device
        self.encoder.to(self.device or home)
        try:
            if self.dev is not None:
                vectors = self.encoder.encode(self.dev.sentences, prompt="", output="tensor")
                scores |= {f"dev/{k}": v for k, v in self.dev.score(vectors).items()}
            for i, name in enumerate(self.suites, start=1):
                if self.suites != ["lee"]:  # which takes seconds
                    log.info("Scoring %s (suite %d of %d).", name, i, len(self.suites))
                scoring = self.config.evaluation
                if self._loaded.get(name) is None:
                    self._loaded[name] = load_final(scoring, name)
                with keys_named(KEYS, None):
                    settings = settings_of(scoring, name) | {"device": str(self.encoder.device)}
                    some, protocols[name] = suite(name).score(self.encoder, self._loaded[name], settings)
                scores = joined(scores, some, name)
        finally:
            self.encoder.to(home)
        return scores, protocols

    def _print(self, scores: dict[str, float], training: dict[str, Any]) -> None:
        path = self.folder / BEFORE
        title = f"{self.config.method.name}, {training['steps']} steps, weights of step {training['selected_step']}"
        if scores and path.exists():
            try:
                before = read_numbers(path)
            except UserError as error:
                log.warning("No table of before and after: %s", error)
                before = {}
            lee = "[ ]: 95 % bootstrap interval over documents. " if "lee/spearman" in scores else ""
            caption = f"{lee}One seed: n=1."
            if before:
                before_after_table([before], [scores], final_metrics(), title, caption).print()
        print(f"Scores: {self.folder / AFTER}")
        if not self.part:
            print(
                f'Encode with the result: {shlex.quote(this_python())} -c "import embedlab; '
                f"print(embedlab.load('{self.folder / 'export'}').encode(['a cat', 'a dog']).shape)\""
            )


def dev_minus_test(scores: dict[str, float]) -> float | None:
    """Of STS-B, in points of Spearman; None where one of the two was not scored."""
    dev, test = scores.get("dev/spearman"), scores.get("stsb/spearman")
    return None if dev is None or test is None else dev - test


def beside_the_last(content: dict[str, Any], dev: str, metric: str) -> str:
    """A line for the terminal: the selected weights of ``scores.json`` against the last ones, by a score of the
    development set ``dev``."""
    gaps, key = content["dev_minus_test"], f"dev/{metric}"
    parts = []
    for name, step, scores in (
        ("selected", content["training"]["selected_step"], content["scores"]),
        ("last", content["last"]["step"], content["last"]["scores"]),
    ):
        value = f"{scores[key]:.2f}" if key in scores else "not scored"
        gap = "" if gaps[name] is None else f", minus test {gaps[name]:+.2f}"
        parts.append(f"{name} (step {step}) {value}{gap}")
    return f"{dev}: {'; '.join(parts)}"


def this_python() -> str:
    """The interpreter in use, which has this package: relative to the working directory where it lies below it."""
    path, here = Path(sys.executable), Path.cwd()
    return str(path.relative_to(here) if here in path.parent.parents else path)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.processor() or platform.machine()})"
