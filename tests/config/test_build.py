from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest

from embedlab.config.build import Record as Checked
from embedlab.config.build import build, section, within
from embedlab.errors import UserError


@dataclass(frozen=True)
class Inner:
    a: int = 1


@dataclass(frozen=True)
class Record:
    whole: int = 1
    part: float = 0.5
    flag: bool = True
    text: str = ""
    perhaps: int | None = None
    kind: Literal["a", "b"] = "a"
    either: Literal["auto"] | bool = "auto"
    names: tuple[str, ...] = ()
    kinds: tuple[Literal["a", "b"], ...] = ()
    two: tuple[float, float] = (0.1, 0.9)
    some: list[str] | None = None
    files: str | list[str] | None = None
    devices: int | str | tuple[int, ...] = 1
    columns: dict[str, str | None] | None = None
    inner: Inner = field(default_factory=Inner)
    rate: float = within(0.5, above=0, below=1)
    count: int | None = within(None, least=1)
    anything: Any = None

    def __post_init__(self) -> None:
        if not self.part > 0:  # a TypeError of its own, where the type is wrong
            raise UserError("must be positive", key="g.part", value=self.part, fix="1")


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"part": 1, "perhaps": 3, "either": False, "names": ("x",), "two": (1, 2)},
        {"some": ["en"], "files": "a.txt", "devices": (0, 1), "columns": {"a": None, "b": "c"}},
        {"files": ["a.txt"], "devices": "auto", "inner": Inner(1), "anything": object()},
    ],
)
def test_what_fits_is_taken(values: dict[str, Any]) -> None:
    made = build(Record, values, "g")
    assert all(getattr(made, key) == value for key, value in values.items())


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("whole", 1.5, "not a whole number (g.whole=1.5). Fix: a whole number"),
        ("whole", True, "not a whole number (g.whole=True). Fix: a whole number"),
        ("whole", None, "not a whole number (g.whole=null). Fix: a whole number"),
        ("perhaps", "x", "not a whole number (g.perhaps=x). Fix: a whole number, or null"),
        ("part", "x", "not a number (g.part=x). Fix: a number"),
        ("part", float("inf"), "not a finite number (g.part=inf). Fix: a number"),
        ("part", -1, "must be positive (g.part=-1). Fix: 1"),
        ("flag", "maybe", "not true or false (g.flag=maybe). Fix: true or false"),
        ("text", 3, "not text (g.text=3). Fix: quoted, digits are text: \"g.text='3'\""),
        ("kind", "c", "unknown value (g.kind=c). Fix: one of a, b"),
        ("either", "c", "unknown value (g.either=c). Fix: one of auto, true, false"),
        ("names", "lee", "not a list of texts (g.names=lee). Fix: g.names=[a,b]"),
        ("two", (1,), "not a list of 2 numbers (g.two=(1,)). Fix: g.two=[a,b]"),
        ("some", "en", "not a list of texts (g.some=en). Fix: g.some=[a,b], or null"),
        ("kinds", ("a", "c"), "unknown value (g.kinds=c). Fix: one of a, b"),
        ("kinds", "c", "not a list of what this key takes (g.kinds=c). Fix: g.kinds=[a,b]"),
        ("columns", "a", "a group of keys is meant here, not a value (g.columns=a). Fix: g.columns.KEY=VALUE, or null"),
        ("columns", {"a": 3}, "not text (g.columns.a=3). Fix: quoted, digits are text: \"g.columns.a='3'\", or null"),
        ("rate", 0.0, "must be above 0 and below 1 (g.rate=0.0). Fix: g.rate=0.5"),
        ("rate", 1, "must be above 0 and below 1 (g.rate=1). Fix: g.rate=0.5"),
        ("rate", "1", "not a number (g.rate=1). Fix: a number"),
        ("count", 0, "must be at least 1, or null (g.count=0). Fix: g.count=null"),
        ("inner", 3, "a group of keys is meant here, not a value (g.inner=3). Fix: g.inner.KEY=VALUE"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(key: str, value: object, line: str) -> None:
    with pytest.raises(UserError) as refused:
        build(Record, {key: value}, "g")
    assert str(refused.value) == line


def test_a_record_checks_itself_wherever_it_is_made() -> None:
    @dataclass(frozen=True)
    class Own(Checked):
        section = "own"

        kind: Literal["a", "b"] = "a"
        count: int = within(1, least=1)

    assert replace(Own(), kind="b", count=2) == Own("b", 2)
    for wrong in ({"kind": "c"}, {"count": 0}, {"count": "x"}):
        with pytest.raises(UserError, match=f"own.{next(iter(wrong))}="):
            Own(**wrong)  # type: ignore[arg-type]


def test_a_failure_of_the_record_itself_stays_one() -> None:
    @dataclass
    class Broken:
        a: int = 1

        def __post_init__(self) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build(Broken, {"a": 1}, "g")


@pytest.mark.parametrize("values", [None, 3, "simcse", [1]])
def test_a_group_is_keys_with_values(values: object) -> None:
    with pytest.raises(UserError, match="a group of keys is meant"):
        section(values, "method")


def test_the_fix_has_as_many_places_as_the_list() -> None:
    @dataclass
    class Three:
        w: tuple[float, float, float] = (1.0, 2.0, 3.0)

    with pytest.raises(UserError, match=r"not a list of 3 numbers .*Fix: g.w=\[a,b,c\]"):
        build(Three, {"w": (1.0,)}, "g")
