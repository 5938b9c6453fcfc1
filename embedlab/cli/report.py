"""`embedlab report FOLDER...`: the scores of finished runs and sweeps in one table."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from embedlab.cli.compose import Parser
from embedlab.errors import UserError
from embedlab.files import check_writable, write_whole
from embedlab.run.run_folder import holds_run, owned
from embedlab.run.sweep import RECORD as SWEEP


def main(argv: Sequence[str]) -> int:
    """Print the table, and write report.md, .csv, .html, .tex, a box plot for a sweep over numbers, and the density of
    cosines by rating where the runs were scored by ``geometry``."""
    parser = Parser(
        prog="embedlab report",
        description="Mean ± SD over seeds, paired differences to a baseline, the figure of a sweep.",
        epilog="Options may also be given as key=value.",
    )
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help="folders of runs or sweeps")
    parser.add_argument(
        "--mteb",
        nargs=2,
        type=Path,
        metavar=("A", "B"),
        help="instead, two folders of mteb's results to compare",
    )
    parser.add_argument(
        "--qrels", type=Path, help="of --mteb: a folder with TASK.tsv, to compare query by query"
    )
    parser.add_argument(
        "--baseline", help="recipe (or a part of its label) that the others are compared with"
    )
    parser.add_argument("--metric", help="score to compare by, such as sts7/spearman")
    parser.add_argument("--metrics", help="scores to show, by commas (default: those of STS that there are)")
    parser.add_argument("--out", type=Path, help="where the files go (default: the first folder)")
    parser.add_argument("--title", default="Runs")
    keys = ("baseline=", "metric=", "metrics=", "out=", "qrels=", "title=")
    options = parser.parse_args([f"--{a}" if a.startswith(keys) else a for a in argv])
    if bool(options.folders) == (options.mteb is not None):
        raise UserError("report wants folders of runs, or --mteb A B", fix="embedlab report --help")
    if options.mteb:
        return _mteb(options)
    out = options.out or Path(options.folders[0])
    if out.exists() and not out.is_dir():
        raise UserError("is no folder", file=out, key="out", fix="name a folder")
    is_run = holds_run(out) and not (out / SWEEP).exists()  # of a sweep that goes on there may be reports
    with owned(out, "out", fix="out=FOLDER, or wait for its end") if is_run else nullcontext():
        _report(options, out)
    return 0


def _mteb(options: Namespace) -> int:
    from embedlab.report.mteb_folders import compare

    if options.out:
        check_writable(options.out)
    found = compare(options.mteb[0], options.mteb[1], options.qrels)
    print(found.markdown())
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        write_whole(options.out / "mteb.md", found.markdown())
        write_whole(options.out / "mteb.json", json.dumps(found.plain(), indent=2) + "\n")
        print(f"Written to {options.out}: mteb.md, mteb.json")
    return 0


def _report(options: Namespace, out: Path) -> None:
    from embedlab.report.report import (
        box_plot,
        density_plot,
        find_baseline,
        headline,
        make_report,
        write_csv,
    )
    from embedlab.report.runs import find_runs, group_runs

    runs, unfinished = find_runs([Path(f) for f in options.folders])
    check_writable(out)
    groups = group_runs(runs)
    baseline = find_baseline(groups, options.baseline)
    metrics = list(dict.fromkeys(m.strip() for m in (options.metrics or "").split(",") if m.strip()))
    report = make_report(groups, unfinished, baseline, options.metric, metrics, options.title)
    print(report.markdown())
    out.mkdir(parents=True, exist_ok=True)
    write_csv(groups, out / "report.csv")
    written = ["report.md", "report.csv", "report.html", "report.tex"]
    figures = {}
    if box_plot(groups, options.metric or headline(groups), out / "report.png"):
        figures["report.png"] = "scores by the swept numbers"
    if density_plot(groups, out / "density.png"):
        figures["density.png"] = "density of STS-B cosines by rating"
    written += figures
    for name, text in (("md", report.markdown()), ("tex", report.latex()), ("html", report.html(figures))):
        write_whole(out / f"report.{name}", text)
    print(f"Written to {out}: {', '.join(written)}")
