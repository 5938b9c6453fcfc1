from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedlab.data.build as building
from embedlab import files, locks
from embedlab.config.data import DataConfig
from embedlab.config.template import Template
from embedlab.data import cached
from embedlab.data.build import build_token_table
from embedlab.data.table import TableWriter, TokenTable
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from tests.children import children_of
from tests.data.standin import WordTokenization
from tests.support import SENTENCES, tiny_tokenizer

WORDS: Any = WordTokenization()
FIELDS: Any = {"sentence": ("sentence", WORDS)}


@pytest.fixture
def many(tmp_path: Path) -> Path:
    path = tmp_path / "many.txt"
    path.write_text("".join(f"row {i} {'word ' * (i % 17)}\n" for i in range(3000)))
    return path


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "tokens").iterdir() if not path.name.endswith(".lock"))


def test_rows_are_what_the_tokenisation_gives(sentences: Path, tokenization: Tokenization) -> None:
    framed = Tokenization(tokenization.tokenizer, Template('The "{sentence}" means {mask}.'), 10)
    short = Tokenization(tokenization.tokenizer, None, 12)
    fields = {"plain": ("sentence", short), "framed": ("sentence", framed)}
    table = build_token_table(DataConfig(files=str(sentences)), fields)
    assert table.n_rows == len(SENTENCES)
    for name, (_, used) in fields.items():
        rows = [table.fields[name].row(i).tolist() for i in range(table.n_rows)]
        assert rows == used.ids(SENTENCES)
        assert table.lengths(name).tolist() == [len(row) for row in rows]
        assert table.fields[name].ids.dtype == np.uint16
    both = zip(*(used.ids(SENTENCES) for _, used in fields.values()), strict=True)
    assert table.longest.tolist() == [max(map(len, rows)) for rows in both]
    cut = sum(short.ids_and_cut(SENTENCES)[1])
    assert table.report["fields"]["plain"]["truncated"] == round(cut / len(SENTENCES), 4) > 0
    assert table.describe([0, 3]) == f"{sentences}:1, {sentences}:4"


def test_equal_texts_have_equal_hashes_in_every_role(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("sent0\tsent1\thard_neg\na\tb\tc\nb\ta\tb\nx\ty \ty\n")
    fields = {role: (role, WORDS) for role in ("anchor", "positive", "negative")}
    table = build_token_table(DataConfig(name="nli", files=str(path)), fields)
    anchor, positive, negative = (table.fields[role].hashes.tolist() for role in fields)
    assert anchor[0] == positive[1]
    assert anchor[1] == positive[0] == negative[1]
    assert positive[2] != negative[2]
    assert len({*anchor, *positive, *negative}) == 6


def test_only_the_texts_that_a_method_wants_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("sent0\tsent1\na\tb\n")
    config = DataConfig(name="nli", files=str(tmp_path / "a.tsv"))
    table = build_token_table(config, {"positive": ("positive", WORDS), "anchor": ("anchor", WORDS)})
    assert table.fields["anchor"].hashes[0] != table.fields["positive"].hashes[0]
    with pytest.raises(UserError, match="needs the text 'sentence', and data=nli has anchor, positive"):
        build_token_table(config, FIELDS)


def test_a_second_run_opens_what_the_first_built(
    sentences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build_token_table(DataConfig(files=str(sentences)), FIELDS)
    monkeypatch.setattr(building, "_fill", lambda *_: pytest.fail("built again"))
    renamed = sentences.rename(tmp_path / "renamed.txt")
    second = build_token_table(DataConfig(files=str(renamed), batch_size=3, shuffle=False), FIELDS)
    assert second.folder == first.folder


@pytest.mark.parametrize(
    "change",
    [
        {"limit": 10},
        {"min_chars": 5},
        {"max_chars": 999},
        {"overlong": "drop"},
        {"duplicates": "drop"},
        {"columns": {"sentence": "x"}},
        {"pack": 64},
    ],
)
def test_settings_that_choose_rows_make_another_table(
    sentences: Path, tokenization: Tokenization, change: dict[str, Any]
) -> None:
    config, fields = DataConfig(files=str(sentences)), {"sentence": ("sentence", tokenization)}
    first = build_token_table(config, fields)
    assert build_token_table(replace(config, **change), fields).folder != first.folder


def test_text_and_tokenisation_make_another_table(sentences: Path, tokenization: Tokenization) -> None:
    config = DataConfig(files=str(sentences))

    def folder(used: Any) -> Path:
        return build_token_table(config, {"sentence": ("sentence", used)}).folder

    tokenizer = tokenization.tokenizer
    other = tiny_tokenizer("bert", vocab_size=300)
    kinds = [
        tokenization,
        Tokenization(tokenizer, None, 23),
        Tokenization(tokenizer, Template("{sentence}!"), 24),
        Tokenization(other, None, 24),
    ]
    folders = [folder(kind) for kind in kinds]
    sentences.write_text(sentences.read_text() + "One more.\n")
    folders.append(folder(tokenization))
    assert len(set(folders)) == 5
    assert folder(Tokenization(tokenizer, None, 24)) == folders[-1]


def test_worker_processes_give_the_same_bytes(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_CHUNK", 128)
    monkeypatch.setattr(building, "_ALONE", 2)
    config = DataConfig(files=str(many))
    alone = build_token_table(replace(config, processes=1, cache_dir=str(many.parent / "1")), FIELDS)
    shared = build_token_table(replace(config, processes=2, cache_dir=str(many.parent / "2")), FIELDS)
    names = sorted(path.name for path in alone.folder.iterdir())
    assert names == sorted(path.name for path in shared.folder.iterdir())
    for name in names:
        if not name.endswith(".json"):
            assert (alone.folder / name).read_bytes() == (shared.folder / name).read_bytes()
    assert alone.n_rows == 3000


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that were started. Workers are, after the first of chunks of 128 rows."""
    monkeypatch.setattr(building, "_CHUNK", 128)
    monkeypatch.setattr(building, "_ALONE", 1)
    processes: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    return processes


def test_an_error_in_a_worker_process_arrives_and_no_process_stays(
    many: Path, cache: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    fields: Any = {"sentence": ("sentence", WordTokenization(poison="2222"))}
    with pytest.raises(ValueError, match="cannot read 2222"):
        build_token_table(DataConfig(files=str(many), processes=2), fields)
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)
    assert left_in(cache) == []


def test_a_worker_process_that_dies_is_told(many: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_CHUNK", 128)
    monkeypatch.setattr(building, "_ALONE", 1)
    popen = subprocess.Popen

    def dead(*args: Any, **kwargs: Any) -> Any:
        return popen([sys.executable, "-c", "raise SystemExit(9)"], **kwargs)

    monkeypatch.setattr(subprocess, "Popen", dead)
    with pytest.raises(RuntimeError, match=r"ended with status 9; data\.processes=1 uses none"):
        build_token_table(DataConfig(files=str(many), processes=2), FIELDS)
    assert left_in(cache) == []


@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    many: Path,
    cache: Path,
    started: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    processes: int,
) -> None:
    begin = TableWriter.__init__

    def on_full_disk(self: TableWriter, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self._files["ids0.bin"] = self._open.enter_context(Path("/dev/full").open("wb"))  # noqa: SIM115

    monkeypatch.setattr(TableWriter, "__init__", on_full_disk)
    with pytest.raises(
        UserError, match=r"cannot be written: No space left on device .*Fix: free space"
    ) as caught:
        build_token_table(DataConfig(files=str(many), processes=processes), FIELDS)
    assert caught.value.key == "data.cache_dir"
    assert left_in(cache) == []
    assert len(started) == (2 if processes == 2 else 0)
    assert all(process.poll() is not None for process in started)


def test_a_cache_folder_that_cannot_be(many: Path) -> None:
    with pytest.raises(UserError, match=r"many.txt.*: is a file, or below one \(data.cache_dir="):
        build_token_table(DataConfig(files=str(many), cache_dir=str(many / "cache")), FIELDS)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"good\n" * 3000 + b"\xff\n", ":3001: not UTF-8"),
        (b"good\n" * 3000 + b"x" * 100_000 + b"\n", ":3001: a text of 100,000 characters"),
        (b"", "the file is empty"),
        (b"\n \n\n", "no row is left of 3 (3 empty)"),
    ],
)
def test_bad_input_leaves_nothing_behind(tmp_path: Path, cache: Path, content: bytes, says: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UserError) as caught:
        build_token_table(DataConfig(files=str(tmp_path / "a.txt")), FIELDS)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert left_in(cache) == []


def test_half_a_surrogate_pair_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": "bad \\ud83d"}\n')
    with pytest.raises(UserError, match=r"a.jsonl:2: .*half of a character"):
        build_token_table(DataConfig(files=str(tmp_path / "a.jsonl")), FIELDS)


def test_two_runs_at_once_build_once(
    many: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill, calls, tables = building._fill, [], []

    def slowly(*args: Any) -> None:
        calls.append(args)
        time.sleep(0.5)
        fill(*args)

    monkeypatch.setattr(building, "_fill", slowly)

    def run() -> None:
        tables.append(build_token_table(DataConfig(files=str(many)), FIELDS))

    with caplog.at_level(logging.INFO, "embedlab"):
        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(calls) == 1
    assert len(tables) == 3
    assert len({table.folder for table in tables}) == 1
    assert "another process is building this token cache" in caplog.text


SCRIPT = """
import sys
import embedlab.data.build as building
from embedlab import files
from embedlab.config.data import DataConfig
from tests.data.standin import WordTokenization
building._CHUNK, building._ALONE = 16, 1
words = WordTokenization(seconds=0.05)
building.build_token_table(DataConfig(files=sys.argv[1], processes=2), {"sentence": ("sentence", words)})
"""


def test_a_killed_build_is_swept_up_and_its_processes_end(many: Path, cache: Path) -> None:
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(many)], env=environment)
    assert eventually(lambda: len(children_of(process.pid)) == 2)
    workers = children_of(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert eventually(lambda: not any(is_running(pid) for pid in workers))
    (left,) = left_in(cache)
    assert left.endswith(".new")
    table = build_token_table(DataConfig(files=str(many)), FIELDS)
    assert table.n_rows == 3000
    assert left_in(cache) == [table.folder.name]


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Gives a file or folder, and what is in it, to another user."""
    theirs: set[int] = set()
    is_ours = files.is_ours

    def ours(status: os.stat_result) -> bool:
        return status.st_ino not in theirs and is_ours(status)

    for module in (files, locks, cached):
        monkeypatch.setattr(module, "is_ours", ours)
    return lambda path: theirs.update(p.lstat().st_ino for p in (path, *path.rglob("*")))


def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A cache folder that many users share, and this user's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "shared", tmp_path / "home" / "embedlab" / "tokens"


@pytest.mark.parametrize("part", ["folder", "file", "lock", "link", "linked lock", "linked file"])
def test_what_is_another_users_is_not_read_but_built_in_ones_own_folder(
    many: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    foreign: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
    part: str,
) -> None:
    common, own = shared(tmp_path, monkeypatch)
    config = DataConfig(files=str(many), cache_dir=str(common))
    table = build_token_table(config, FIELDS)
    assert table.folder.parent == common
    lock, elsewhere = common / f"{table.folder.name}.lock", tmp_path / "elsewhere"
    if part == "folder":
        foreign(table.folder)
    elif part == "file":
        foreign(table.folder / "ids0.bin")
    elif part == "link":
        table.folder.rename(elsewhere)
        table.folder.symlink_to(elsewhere)
    elif part == "linked file":
        (table.folder / "ids0.bin").rename(elsewhere)
        (table.folder / "ids0.bin").symlink_to(elsewhere)
    else:
        (table.folder / "meta.json").unlink()
        if part == "lock":
            foreign(lock)
        else:
            lock.unlink()
            lock.symlink_to(elsewhere)
    before = sorted(common.rglob("*"))
    again = build_token_table(config, FIELDS)
    assert again.folder.parent == own
    assert np.array_equal(again.fields["sentence"].ids, table.fields["sentence"].ids)
    assert f"the token cache is in {own}" in caplog.text
    assert sorted(common.rglob("*")) == before, "nothing is written or removed there"
    assert part != "linked lock" or not elsewhere.exists()
    caplog.clear()
    assert build_token_table(config, FIELDS).folder == again.folder


def test_another_users_leftovers_hold_nobody_up(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreign: Callable[[Path], None]
) -> None:
    common, _ = shared(tmp_path, monkeypatch)
    common.mkdir()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    theirs, ours = (common / f".{name}.{files._HOST}.{gone.pid}.abcdefgh.new" for name in ("theirs", "ours"))
    for left in (theirs, ours):
        left.mkdir()
    foreign(theirs)
    table = build_token_table(DataConfig(files=str(many), cache_dir=str(common)), FIELDS)
    assert table.folder.parent == common
    left = {path for path in common.iterdir() if not path.name.endswith(".lock")}
    assert left == {theirs, table.folder}


def test_ones_own_folder_in_other_hands_is_one_line(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreign: Callable[[Path], None]
) -> None:
    _, own = shared(tmp_path, monkeypatch)
    config = DataConfig(files=str(many), cache_dir=str(own))
    foreign(build_token_table(config, FIELDS).folder)
    with pytest.raises(UserError, match=r"a link, or of another user \(data\.cache_dir="):
        build_token_table(config, FIELDS)


def test_the_lock_file_of_a_dead_process_holds_nobody_up(many: Path, cache: Path) -> None:
    table = build_token_table(DataConfig(files=str(many)), FIELDS)
    (lock,) = (cache / "tokens").glob("*.lock")
    lock.write_text("12345")
    (table.folder / "meta.json").unlink()
    assert build_token_table(DataConfig(files=str(many)), FIELDS).n_rows == 3000


@pytest.mark.parametrize("name", ["ids0.bin", "offsets0.i8", "meta.json"])
def test_a_damaged_table_is_built_anew(many: Path, name: str) -> None:
    config = DataConfig(files=str(many))
    table = build_token_table(config, FIELDS)
    path = table.folder / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    again = build_token_table(config, FIELDS)
    if name != "meta.json":
        assert path.read_bytes() == whole
    assert again.n_rows == 3000


@pytest.mark.parametrize("place", [0, -1])
def test_a_table_with_ids_past_the_vocabulary_is_built_anew(
    many: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    monkeypatch.setattr("embedlab.data.table._LOOKED_AT", 100)
    table = build_token_table(DataConfig(files=str(many)), FIELDS)
    path = table.folder / "ids0.bin"
    whole = np.fromfile(path, np.uint16)
    damaged = whole.copy()
    damaged[place] = max(WORDS.tokenizer.get_vocab().values()) + 1
    damaged.tofile(path)
    build_token_table(DataConfig(files=str(many)), FIELDS)
    assert "sentence has ids past the vocabulary" in caplog.text
    assert np.array_equal(np.fromfile(path, np.uint16), whole)


def test_an_older_format_is_built_anew(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = build_token_table(DataConfig(files=str(many)), FIELDS)
    meta = (table.folder / "meta.json").read_text()
    (table.folder / "meta.json").write_text(meta.replace('"format": 1', '"format": 0'))
    build_token_table(DataConfig(files=str(many)), FIELDS)
    assert TokenTable.open(table.folder).n_rows == 3000


def test_each_release_of_tokenizers_has_tables_of_its_own(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = set()
    for release in ("0.23.3", "9.9", "9.9"):
        monkeypatch.setattr("tokenizers.__version__", release)
        folders.add(build_token_table(DataConfig(files=str(many)), FIELDS).folder)
    assert len(folders) == 2


def test_large_vocabularies_take_four_bytes_a_token(many: Path) -> None:
    large: Any = WordTokenization(vocabulary=250_000)
    table = build_token_table(DataConfig(files=str(many)), {"sentence": ("sentence", large)})
    assert table.fields["sentence"].ids.dtype == np.uint32
    assert int(table.fields["sentence"].ids.max()) > 1 << 16
    text = many.read_text().splitlines()[16]
    assert table.fields["sentence"].row(16).tolist() == large.ids_and_cut([text])[0][0]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False
