"""What is kept of a stopped evaluation, and for whom."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embedlab.evaluation.core.protocol import ResultCache
from tests.evaluation.helpers import HashedWords


class Known(HashedWords):
    """An encoder that says what it is."""

    def __init__(self, checkpoint: str = "abc") -> None:
        super().__init__()
        self.checkpoint = checkpoint

    def facts(self, sentences: Sequence[str] | None) -> dict[str, Any]:
        return {"checkpoint": self.checkpoint, "dtype": "float32"}


def test_a_part_is_found_by_the_same_encoder_settings_and_data_only(tmp_path: Path) -> None:
    path = tmp_path / "transfer.unfinished"
    ResultCache(path, Known(), mode="test").put("mr", [["a"], [1]], {"scores": {"mr/accuracy": 71.25}})
    assert ResultCache(path, Known(), mode="test").get("mr", [["a"], [1]]) == {
        "scores": {"mr/accuracy": 71.25}
    }
    for encoder, mode, name, data in (
        (Known("abd"), "test", "mr", [["a"], [1]]),
        (Known(), "fast", "mr", [["a"], [1]]),
        (Known(), "test", "cr", [["a"], [1]]),
        (Known(), "test", "mr", [["a"], [0]]),
    ):
        assert ResultCache(path, encoder, mode=mode).get(name, data) is None


def test_an_encoder_that_cannot_say_what_it_is_keeps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "transfer.unfinished"
    ResultCache(path, HashedWords()).put("mr", 1, {})
    assert not path.exists()


def test_a_damaged_file_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "transfer.unfinished"
    for content in ("", "[]", '{"parts": 3}', '{"parts": {"mr": 7}}', '{"parts": {"mr"'):
        path.write_text(content)
        assert ResultCache(path, Known()).get("mr", 1) is None
    ResultCache(path, Known()).put("mr", 1, {"l2": [1e-5]})
    assert ResultCache(path, Known()).get("mr", 1) == {"l2": [1e-5]}
