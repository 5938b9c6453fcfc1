"""Every page of docs/extending is carried out: its files as another distribution, then its commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "extending").glob("[a-z]*.md"))
_BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Language, name of the file ("" for commands) and text of every fenced block."""
    return [(lang, name, text) for lang, name, text in _BLOCK.findall(page.read_text(encoding="utf-8"))]


def install(site: Path) -> None:
    """What ``pip install -e .`` of the README's pyproject.toml records."""
    ((_, _, text),) = [b for b in blocks(ROOT / "docs/extending/README.md") if b[1] == "pyproject.toml"]
    project = tomllib.loads(text)["project"]
    (points,) = project["entry-points"].values()
    record = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [f"{name} = {package}" for name, package in points.items()]
    (record / "entry_points.txt").write_text("\n".join(["[embedlab.parts]", *lines, ""]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_does_what_it_says(page: Path, tmp_path: Path) -> None:
    install(tmp_path)
    carry_out(page, tmp_path)


def carry_out(page: Path, folder: Path) -> None:
    """Write a page's files into a folder, and run its commands there."""
    commands = []
    for language, name, text in blocks(page):
        if name:
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        elif language == "bash":
            commands.append(text)
    assert commands
    (folder / "bin").mkdir()
    for name, call in (("embedlab", f'"{sys.executable}" -m embedlab'), ("python", f'"{sys.executable}"')):
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {call} "$@"\n')
        script.chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        "EMBEDLAB_CACHE": str(folder / "cache"),
        "PYTEST_ADDOPTS": "-p no:cacheprovider",
    }
    script = "set -e\n" + "".join(commands)
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_the_project_builds_with_its_parts(tmp_path: Path) -> None:
    """By the build backend that pip would call, without its network; the folders have no ``__init__.py``."""
    pytest.importorskip("hatchling")
    ((_, _, project),) = [b for b in blocks(ROOT / "docs/extending/README.md") if b[1] == "pyproject.toml"]
    (tmp_path / "pyproject.toml").write_text(project)
    for _, name, text in blocks(ROOT / "docs/extending/pooling.md"):
        if name:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
    code = "import hatchling.build; hatchling.build.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert {"my_parts/pooling/maximum.py", "my_parts/conf/pooling/maximum.yaml"} <= set(
        ZipFile(wheel).namelist()
    )


def test_the_readme_names_every_page() -> None:
    text = (ROOT / "docs/extending/README.md").read_text(encoding="utf-8")
    assert all(f"[{page.name}]({page.name})" in text for page in PAGES)


def test_a_kind_of_data_with_its_loss_is_five_files() -> None:
    files = {name for _, name, _ in blocks(ROOT / "docs/extending/data.md") if name}
    assert len(files) == 5
