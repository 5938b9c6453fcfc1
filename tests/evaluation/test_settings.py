from __future__ import annotations

import pytest
import torch

from embedlab.errors import UserError
from embedlab.evaluation.core.settings import scoring_device, whole


def test_a_whole_number_or_the_default() -> None:
    assert whole({}, "depth", 10) == 10
    assert whole({"depth": None}, "depth", 10) == 10
    assert whole({"depth": 3}, "depth", 10) == 3
    assert whole({"depth": 1}, "depth", 10) == 1
    assert whole({"seed": 0}, "seed", 1, least=0) == 0


@pytest.mark.parametrize("value", ["x", 1.5, True, 0, -1, [1]])
def test_any_other_is_one_line(value: object) -> None:
    with pytest.raises(UserError, match=r"must be a whole number from 1 up \(depth=.*Fix: depth=10"):
        whole({"depth": value}, "depth", 10)


def test_scores_are_computed_on_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert scoring_device(None) == scoring_device("auto") == device
    assert [scoring_device(name) for name in ("cpu", "cuda:1", "mps", "mps:0")] == [
        "cpu",
        "cuda:1",
        "cpu",
        "cpu",
    ]
