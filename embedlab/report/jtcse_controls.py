"""The controls of JTCSE side by side: `python -m embedlab.report.jtcse_controls SWEEP`.

SWEEP is the folder of `embedlab train -m experiment=jtcse_ablation`. Arms are compared seed by seed: their towers are
the same, so that the differences vary far less than the scores.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from embedlab.errors import UserError
from embedlab.evaluation.core.suite import final_metrics
from embedlab.evaluation.core.table import HEADLINES, Metric, Table, score_table
from embedlab.report.paired import Difference, paired_difference
from embedlab.report.runs import read_run

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
    ("f", "d"),
    ("f", "b"),
    ("g", "e"),
    ("g", "d"),
    ("h", "f"),
    ("h", "g"),
    ("h", "b"),
)
"""What is held against what."""

Scores = dict[str, float]


def read_sweep(folder: Path) -> dict[str, dict[int, Scores]]:
    """Scores by arm and seed, of every trial that is finished, and of the stage-1 towers.

    Raises:
        UserError: no trial of this experiment is there.
    """
    found: dict[str, dict[int, Scores]] = {name: {} for name in NAMES}
    places = {"*": None, "stage1_own/seed*/stage1_a": "a1", "stage1_own/seed*/stage1_b": "a2"}
    for place, tower in places.items():
        for path in sorted(folder.glob(f"{place}/scores.json")):
            run = read_run(path)
            arm = tower or (run and run.config.get("arm"))
            if run is not None and arm in found:
                seed = int(path.parts[-3].removeprefix("seed")) if tower else run.seed
                found[arm][seed] = dict(run.scores)
    found = {arm: seeds for arm, seeds in found.items() if seeds}
    if not set(found) - {"a1", "a2"}:
        raise UserError(
            "holds no finished trial of experiment=jtcse_ablation", file=folder, fix="the folder of its sweep"
        )
    return found


def compare(first: Mapping[int, Scores], second: Mapping[int, Scores], metric: str) -> Difference | None:
    """`first` minus `second` over the seeds that both have; None where there is no such seed."""
    one, other = ({s: v[metric] for s, v in arm.items() if metric in v} for arm in (first, second))
    return paired_difference(one, other)


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
        detectable = "" if found.n < 2 else f"{found.detectable:.{metric.digits}f}"
        names = f"{NAMES[one]}  minus  {NAMES[other]}"
        rows.append((names, found.text(metric.digits), str(found.n), detectable, found.verdict))
    caption = (
        "Paired by seed, 95 % confidence interval, not corrected for the number of rows. Detectable: the smallest "
        "true difference that so many seeds would have shown in four of five experiments."
    )
    columns = ("", "difference", "n", "detectable", "verdict")
    return Table(f"{metric.label}: differences", columns, tuple(rows), caption)


def main(argv: list[str]) -> int:
    """Prints both tables; returns 0."""
    if len(argv) != 1:
        raise UserError("give the folder of the sweep", fix="python -m embedlab.report.jtcse_controls SWEEP")
    arms = read_sweep(Path(argv[0]))
    metrics = final_metrics()
    controls_table(arms, metrics).print()
    known = {key for seeds in arms.values() for scores in seeds.values() for key in scores}
    headline = next((m for key in HEADLINES for m in metrics if m.key == key and key in known), None)
    if headline is not None:
        differences_table(arms, headline).print()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"embedlab: {error}", file=sys.stderr)
        raise SystemExit(2) from None
