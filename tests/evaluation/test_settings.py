from __future__ import annotations

import pytest

from embedlab.errors import UserError
from embedlab.evaluation.core.settings import whole


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
