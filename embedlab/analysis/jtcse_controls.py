"""The controls of JTCSE side by side: `python -m embedlab.analysis.jtcse_controls SWEEP`.

SWEEP is the folder of `embedlab train -m experiment=jtcse_ablation`. Arms are compared seed by seed: their towers are
the same, so that the differences vary far less than the scores.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import yaml

from embedlab.errors import UserError
from embedlab.evaluation.table import Metric, Table, score_table

NAMES = {
    "a1": "(a) stage-1 tower I",
    "a2": "(a) stage-1 tower II",
    "b": "(b) their sum, no stage 2",
    "c": "(c) sum of two plain SimCSE",
    "d": "(d) stage 2, L_NCE only",
    "e": "(e) + X(u,v)",
    "f": "(f) + ICTM (TNCSE)",
    "g": "(g) + X(s,t), no ICTM",
    "h": "(h) all (JTCSE)",
}
PAIRS = (
    ("b", "a1"),
    ("b", "c"),
    ("d", "b"),
    ("e", "d"),
    ("f", "e"),
    ("f", "b"),
    ("g", "e"),
    ("h", "f"),
    ("h", "b"),
)
"""What is held against what."""

Scores = dict[str, float]


@dataclass(frozen=True)
class Comparison:
    """Paired by seed: mean and standard deviation of the differences, their number, two-sided p of a paired t-test
    (None for fewer than two, or where all are equal)."""

    mean: float
    sd: float
    n: int
    p: float | None


def read_sweep(folder: Path) -> dict[str, dict[int, Scores]]:
    """Scores by arm and seed, of every trial that is finished, and of the stage-1 towers.

    Raises:
        UserError: no trial of this experiment is there.
    """
    found: dict[str, dict[int, Scores]] = {name: {} for name in NAMES}
    for config in sorted(folder.glob("*/config.yaml")):
        values = yaml.safe_load(config.read_text(encoding="utf-8"))
        scores = config.parent / "scores.json"
        if values.get("arm") in found and scores.is_file():
            found[values["arm"]][int(values["seed"])] = _scores(scores)
    for arm, stage in (("a1", "stage1_a"), ("a2", "stage1_b")):
        for scores in sorted(folder.glob(f"stage1_own/seed*/{stage}/scores.json")):
            found[arm][int(scores.parts[-3].removeprefix("seed"))] = _scores(scores)
    found = {arm: seeds for arm, seeds in found.items() if seeds}
    if not set(found) - {"a1", "a2"}:
        raise UserError(
            "holds no finished trial of experiment=jtcse_ablation", file=folder, fix="the folder of its sweep"
        )
    return found


def _scores(path: Path) -> Scores:
    scores = json.loads(path.read_text(encoding="utf-8"))["scores"]
    return {key: math.nan if value is None else float(value) for key, value in scores.items()}


def compare(first: Mapping[int, Scores], second: Mapping[int, Scores], metric: str) -> Comparison | None:
    """`first` minus `second` over the seeds that both have; None where there is no such seed."""
    from scipy.stats import ttest_rel

    seeds = [s for s in first if s in second and metric in first[s] and metric in second[s]]
    if not seeds:
        return None
    a, b = [first[s][metric] for s in seeds], [second[s][metric] for s in seeds]
    change = [x - y for x, y in zip(a, b, strict=True)]
    if len(seeds) < 2:
        return Comparison(change[0], math.nan, 1, None)
    p = float(ttest_rel(a, b).pvalue) if stdev(change) > 0 else None
    return Comparison(fmean(change), stdev(change), len(seeds), p)


def controls_table(arms: Mapping[str, Mapping[int, Scores]], metrics: tuple[Metric, ...]) -> Table:
    """Mean ± SD of each arm."""
    runs = {NAMES[arm]: list(seeds.values()) for arm, seeds in arms.items()}
    return score_table(
        runs, metrics, "Controls of JTCSE", "Mean ± SD over seeds; the arms of a seed share their towers."
    )


def differences_table(arms: Mapping[str, Mapping[int, Scores]], metric: Metric) -> Table:
    """What each step adds, paired by seed."""
    rows = []
    for one, other in PAIRS:
        found = compare(arms.get(one, {}), arms.get(other, {}), metric.key)
        if found is None:
            continue
        change = f"{found.mean:+.{metric.digits}f}" + (
            "" if found.n < 2 else f" ± {found.sd:.{metric.digits}f}"
        )
        p = "-" if found.p is None else f"{found.p:.3f}"
        rows.append((f"{NAMES[one]}  minus  {NAMES[other]}", change, str(found.n), p))
    caption = "Paired by seed; p of a two-sided paired t-test, not corrected for the number of rows."
    return Table(f"{metric.label}: differences", ("", "difference", "n", "p"), tuple(rows), caption)


def main(argv: list[str]) -> int:
    from embedlab.training.final import METRICS

    if len(argv) != 1:
        raise UserError(
            "give the folder of the sweep", fix="python -m embedlab.analysis.jtcse_controls SWEEP"
        )
    arms = read_sweep(Path(argv[0]))
    controls_table(arms, METRICS).print()
    known = {key for seeds in arms.values() for scores in seeds.values() for key in scores}
    wanted = ("sts7/spearman", "dev/spearman", "lee/spearman")
    headline = next((m for key in wanted for m in METRICS if m.key == key and key in known), None)
    if headline is not None:
        differences_table(arms, headline).print()
    return 0


if __name__ == "__main__":
    from embedlab.cli.exits import guarded

    sys.exit(guarded(lambda: main(sys.argv[1:])))
