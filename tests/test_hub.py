"""The loopback hub, held to huggingface_hub and datasets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.hub import REFUSED_TOKEN, RIGHT_TOKEN, Hub, hub

__all__ = ["hub"]

FILES = {
    "config.json": b'{"a": 1}',
    "model.safetensors": bytes(range(256)) * 40,
    "1_Pooling/config.json": b"{}",
}
PRELUDE = """
import json, pathlib, huggingface_hub as h
def read(folder):
    root = pathlib.Path(folder)
    return {p.relative_to(root).as_posix(): p.read_bytes().hex() for p in root.rglob("*") if p.is_file()}
def attempt(f, *a, **k):
    try:
        return read(f(*a, **k))
    except Exception as error:
        return type(error).__name__
get = h.snapshot_download
"""


def _run(hub: Hub, home: Path, code: str, token: str | None = None, **more: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        env=hub.environment(home, token) | more,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, f"{done.stderr}\n{hub.requests}"
    return json.loads(done.stdout.splitlines()[-1])


def _hex(files: dict[str, bytes]) -> dict[str, str]:
    return {path: data.hex() for path, data in files.items()}


def test_snapshots_revisions_and_offline(hub: Hub, tmp_path: Path) -> None:
    first = hub.add_model("a/b", FILES, tag="v1")
    moved = FILES | {"config.json": b'{"a": 2}'}
    hub.add_model("a/b", moved)
    code = f"print(json.dumps([attempt(get, 'a/b', revision=r) for r in ['main', '{first}', 'v1', 'no']]))"
    assert _run(hub, tmp_path, code) == [_hex(moved), _hex(FILES), _hex(FILES), "RevisionNotFoundError"]
    hub.down()
    code = "print(json.dumps([attempt(get, 'a/b'), attempt(get, 'a/c')]))"
    assert _run(hub, tmp_path, code, HF_HUB_OFFLINE="1") == [_hex(moved), "LocalEntryNotFoundError"]


def test_access(hub: Hub, tmp_path: Path) -> None:
    hub.add_model("a/gated", FILES, gated=True)
    hub.add_model("a/private", FILES, private=True)
    tokens = [False, REFUSED_TOKEN, RIGHT_TOKEN]
    code = f"""
out = [[attempt(get, n, token=t) for t in {tokens}] for n in ['a/gated', 'a/private', 'a/unknown']]
print(json.dumps(out))"""
    gated, private, unknown = _run(hub, tmp_path, code)
    assert gated == ["GatedRepoError", "GatedRepoError", _hex(FILES)]
    assert private == ["RepositoryNotFoundError", "RepositoryNotFoundError", _hex(FILES)]
    assert unknown == ["RepositoryNotFoundError"] * 3


def test_push_and_download(hub: Hub, tmp_path: Path) -> None:
    for path, data in FILES.items():
        target = tmp_path / "out" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    code = f"""
h.create_repo('a/b'); h.create_repo('a/b', exist_ok=True)
h.create_branch('a/b', branch='x/y')
h.upload_file(repo_id='a/b', path_or_fileobj=b'1', path_in_repo='only here', revision='x/y')
info = h.upload_folder(repo_id='a/b', folder_path={str(tmp_path / "out")!r})
print(json.dumps([info.oid, read(get('a/b', revision=info.oid))]))"""
    sha, files = _run(hub, tmp_path, code, RIGHT_TOKEN)
    assert sha == hub.repositories["models", "a/b"].refs["main"]
    assert files == _hex(FILES)
    assert hub.files("a/b") == FILES
    assert hub.files("a/b", "x/y") == {"only here": b"1"}
    assert any(method == "PUT" and path.startswith("/lfs/") for method, path in hub.requests)


def test_data_set(hub: Hub, tmp_path: Path) -> None:
    hub.add_dataset("a/rows", {"train.csv": b"x,y\n1,one\n2,two\n"})
    code = "import datasets; print(json.dumps(datasets.load_dataset('a/rows', split='train').to_list()))"
    assert _run(hub, tmp_path, code) == [{"x": 1, "y": "one"}, {"x": 2, "y": "two"}]


def test_switches(hub: Hub, tmp_path: Path) -> None:
    hub.add_model("a/b", FILES)
    code = "print(json.dumps(attempt(get, 'a/b')))"
    hub.down()
    assert _run(hub, tmp_path, code) == "LocalEntryNotFoundError"
    hub.up()
    assert _run(hub, tmp_path, code) == _hex(FILES)
