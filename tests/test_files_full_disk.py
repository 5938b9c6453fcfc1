"""A full disk goes by its own name, whichever library met it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError

from embedlab.cli.exits import as_user_error
from embedlab.files import writing


def torch_meets_it() -> None:
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    except OSError:
        # What torch 2.13 raises of a file object that takes no more.
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 768 vs 662")  # noqa: B904


def safetensors_meets_it() -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def the_system_meets_it() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")  # as `write` does, of no name


@pytest.mark.parametrize("meet", [torch_meets_it, safetensors_meets_it, the_system_meets_it])
def test_it_is_one_line_with_the_path_and_the_fix(meet: Callable[[], None], tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, writing(tmp_path / "export"):
        meet()
    line = (
        f"{tmp_path / 'export'}: no space left on device. Fix: free space on this disk, or a path on another"
    )
    assert str(as_user_error(caught.value)) == line


@pytest.mark.parametrize(
    "error", [SafetensorError("a header too large"), RuntimeError("of a shape"), OSError(errno.EIO, "broken")]
)
def test_anything_else_stays_what_it_is(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, writing(tmp_path):
        raise error
    assert caught.value is error
