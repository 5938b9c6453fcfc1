"""The garbage collector during long imports: off meanwhile, and on afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from embedlab.cli.imports import first_import


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()  # what a test before these has frozen
    yield
    gc.unfreeze()


@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_is_off_once(fails: bool) -> None:
    try:
        with first_import("no_such_module"):
            assert not gc.isenabled()
            with first_import("no_such_module"):
                assert gc.get_freeze_count() == 0
            if fails:
                raise ImportError
    except ImportError:
        assert fails
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


def test_what_is_imported_already_changes_nothing() -> None:
    with first_import("sys"):
        assert gc.isenabled()
    assert gc.get_freeze_count() == 0
