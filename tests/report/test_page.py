"""`report.html`: whole in one file, escaped, and in headless Chromium sorted, filtered, themed and printed."""

from __future__ import annotations

import base64
import csv
import html
import io
import json
import random
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from embedlab.cli.report import main
from embedlab.report.curves import mean_curve, read_curves
from embedlab.report.figures import drawing, short_names, surfaces
from embedlab.report.runs import Group, find_runs, group_runs
from tests.report.test_escapes import BAD
from tests.report.test_report import write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def change(folder: Path, **sections: dict[str, Any]) -> None:
    """Adds to the sections of a run's scores.json."""
    path = folder / "scores.json"
    content = json.loads(path.read_text())
    for name, values in sections.items():
        content[name] = content.get(name, {}) | values
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a sweep over n and m that has something for every figure."""
    root, draw = tmp_path_factory.mktemp("sweep"), random.Random(0)
    for n in (1, 3):
        for m in (1, 4):
            for seed in (0, 1, 2):
                folder = root / f"{n}{m}{seed}"
                write_run(folder, seed, 70.0 + n + draw.random() / 5, n=n, m=m)
                scores = {
                    "dev/alignment": 0.2 + n / 10,
                    "dev/uniformity": -2.0 - m / 10,
                    "dev/spearman": 60.0 + n,
                }
                lines = {
                    f"{i}–{i + 1}": " ".join(f"{0.1 * i + draw.random():.3f}" for _ in range(9))
                    for i in range(5)
                }
                block = {"geometry": {"cosines_by_rating": lines, "dtype": "float32"}}
                change(folder, scores=scores, protocol=block, training={"seconds": 10.0 + seed})
                rows = "".join(f"{step},{50 + step / 9 + seed},{1 / step}\n" for step in (10, 20, 30))
                (folder / "metrics.csv").write_text(f"step,dev/spearman,train/loss\n{rows}")
    assert main([str(root), "baseline=pooling.n=1, pooling.m=1", "title=A <sweep>"]) == 0
    return root / "report.html"


class Page(HTMLParser):
    """Tags, links and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v or "" for k, v in attrs if k in ("href", "src", "xlink:href")]


def test_the_page_needs_nothing_beside_itself(report: Path) -> None:
    text = report.read_text()
    page = Page(text)
    assert not [link for link in page.links if not link.startswith(("data:", "#"))]
    assert not re.findall(r"url\((?!#)", text)
    assert "@import" not in text
    assert "default-src 'none'" in html.unescape(text)
    assert page.tags.count("script") == 1


def test_the_verdict_comes_first_and_every_figure_is_drawn(report: Path) -> None:
    text = report.read_text()
    order = [text.index(f">{title}<") for title in (
        "A &lt;sweep&gt;", "Scores", "Differences", "Learning curves", "Tasks", "Alignment and uniformity",
        "Cosines by rating", "Swept settings", "Sweep surfaces", "What differs between the recipes",
        "Protocol of geometry", "Training and hardware")]  # fmt: skip
    assert order == sorted(order)
    assert order[0] < text.index("is highest on Avg. 7") < order[1]
    assert "2 better: pooling.m=" in text
    assert "trainer.log_every_n_steps" not in text


def test_figures_are_text_in_the_colours_of_the_page(report: Path) -> None:
    svgs = re.findall(r"<svg.*?</svg>", report.read_text(), re.DOTALL)
    assert len(svgs) == 7
    ids: list[str] = []
    for svg in svgs:
        root = ElementTree.fromstring(svg)
        assert len(root.findall(".//{http://www.w3.org/2000/svg}text")) > 3
        own = {element.get("id") for element in root.iter() if element.get("id")}
        assert set(re.findall(r'(?:url\(|href=")#([\w.-]+)', svg)) <= own
        ids += own  # type: ignore[arg-type]
        assert "var(--ink)" in svg
        assert "#0072b2" not in svg
    assert len(ids) == len(set(ids))


def test_downloads_are_the_scores(report: Path) -> None:
    found = {}
    for name, kind, data in re.findall(r'download="([^"]+)" href="data:([^;]+);charset=utf-8;base64,([^"]+)"',
                                       report.read_text()):  # fmt: skip
        found[name] = (kind, base64.b64decode(data).decode())
    assert found["report.csv"][1] == report.with_name("report.csv").read_bytes().decode()
    assert len(list(csv.reader(io.StringIO(found["report.csv"][1])))) == 13
    content = json.loads(found["report.json"][1])
    assert sum(len(recipe["runs"]) for recipe in content["recipes"]) == 12
    assert content["baseline"] == "pooling.m=1, pooling.n=1"


def test_a_hostile_text_is_only_text(tmp_path: Path) -> None:
    for i, bad in enumerate(BAD):
        folder = tmp_path / f"{i}x"
        write_run(folder, 0, 70.0 + i)
        change(folder, training={"device": bad}, config={"arm": f"{bad}{i}", bad: i}, scores={bad: 1.0},
               protocol={"sts": {"name": bad, "notes": [bad], "pooling": {bad: bad}}})  # fmt: skip
    assert main([str(tmp_path), "--title", BAD[1], "--baseline", BAD[1]]) == 0
    text = (tmp_path / "report.html").read_text()
    assert set(Page(text).tags) & {"img", "iframe", "object", "link", "base", "form"} == set()
    assert Page(text).tags.count("script") == 1
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]", text)


@pytest.mark.parametrize(
    "text", ["", "step\n", "a,b\n1,2\n", "step,train/loss\nx,1\n", "step,train/loss\n1,nan\n", "\0"]
)
def test_a_file_that_is_no_curve_draws_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(text)
    assert read_curves(tmp_path / "metrics.csv", ["train/loss"]) == {}
    assert read_curves(tmp_path / "none.csv", ["train/loss"]) == {}


def test_the_mean_curve_is_over_the_steps_that_all_seeds_have() -> None:
    assert mean_curve([[(1, 2.0), (2, 4.0)], [(2, 8.0), (3, 1.0)]]) == [(2, 6.0, 4.0, 8.0)]
    assert mean_curve([]) == []


def test_a_surface_has_the_mean_of_each_cell() -> None:
    groups = [Group(f"{n}{m}", {"pooling.n": n, "pooling.m": m}, ()) for n in (1, 3) for m in (1, 4)]
    assert surfaces(groups, "x", "X") is None
    runs, _ = find_runs([Path(__file__).parents[2] / "docs/runs/s2sent_mini12"])
    filled = [Group(g.label, g.varied, (runs[i], runs[i + 1])) for i, g in enumerate(groups)]
    with drawing():
        figure = surfaces(filled, "sts7/spearman", "X")
    assert figure is not None
    texts = [text.get_text() for text in figure.axes[0].texts]
    means = [sum(r.scores["sts7/spearman"] for r in g.runs) / 2 for g in filled]
    assert sorted(texts) == sorted(f"{mean:.2f}" for mean in means)


def test_a_protocol_says_each_value_once(tmp_path: Path) -> None:
    for i, dtype in enumerate(("float32", "float32", "bfloat16", None)):
        write_run(tmp_path / f"{'abcd'[i]}-0", 0, 70.0, kind=i)
        change(tmp_path / f"{'abcd'[i]}-0", protocol={"sts": {"dtype": dtype} if dtype else {}})
    assert main([str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    assert "<dd><b>a, b</b>: float32</dd>" in text
    assert "<dd><b>c</b>: bfloat16</dd>" in text
    assert "<dd>cpu</dd>" in text


def test_short_names_are_no_two_alike() -> None:
    same = [Group("x" * 60 + str(i) + "y" * 60, {}, ()) for i in range(3)]
    assert len(set(short_names(same))) == 3


def test_runs_of_an_experiment_are_called_by_its_arms(tmp_path: Path) -> None:
    for name in ("mean", "s2"):
        for seed in (0, 1):
            write_run(tmp_path / f"{name}-{seed}", seed, 70.0, kind=name)
    assert {g.name for g in group_runs(find_runs([tmp_path])[0])} == {"mean", "s2"}
    write_run(tmp_path / "other" / "mean-0", 0, 70.0, kind="max")
    assert all("pooling.kind=" in g.name for g in group_runs(find_runs([tmp_path])[0]))


def test_how_a_run_is_watched_is_no_recipe(tmp_path: Path) -> None:
    for i, select in enumerate(("last", "loss", "dev")):
        folder = tmp_path / select
        for seed in (0, 1):
            write_run(folder / f"{seed}", seed, 70.0)
            scoring = {"select": select, "sts_dir": "x", "every": 10 + seed}
            change(folder / f"{seed}", config={"evaluation": scoring, "trainer": {"log_every_n_steps": seed}})
        assert len(group_runs(find_runs([folder])[0])) == (1 if select == "last" else 2), i


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip(
        "playwright.sync_api", reason="the browser's driver is not installed: pip install playwright"
    )
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    with api.sync_playwright() as playwright:
        # Without its sandbox, which root and containers do not have: the page is this test's own.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def test_the_page_works_in_a_browser(report: Path, browser: Any, tmp_path: Path) -> None:
    said: list[str] = []
    context = browser.new_context(viewport={"width": 390, "height": 800}, color_scheme="dark")
    page = context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on(
        "request", lambda request: said.append(request.url) if not request.url.startswith("file:") else None
    )
    page.goto(report.as_uri())
    names = "#table tbody tr:not([hidden]) th"

    before = page.locator(names).all_inner_texts()
    page.get_by_role("button", name="Avg. 7", exact=True).click()
    assert page.locator(names).all_inner_texts() == before, "it came best first"
    page.get_by_role("button", name="Avg. 7", exact=True).click()
    assert page.locator(names).all_inner_texts() == before[::-1]
    assert page.locator("th[aria-sort=ascending]").count() == 1

    page.locator("#filter").fill("pooling.n=3 m=4")
    assert page.locator(names).all_inner_texts() == ["pooling.m=4, pooling.n=3"]
    assert page.locator("#count").inner_text() == "1 of 4"
    page.locator("#filter").fill("")

    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    page.locator("#theme").click()
    assert page.evaluate(paper) == "rgb(255, 255, 255)" != dark
    ink = page.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.querySelector('svg text')).fill") != ink

    assert page.evaluate("document.documentElement.scrollWidth") <= 390, (
        "nothing but figures and tables scrolls"
    )
    page.emulate_media(media="print")
    assert page.evaluate(paper) == "rgb(255, 255, 255)", "on paper it is light"
    assert not page.locator("#theme").is_visible()
    page.pdf(path=str(tmp_path / "page.pdf"), prefer_css_page_size=True)
    assert (tmp_path / "page.pdf").stat().st_size > 20_000
    assert said == []
    context.close()


def test_without_scripts_the_page_is_whole(report: Path, browser: Any) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    assert page.locator("svg").count() == 7
    assert page.locator("#table tbody tr").count() == 4
    assert not page.locator("#theme, #filter").first.is_visible()
    context.close()
