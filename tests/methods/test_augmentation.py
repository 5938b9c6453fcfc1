"""Views: repeated tokens stand behind themselves; each augmentation is what its name says; no other token moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embedlab.methods.augmentation import augmented, most_more, most_repeats, repeat_tokens, uniform

LENGTHS = (2, 3, 4, 9, 22, 32)
PAD = 0


def rows(width: int = 32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of distinct ids, with a special token at either end: ids, mask, inner."""
    place, n = torch.arange(width), torch.tensor(LENGTHS)[:, None]
    mask = (place < n).long()
    inner = ((place > 0) & (place < n - 1)).long()
    return (100 + place) * mask, mask, inner


@pytest.mark.parametrize("rule", ["paper", "released"])
@pytest.mark.parametrize("redraw", ["step", "once"])
def test_without_the_second_ones_it_is_the_sentence(rule: str, redraw: str) -> None:
    ids, mask, inner = rows()
    seen = {n: set[int]() for n in LENGTHS}
    for draw in range(200):
        torch.manual_seed(draw)
        numbers = torch.arange(len(ids)) + 1000 * draw if redraw == "once" else None
        new = repeat_tokens(ids, mask, inner, 0.32, rule, PAD, numbers)  # type: ignore[arg-type]
        assert new.ids.shape == (6, 32 + most_repeats(32, 0.32, rule))  # type: ignore[arg-type]
        for i, n in enumerate(LENGTHS):
            row, real, second = new.ids[i], new.mask[i].bool(), new.second[i]
            assert row[real & ~second].tolist() == ids[i, :n].tolist()
            at = second.nonzero()[:, 0]
            assert torch.equal(row[at], row[at - 1])
            assert len(set(row[at].tolist())) == len(at)
            assert not {100, 100 + n - 1} & set(row[at].tolist()), "a special token"
            assert (row[~real] == PAD).all()
            assert real.sum() == n + len(at)
            seen[n].add(len(at))
    for n in LENGTHS:
        share = int(0.32 * n) if rule == "released" else max(2, int(0.32 * (n - 2)))
        most = min(10, share) - 1 if rule == "released" else share
        assert seen[n] == set(range(min(max(most, 0), n - 2) + 1)), n


@pytest.mark.parametrize(("rate", "n"), [(0.29, 100), (0.57, 100), (0.53, 100), (0.32, 25), (0.3, 30)])
def test_the_largest_share_is_the_same_in_a_draw_and_in_what_a_row_may_grow_by(rate: float, n: int) -> None:
    """.57 of 100 are 57 tokens in fp32 and 56 in fp64, of which there would be no place for the last one."""
    ids = torch.arange(1, n + 1).expand(4000, -1)
    torch.manual_seed(0)
    new = repeat_tokens(ids, torch.ones_like(ids), torch.ones_like(ids), rate, "paper", PAD)
    grown = new.mask.sum(1) - n
    assert grown.max() == most_repeats(n, rate, "paper") == int(rate * n)
    assert torch.equal((new.ids * ~new.second).sum(1), ids.sum(1))


@pytest.mark.parametrize("rule", ["paper", "released"])
def test_a_draw_of_rows_is_theirs_and_the_seeds_alone(rule: Any) -> None:
    """In whatever batches they come: of other rows, in another order, filled up to another length."""
    ids, mask, inner = rows()
    numbers = torch.tensor([5, 17, 2**40, 0, 99, 1234567])

    def told(batch: list[int], seed: int) -> dict[int, list[int]]:
        longest = int(mask[batch].sum(1).max())
        new = repeat_tokens(
            ids[batch, :longest], mask[batch, :longest], inner[batch, :longest], 0.32, rule, PAD,
            numbers[batch], seed,
        )  # fmt: skip
        return {row: new.ids[i][new.mask[i].bool()].tolist() for i, row in enumerate(batch)}

    whole = {seed: told(list(range(6)), seed) for seed in (0, 1, 42, 2**32 - 1)}
    for seed, found in whole.items():
        for batch in ([3, 1, 5, 0, 2, 4], [0, 4], [1, 2], [3], *([row] for row in range(6))):
            assert told(batch, seed) == {row: found[row] for row in batch}
    assert len({str(found) for found in whole.values()}) == len(whole)


@pytest.mark.parametrize("seed", [0, 1, 42, 2**32 - 1])
def test_the_mixed_numbers_are_even(seed: int) -> None:
    u = uniform(torch.arange(4000), 16, seed)
    assert (u >= 0).all()
    assert (u < 1).all()
    counts = torch.histc(u, 20, 0, 1)
    assert (counts - 3200).abs().max() < 6 * 3200**0.5
    assert torch.corrcoef(u.T).fill_diagonal_(0).abs().max() < 0.08
    assert torch.corrcoef(torch.stack([u[:-1, 0], u[1:, 0]]))[0, 1].abs() < 0.08
    next_seed = uniform(torch.arange(4000), 16, seed + 1)
    assert torch.corrcoef(torch.stack([u[:, 0], next_seed[:, 0]]))[0, 1].abs() < 0.08


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["shuffle", "reverse", "delete", "repeat", "none"])
def test_a_view_is_what_its_name_says(kind: str, share: float) -> None:
    ids, mask, inner = rows()
    seen = set()
    for draw in range(40):
        torch.manual_seed(draw)
        new, real = augmented(ids, mask, inner, kind, share, PAD)  # type: ignore[arg-type]
        assert new.shape == real.shape == (6, 32 + most_more(32, kind, share))  # type: ignore[arg-type]
        assert (new[real == 0] == PAD).all()
        for i, n in enumerate(LENGTHS):
            row = new[i, : int(real[i].sum())].tolist()
            assert real[i, : len(row)].all()
            assert (row[0], row[-1]) == (100, 100 + n - 1)
            found, sentence = row[1:-1], list(range(101, 100 + n - 1))
            count = round(share * len(sentence))
            if kind == "shuffle":
                assert sorted(found) == sentence
            elif kind == "reverse":
                assert found == sentence[::-1]
            elif kind == "delete":
                assert found == sorted(set(found))
                assert len(found) == len(sentence) - min(count, max(len(sentence) - 1, 0))
            elif kind == "repeat":
                assert sorted(set(found)) == sentence
                assert found == sorted(found)
                assert len(found) == len(sentence) + count
            else:
                assert found == sentence
        seen.add(tuple(new[4].tolist()))
    drawn = kind == "shuffle" or (kind in ("delete", "repeat") and share > 0)
    assert len(seen) > 20 if drawn else len(seen) == 1


def test_every_order_comes_as_often() -> None:
    ids, mask = (
        torch.tensor([[7, 1, 2, 3, 8, 0]]).expand(6000, -1),
        torch.tensor([[1, 1, 1, 1, 1, 0]]).expand(6000, -1),
    )
    inner = torch.tensor([[0, 1, 1, 1, 0, 0]]).expand(6000, -1)
    torch.manual_seed(0)
    new, _ = augmented(ids, mask, inner, "shuffle", 0.2, 0)
    orders, counts = new.unique(dim=0, return_counts=True)
    assert len(orders) == 6
    assert (counts - 1000).abs().max() < 150
