"""Commands and Python on the pages of the documentation run, or say above them why not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_extending import PAGES as EXTENDING

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OWN = {*EXTENDING, DOCS / "extending/README.md", DOCS / "your-own-data.md"}
"""Pages with a test of their own."""
PAGES = sorted({ROOT / "README.md", *DOCS.rglob("*.md")} - OWN)
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<why>[^>]+?) -->\n)?^```(?P<language>bash|python)\n(?P<text>.*?)^```$", re.M | re.S
)


def script(page: Path) -> str:
    """The blocks of a page that are to run, in their order, as one script."""
    parts = []
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        if block["why"] is None:
            run = block["text"] if block["language"] == "bash" else f"python - <<'EOF'\n{block['text']}EOF\n"
            parts.append(run)
    return "".join(parts)


RUN = [page for page in PAGES if script(page)]


def test_tutorials_are_among_the_pages_that_run() -> None:
    assert {"first-run.md", "sweep.md", "api.md"} <= {page.name for page in RUN}


@pytest.mark.timeout(900)  # they train, on machines of any speed
@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_says_runs(page: Path, tmp_path: Path) -> None:
    pytest.importorskip("gensim", reason="pages use the text that gensim brings (extra: quickstart)")
    (tmp_path / "bin").mkdir()
    for name, call in (("embedlab", f'"{sys.executable}" -m embedlab'), ("python", f'"{sys.executable}"')):
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {call} "$@"\n')
        command.chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "EMBEDLAB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        ["bash", "-c", f"set -e\n{script(page)}"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
