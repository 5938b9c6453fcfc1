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


def test_a_refusal_says_a_fix() -> None:
    with pytest.raises(TypeError, match="fix"):
        UserError("no rows")  # type: ignore[call-arg]


BOX = ["mini", "mini-sentence"]
MANY = [*"abcdefg", "uint8", "int8"]


@pytest.mark.parametrize(
    ("given", "known", "start", "fix"),
    [
        ("mini_sentence", BOX, "", "did you mean mini-sentence (of mini, mini-sentence)?"),
        ("minisentence", BOX, "ckpt=", "did you mean ckpt=mini-sentence (of mini, mini-sentence)?"),
        ("MINI", ["mini"], "", "did you mean mini?"),
        ("int9", MANY, "store=", "did you mean store=int8 or store=uint8?"),
        ("zzz", ["sts", "lee"], "suite=", "one of suite=sts, suite=lee"),
        (None, ["sts"], "", "one of sts"),
        (3, [1, 2], "", "one of 1, 2"),
    ],
)
def test_the_fix_for_a_name_that_is_not_known(
    given: object, known: list[object], start: str, fix: str
) -> None:
    assert one_of(given, known, start) == fix


@pytest.mark.parametrize(
    "given", ["mini_sentence", "mini-sentense", "minisentence", "Mini-Sentence", "mini-sentences"]
)
def test_a_slip_of_the_pen_is_understood(given: str) -> None:
    assert nearest(given, BOX) == ["mini-sentence"]
    assert nearest("bert-base-uncased", BOX) == []


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
