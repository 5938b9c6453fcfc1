"""What `import embedlab` promises, and that pyproject.toml agrees with the code."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

import embedlab
from embedlab.cli.exits import EXTRA_OF_MODULE
from embedlab.version import FALLBACK

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_import_is_quick() -> None:
    """Neither torch nor transformers is loaded by it."""
    code = (
        "import sys, embedlab; print(sorted({'torch', 'transformers', 'hydra', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_public_names() -> None:
    from embedlab.encoders.encoder import SentenceEncoder
    from embedlab.encoders.loading import load

    assert embedlab.SentenceEncoder is SentenceEncoder
    assert embedlab.load is load
    assert {"SentenceEncoder", "load", "__version__"} <= set(dir(embedlab))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        embedlab.lode  # noqa: B018


def test_the_malicious_lightning_uploads_are_excluded() -> None:
    """Lightning 2.6.2 and 2.6.3, GHSA-w37p-236h-pfx3."""
    from packaging.requirements import Requirement

    requirements = {r.name: r.specifier for r in map(Requirement, PROJECT["dependencies"])}
    assert not any(requirements["lightning"].contains(bad) for bad in ("2.6.1", "2.6.2", "2.6.3"))
    assert requirements["lightning"].contains("2.6.4")


def test_the_version_is_that_of_the_tags_or_one_fallback() -> None:
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["version"]
    assert (hatch["source"], hatch["fallback-version"]) == ("vcs", FALLBACK)
    assert Version(FALLBACK).is_devrelease
    newest = re.search(r"^## (\d\S*)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert newest
    assert Version(FALLBACK) > Version(newest[1]), "the fallback is what comes after the newest release"


def version_of(folder: Path) -> str:
    source = pytest.importorskip("hatch_vcs.version_source", reason="needs embedlab[test]")
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["version"]
    return str(source.VCSVersionSource(str(folder), config).get_version_data()["version"])


def test_every_kind_of_source_has_a_version_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SETUPTOOLS_SCM_PRETEND_VERSION", raising=False)
    repository = tmp_path / "repository"
    repository.mkdir()

    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *who, *arguments], cwd=repository, check=True, capture_output=True)

    def archive(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        git("archive", "--output", str(tmp_path / f"{name}.tar"), "HEAD")
        subprocess.run(["tar", "xf", f"{name}.tar", "-C", name], cwd=tmp_path, check=True)
        return folder

    git("init", "--quiet")
    for name in (".git_archival.txt", ".gitattributes"):
        (repository / name).write_text((ROOT / name).read_text("utf-8"))
    git("add", ".")
    git("commit", "--quiet", "-m", "one")
    git("commit", "--quiet", "--allow-empty", "-m", "two")
    assert version_of(repository) == "0.2.0.dev2"
    assert version_of(archive("untagged")) == FALLBACK
    git("tag", "v0.2.0")
    assert version_of(repository) == version_of(archive("tagged")) == "0.2.0"
    git("commit", "--quiet", "--allow-empty", "-m", "three")
    assert version_of(repository) == version_of(archive("later")) == "0.3.0.dev1"


def test_a_release_needs_no_stored_token_and_other_jobs_may_only_read() -> None:
    workflows = {
        p.stem: yaml.safe_load(p.read_text("utf-8")) for p in (ROOT / ".github/workflows").glob("*.yml")
    }
    assert set(workflows) == {"ci", "release"}
    assert all(w["permissions"] == {"contents": "read"} for w in workflows.values())
    jobs = workflows["release"]["jobs"]
    assert {name for name, job in jobs.items() if "id-token" in job.get("permissions", {})} == {"publish"}
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text("utf-8")
    assert {"docs", "lowest", "notebooks"} <= set(workflows["ci"]["jobs"])


def test_requirements_have_no_upper_bounds() -> None:
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    assert [
        r for requirements in lists for r in requirements if re.search(r"<|==|~=", r.partition(";")[0])
    ] == []


def test_no_extra_brings_the_sweeper_that_pins_an_old_optuna() -> None:
    """hydra-optuna-sweeper wants optuna < 3: `embedlab tune` asks and tells a current one."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    every = [*PROJECT["dependencies"], *(r for e in PROJECT["optional-dependencies"].values() for r in e)]
    wanted = [(canonicalize_name(r.name), r.specifier) for r in map(Requirement, every)]
    assert "hydra-optuna-sweeper" not in dict(wanted)
    optuna = [specifier for name, specifier in wanted if name == "optuna"]
    assert optuna
    assert all(o.contains("5.0.0") and not o.contains("2.10.1") for o in optuna)


def test_the_hint_for_a_missing_package_names_an_extra_that_brings_it() -> None:
    distribution = {"sklearn": "scikit-learn", "umap": "umap-learn", "submitit": "hydra-submitit-launcher"}
    for module, extra in EXTRA_OF_MODULE.items():
        name = distribution.get(module, module.replace("_", "-"))
        names = [re.split(r"[>=<\[; ]", r)[0] for r in PROJECT["optional-dependencies"][extra]]
        assert name in names, f"{extra} does not bring {module}"


def test_make_test_brings_every_extra_for_which_a_test_is_skipped() -> None:
    sources = [p.read_text("utf-8") for p in (ROOT / "tests").rglob("test_*.py")]
    asked = {m for text in sources for m in re.findall(r'importorskip\(\s*"(\w+)"', text)}
    needed = {EXTRA_OF_MODULE[module] for module in asked if module in EXTRA_OF_MODULE}
    made = re.search(r"^EXTRAS \?= (\S+)$", (ROOT / "Makefile").read_text("utf-8"), re.M)
    assert made
    extras = made.group(1).split(",")
    for requirement in PROJECT["optional-dependencies"]["test"]:
        if nested := re.fullmatch(r"embedlab\[(.*)\]", requirement):
            extras += nested.group(1).split(",")
    assert "gguf" in needed
    assert needed <= set(extras)
