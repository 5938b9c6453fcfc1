"""`embedlab report FOLDER...`: the scores of finished runs and sweeps in one table."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from embedlab.cli.compose import Parser
from embedlab.errors import UserError
from embedlab.files import check_absent, check_writable, made, whole_file
from embedlab.run.run_folder import holds_run, owned
from embedlab.run.sweep import RECORD as SWEEP

if TYPE_CHECKING:
    from embedlab.report.runs import Group


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
    parser.add_argument(
        "--overwrite", choices=("true", "false"), default="false", help="replace a report in --out"
    )
    keys = ("baseline=", "metric=", "metrics=", "out=", "overwrite=", "qrels=", "title=")
    options = parser.parse_args([f"--{a}" if a.startswith(keys) else a for a in argv])
    if bool(options.folders) == (options.mteb is not None):
        raise UserError("report wants folders of runs, or --mteb A B", fix="embedlab report --help")
    if options.mteb:
        return _mteb(options)
    out = options.out or Path(options.folders[0])
    if options.out and out.exists() and not out.is_dir():
        raise UserError("is a file", file=out, key="out", fix="name a folder")
    if options.out:
        check_absent(out / "report.md", options.overwrite == "true")
    is_run = holds_run(out) and not (out / SWEEP).exists()  # of a sweep that goes on there may be reports
    with owned(out, "out", fix="out=FOLDER, or wait for its end") if is_run else nullcontext():
        _report(options, out)
    return 0


def _mteb(options: Namespace) -> int:
    from embedlab.report.mteb_folders import compare

    if options.out:
        check_absent(options.out / "mteb.md", options.overwrite == "true")
        check_writable(options.out)
    found = compare(options.mteb[0], options.mteb[1], options.qrels)
    print(found.markdown())
    if options.out:
        texts = {"mteb.md": found.markdown(), "mteb.json": json.dumps(found.plain(), indent=2) + "\n"}
        with _all_or_none(options.out, texts):
            pass
        print(f"Written to {options.out}: mteb.md, mteb.json")
    return 0


def _report(options: Namespace, out: Path) -> None:
    from embedlab.report.runs import find_runs, group_runs

    runs, unfinished = find_runs([Path(f) for f in options.folders])
    check_writable(out)
    # These load scipy.
    from embedlab.report.page import html_page
    from embedlab.report.report import arms, csv_text, find_baseline, headline, make_report

    groups = group_runs(runs)
    baseline = find_baseline(groups, options.baseline)
    metrics = list(dict.fromkeys(m.strip() for m in (options.metrics or "").split(",") if m.strip()))
    metric = options.metric or headline(groups)
    report = make_report(groups, unfinished, baseline, metric, metrics, options.title)
    listed = replace(report, caption="\n\n".join(filter(None, (arms(groups), report.caption))))
    listed.print()
    scores = csv_text(groups)
    page = html_page(groups, report, metric, baseline, len(unfinished), scores)
    texts = {"md": listed.markdown(), "csv": scores, "html": page, "tex": listed.latex()}
    texts = {f"report.{kind}": text for kind, text in texts.items()}
    with _all_or_none(out, texts):
        written = [*texts, *_pictures(groups, metric, out)]
    print(f"Written to {out}: {', '.join(written)}")


@contextmanager
def _all_or_none(folder: Path, texts: Mapping[str, str]) -> Iterator[None]:
    """Write files that belong together, by name, when the block ends well; old ones stay beside no new one."""
    with made(folder), ExitStack() as files:
        for name, text in texts.items():
            files.enter_context(whole_file(folder / name)).write_text(text, encoding="utf-8")
        yield


def _pictures(groups: Sequence[Group], metric: str, out: Path) -> list[str]:
    """For papers: the figures of a sweep and of the cosines as files; gives their names."""
    from embedlab.evaluation.core.figures import save_figure
    from embedlab.report import figures
    from embedlab.report.report import TITLES

    written = []
    with figures.drawing():
        for name, figure in (
            ("report.png", figures.boxes(groups, metric, TITLES.get(metric, metric))),
            ("density.png", figures.densities(groups)),
        ):
            if figure is not None:
                save_figure(figure, out / name)
                written.append(name)
    return written
