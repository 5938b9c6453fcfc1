from __future__ import annotations

import pickle

import pytest

from embedlab.errors import UserError, nearest, one_of, printable


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("no rows", fix="add one"), "no rows. Fix: add one"),
        (UserError("no rows.", file="a.csv", fix="add one"), "a.csv: no rows. Fix: add one"),
        (UserError("not UTF-8", file="a.csv", row=7, fix="iconv"), "a.csv:7: not UTF-8. Fix: iconv"),
        (
            UserError("too many blocks", key="pooling.n", value=13, fix="1 to 12"),
            "too many blocks (pooling.n=13). Fix: 1 to 12",
        ),
        (
            UserError("missing", key="data.files", fix="add data.files=…"),
            "missing (data.files). Fix: add data.files=…",
        ),
        (
            UserError(
                "no such column",
                file="a.csv",
                row=1,
                key="data.columns.sentence",
                value="text",
                fix="one of a, b",
            ),
            "a.csv:1: no such column (data.columns.sentence=text). Fix: one of a, b",
        ),
        (UserError("zero counts", key="seed", value=0, fix="1"), "zero counts (seed=0). Fix: 1"),
    ],
)
def test_the_line(error: UserError, line: str) -> None:
    assert str(error) == line


def test_the_line_stays_one_line_whatever_is_in_it() -> None:
    line = str(UserError("bad\nvalue", key="k", value="a\x00b\x1b[31m\r\nc", file="odd\nname", fix="a\nb"))
    assert line == r"odd name: bad value (k=a\x00b\x1b[31m c). Fix: a b"


def test_a_long_value_is_shortened() -> None:
    line = str(UserError("too long", key="k", value="x" * 100_000, fix="less"))
    assert len(line) < 200
    assert "(100000 characters)" in line


@pytest.mark.parametrize(
    ("given", "known", "fix"),
    [
        ("mini_sentence", ["mini", "mini-sentence"], "did you mean mini-sentence?"),
        ("minisentence", ["mini", "mini-sentence"], "did you mean mini-sentence?"),
        ("MINI", ["mini", "mini-sentence"], "did you mean mini?"),
        ("int9", ["float32", "int8", "uint8"], "did you mean int8 or uint8?"),
        ("zzz", ["sts", "lee"], "one of sts, lee"),
        (None, ["sts"], "one of sts"),
        (3, [1, 2], "one of 1, 2"),
    ],
)
def test_the_fix_for_a_name_that_is_not_known(given: object, known: list[object], fix: str) -> None:
    assert one_of(given, known) == fix
    assert one_of(given, known, "key=") == fix.replace(" mean ", " mean key=").replace(
        "of ", "of key="
    ).replace(" or ", " or key=").replace(", ", ", key=")
    assert nearest(given, known) == ([fix.split()[3].rstrip("?")] if "mean" in fix else [])


def test_it_survives_the_way_back_from_a_worker_process() -> None:
    error = UserError("bad", file="a", row=3, key="k", value=1, fix="f")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert vars(again) == vars(error)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a cat", "a cat"),
        ("naïve 中文\u3000🙂 👩\u200d🔬", "naïve 中文\u3000🙂 👩\u200d🔬"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\x9b31m", r"\x9b31m"),
        ("\ud800", r"\ud800"),
        ("\u2028\u2066", r"\u2028\u2066"),
    ],
)
def test_what_a_terminal_would_obey_is_shown(text: str, shown: str) -> None:
    assert printable(text) == shown
