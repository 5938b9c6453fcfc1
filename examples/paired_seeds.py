"""Is one recipe better than another? Paired over seeds, with what so many seeds could have shown.

    python examples/paired_seeds.py RUNS_FOLDER BASELINE [METRIC]

RUNS_FOLDER holds runs or a sweep of `embedlab train -m … seed=0,1,2`.
"""

import sys
from pathlib import Path

from embedlab.report.paired import paired_difference
from embedlab.report.report import find_baseline, headline
from embedlab.report.runs import find_runs, group_runs


def compare(folder: str, baseline: str, metric: str | None = None) -> list[str]:
    """A line a recipe."""
    groups = group_runs(find_runs([Path(folder)])[0])
    base, metric = find_baseline(groups, baseline), metric or headline(groups)
    lines = []
    for group in groups:
        if group is base:
            continue
        found = paired_difference(group.values(metric), base.values(metric))
        if found is None:
            lines.append(f"{group.name}: no seed in common")
        else:
            seen = "" if found.n == 1 else f"; {found.n} seeds would have shown {found.detectable:.2f}"
            lines.append(f"{group.name}: {found.text()} {metric}, {found.verdict}{seen}")
    return lines


if __name__ == "__main__":
    print("\n".join(compare(*sys.argv[1:])))
