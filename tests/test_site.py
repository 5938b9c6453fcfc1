"""The documentation site builds strictly, reads without a network, and has what code and configuration say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from embedlab.parts import part_names

pytest.importorskip("mkdocs", reason="the site's extra is not installed: pip install 'embedlab[docs]'")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    # Not --quiet, with which mkdocs counts no warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    env = {k: v for k, v in os.environ.items() if k != "EMBEDLAB_REPOSITORY"} | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


class Loaded(HTMLParser):
    """Addresses that a page loads by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "img", "iframe") or (tag == "link" and values.get("rel") != "canonical"):
            self.addresses.append(values.get("src") or values.get("href") or "")


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        assert [a for a in Loaded(text(page)).addresses if re.match(r"(https?:)?//", a)] == [], page


def test_every_method_has_a_page_with_its_keys(site: Path) -> None:
    for name in part_names("methods"):
        page = text(site / "methods" / f"{name}.html")
        assert re.search(r'<h2 id="keys">', page), name
        assert "<code>method.name</code>" in page


def test_results_stand_once_and_links_to_them_lead_there(site: Path) -> None:
    assert "The same, against the average of the last 3 blocks" in text(site / "methods/s2sent.html")
    methods = {path.stem for path in (site / "methods").iterdir()}
    others = {path.stem for path in (ROOT / "docs" / "results").glob("*.md")} - methods
    assert {page.stem for page in (site / "results").iterdir()} == others
    page = text(site / "results.html")
    assert 'href="methods/s2sent.html#results"' in page
    assert 'href="results/same_start.html"' in page


def test_a_block_that_is_a_file_shows_its_name(site: Path) -> None:
    for path in (ROOT / "docs" / "extending").glob("*.md"):
        files = re.findall(r"^```\w+ ([\w./-]+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        page = text(site / "extending" / f"{'index' if path.stem == 'README' else path.stem}.html")
        assert re.findall(r'class="filename">([^<]+)<', page) == files


def test_formulas_are_drawn_without_a_script(site: Path) -> None:
    page = text(site / "methods/simcse.html")
    assert page.count("<math") >= 2
    assert "embedlab-formula-" not in page
    assert "$$" not in page


def test_commands_and_keys_are_those_of_help(site: Path) -> None:
    commands, keys = text(site / "reference/commands.html"), text(site / "reference/keys.html")
    from embedlab.cli.main import COMMANDS

    assert all(f'<h2 id="{name}">' in commands for name in COMMANDS)
    assert "Sentences on one device." in keys
    assert "<code>evaluation.sts_dir</code>" in keys


def test_docstrings_become_sections() -> None:
    sys.path.insert(0, str(ROOT))
    from tools.site_docstrings import google

    found = google(
        "Head.\n\nArgs:\n    a, b: two.\n\nReturns: the text,\n    all of it.\n\nRaises:\n    X: if.\n"
    )
    assert "    a: two.\n    b: two.\n" in found
    assert "Returns:\n    the text, all of it.\n" in found
    assert found.endswith("Raises:\n    X: if.\n")
