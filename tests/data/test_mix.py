"""Mixes: how many batches of each set, one set a step on all devices, resume, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embedlab.data.distinct import PerLabelPlan
from embedlab.data.kinds import data_config, data_kind
from embedlab.data.mix import MixPlan, largest_remainder
from embedlab.data.module import SentenceDataModule
from embedlab.data.plan import BatchPlan
from embedlab.data.resident import ResidentTable
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError

SIZES = (40, 16, 90)


def plan(
    sampling: str = "proportional", rank: int = 0, world: int = 1, seed: int = 3, **more: Any
) -> MixPlan:
    parts = [BatchPlan(n, 4, seed + i, world, rank) for i, n in enumerate(SIZES)]
    starts = [0, *np.cumsum(SIZES).tolist()][:-1]
    return MixPlan(parts, starts, seed, sampling, **more)  # type: ignore[arg-type]


def sets_of(batches: list[np.ndarray]) -> list[int]:
    edges = np.cumsum(SIZES)
    found = [np.searchsorted(edges, batch, side="right") for batch in batches]
    assert all(len(set(one.tolist())) == 1 for one in found)
    return [int(one[0]) for one in found]


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_an_epoch_in_proportion_has_every_batch_of_every_set_once(epoch: int) -> None:
    batches = plan().whole_epoch(epoch)
    assert Counter(sets_of(batches)) == {0: 10, 1: 4, 2: 22}
    rows = np.concatenate(batches)
    assert len(set(rows.tolist())) == len(rows) == 4 * len(plan())
    assert sets_of(batches) != sets_of(plan().whole_epoch(epoch + 1))


def test_in_turn_until_the_smallest_is_through_and_no_row_of_the_others_is_left_out() -> None:
    mixed = plan("round_robin")
    assert len(mixed) == 3 * 4
    epochs = [mixed.whole_epoch(epoch) for epoch in range(6)]
    assert all(sets_of(batches) == [0, 1, 2] * 4 for batches in epochs)
    # 22 batches of the largest set in its own epochs: 5.5 mixed ones.
    large = [batch for batches in epochs for batch in batches if batch[0] >= 56][:22]
    assert len(set(np.concatenate(large).tolist())) == 88


@given(
    temperature=st.floats(1, 8), steps=st.integers(1, 80) | st.none(),
    weights=st.lists(st.floats(0.1, 5), min_size=3, max_size=3),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_counts_of_temperature_are_the_largest_remainders(
    temperature: float, steps: int | None, weights: list[float]
) -> None:
    mixed = plan("temperature", temperature=temperature, steps=steps, weights=weights)
    total = steps or 36
    raw = [(w * n) ** (1 / temperature) for w, n in zip(weights, SIZES, strict=True)]
    exact = [total * value / sum(raw) for value in raw]
    assert len(mixed) == sum(mixed.counts) == total
    assert all(abs(count - value) < 1 for count, value in zip(mixed.counts, exact, strict=True))
    for epoch in range(3):
        found = Counter(sets_of(mixed.whole_epoch(epoch)))
        assert [found[i] for i in range(3)] == mixed.counts


def test_a_set_goes_on_where_the_last_epoch_left_it() -> None:
    mixed = plan("temperature", temperature=2.0, steps=7)
    own = {i: [] for i in range(3)}
    for epoch in range(12):
        for place, batch in zip(sets_of(batches := mixed.whole_epoch(epoch)), batches, strict=True):
            own[place].append(batch - mixed.starts[place])
    for place, found in own.items():
        part = mixed.parts[place]
        expected = [batch for e in range(12) for batch in part.whole_epoch(e)][: len(found)]
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("sampling", ["proportional", "round_robin", "temperature"])
def test_rows_that_are_left_are_those_without_a_batch_of_their_set(sampling: str) -> None:
    assert plan(sampling).left == sum(n % 4 for n in SIZES) == 2
    assert BatchPlan(10, 4, drop_last=False).left == 0


def test_remainders() -> None:
    assert largest_remainder(np.array([0.5, 0.3, 0.2]), 7) == [4, 2, 1]
    assert largest_remainder(np.array([0.25] * 4), 2) == [1, 1, 0, 0]


@pytest.mark.parametrize("sampling", ["proportional", "round_robin", "temperature"])
def test_ranks_share_the_batches_of_one_set(sampling: str) -> None:
    ranks = [plan(sampling, rank, 2) for rank in range(2)]
    epochs = [[mixed.share(batch) for batch in mixed.whole_epoch(1)] for mixed in ranks]
    for both in zip(*epochs, strict=True):
        rows = np.concatenate(both)
        assert len(set(rows.tolist())) == 8
        sets_of([rows])


def test_a_set_shares_its_batches_out_in_its_own_way() -> None:
    """One that is not the first of the mix: both rows of a label are on one device."""
    labels = np.arange(24) // 2
    for rank in range(2):
        parts = [BatchPlan(40, 4, 1, 2, rank), PerLabelPlan(24, 4, 2, 2, rank, per_label=2, labels=labels)]
        mixed = MixPlan(parts, [0, 40], 3)
        shares = [mixed.share(batch) - 40 for batch in mixed.whole_epoch(1) if batch[0] >= 40]
        assert len(shares) == 3
        assert all(set(Counter(labels[rows].tolist()).values()) == {2} for rows in shares)


# ---- through the data module


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    pairs, rated = tmp_path / "pairs.csv", tmp_path / "rated.csv"
    pairs.write_text("anchor,positive\n" + "".join(f"a cat {n},a dog {n}\n" for n in range(30)))
    rated.write_text("first,second,score\n" + "".join(f"lake {n},a tree {n},{n / 4}\n" for n in range(12)))
    return {"pairs": pairs, "rated": rated}


def mixed(files: dict[str, Path], **settings: Any) -> Any:
    sets = {
        "a": {"name": "pairs", "files": str(files["pairs"])},
        "b": {"name": "scored", "files": str(files["rated"])},
    }
    return data_config({"mix": sets, "batch_size": 4, "max_length": 24, **settings})


def module(files: dict[str, Path], tokenization: Tokenization, **settings: Any) -> SentenceDataModule:
    config = mixed(files, **settings)
    fields = {
        name: {role: (role, tokenization) for role in data_kind(one.config.name).roles}
        for name, one in config.sets.items()
    }
    return SentenceDataModule(config, fields, seed=5)


def test_a_batch_has_the_views_and_numbers_of_its_set(
    files: dict[str, Path], tokenization: Tokenization
) -> None:
    data = module(files, tokenization)
    seen = Counter()
    for batch in data.train_dataloader():
        seen[batch["data_set"]] += 1
        views = {name for name, value in batch.items() if isinstance(value, dict)}
        assert views == ({"anchor", "positive"} if batch["data_set"] == "a" else {"first", "second"})
        if batch["data_set"] == "b":
            torch.testing.assert_close(batch["score"], (batch["rows"] - 30) / 4)
            texts = [f"lake {row - 30}" for row in batch["rows"].tolist()]
            for row, text in zip(batch["first"]["input_ids"].tolist(), texts, strict=True):
                assert row[: len(ids := tokenization.ids([text])[0])] == ids
    assert seen == {"a": 7, "b": 3}
    assert data.describe_rows([30]).endswith("rated.csv:2")


def test_rows_for_a_device_are_gathered_to_the_same_batch(
    files: dict[str, Path], tokenization: Tokenization
) -> None:
    host, card = module(files, tokenization), module(files, tokenization)
    card.emit = "rows"
    resident = ResidentTable(card.table, "cpu")
    for one, other in zip(host.train_dataloader(), card.train_dataloader(), strict=True):
        found = resident.gather(other["rows"], other["lengths"])
        for view in other["lengths"]:
            for key, value in found[view].items():
                assert torch.equal(value, one[view][key])
        assert one["data_set"] == other["data_set"]


@pytest.mark.parametrize("done", [0, 1, 6, 10])
def test_a_run_goes_on_in_the_middle_of_an_epoch(
    files: dict[str, Path], tokenization: Tokenization, done: int
) -> None:
    straight = module(files, tokenization).train_dataloader()
    expected = [batch["rows"].tolist() for _ in range(2) for batch in straight]
    first = module(files, tokenization)
    loader = first.train_dataloader()
    for _ in zip(range(done), loader, strict=False):
        pass
    second = module(files, tokenization)
    second.load_state_dict(first.state_dict())
    went_on = second.train_dataloader()
    rest = [batch["rows"].tolist() for batch in went_on]
    rest += [batch["rows"].tolist() for batch in went_on] if done < 10 else []
    assert rest == expected[done : done + len(rest)]
    other = module(files, tokenization, sampling="round_robin")
    with pytest.raises(UserError, match="sampling"):
        other.load_state_dict(first.state_dict())


BEFORE = {"sampling": "temperature", "no_duplicates": True}


@pytest.mark.parametrize(("before", "after"), [
    ({}, {"no_duplicates": True}), (BEFORE, {"no_duplicates": False}), (BEFORE, {"weight": 2.0}),
    ({**BEFORE, "weight": 2.0}, {"weight": 1.0}), (BEFORE, {"temperature": 2.0}), (BEFORE, {"epoch_steps": 3}),
])  # fmt: skip
def test_a_checkpoint_of_other_batches_is_refused(
    before: dict[str, Any], after: dict[str, Any], files: dict[str, Path], tokenization: Tokenization
) -> None:
    def made(weight: float = 1.0, **settings: Any) -> SentenceDataModule:
        data = module(files, tokenization, **settings)
        data.config.mix["a"]["weight"] = weight
        data.config.__dict__.pop("sets", None)
        return data

    state = made(**before).state_dict()
    made(**before).load_state_dict(state)
    with pytest.raises(UserError, match="the checkpoint was made with"):
        made(**{**before, **after}).load_state_dict(state)


def test_keys_that_are_each_sets_own_are_refused_beside_them(files: dict[str, Path]) -> None:
    for key, value in (("negatives", 2), ("score_range", [0, 5]), ("limit", 3), ("prompts", {"anchor": "q: "}),
                       ("columns", {"anchor": "x"}), ("per_label", 2), ("duplicates", "drop")):  # fmt: skip
        with pytest.raises(UserError, match=rf"data\.{key}.*data\.mix\.NAME\.{key}="):
            mixed(files, **{key: value})
    # A mix takes the place of the source that an experiment names.
    assert mixed(files, hub="x", split="dev").names == ("pairs", "scored")


@pytest.mark.parametrize(("settings", "says"), [
    ({"batch_size": 16}, r"12 rows are less than one batch of 16.*data\.mix\.b"),
    ({"no_duplicates": True, "mega_batch": 4}, r"data\.mega_batch"),
    ({"drop_last": False}, r"data\.drop_last"),
    ({"temperature": 0.5}, r"must be at least 1.*data\.temperature"),
    ({"epoch_steps": 4}, r"data\.epoch_steps"),
    ({"mix": {"a": {"name": "pairs", "files": "x", "batch_size": 4}}}, r"data\.mix\.a\.batch_size"),
    ({"mix": {"a": {"name": "pears", "files": "x"}}}, r"data\.mix\.a\.name=pears"),
    ({"mix": {"a": {"name": "pairs"}}}, r"data\.mix\.a\.files"),
    ({"mix": {"a": {"name": "pairs", "files": "x", "weight": 2}}}, r"data\.mix\.a\.weight"),
    ({"mix": {"a": {"name": "pairs", "files": "x", "score_range": [0, 5]}}}, r"data\.mix\.a\.score_range"),
    ({"mix": {"a": 3}}, r"data\.mix\.a"),
    ({"sampling": "temperature", "epoch_steps": 1}, r"none of the 1 steps.*data\.mix\.b"),
    ({"mix": {}, "name": "mix"}, r"data\.mix.*data\.mix\.NAME="),
])  # fmt: skip
def test_mixes_that_cannot_be_are_refused(
    settings: dict[str, Any], says: str, files: dict[str, Path], tokenization: Tokenization
) -> None:
    with pytest.raises(UserError, match=says):
        module(files, tokenization, **settings).train_dataloader()


@pytest.mark.parametrize(("kind", "head", "number"), [
    ("labelled", "text,label", "label"), ("scored", "sentence1,sentence2,score", "score"),
])  # fmt: skip
@pytest.mark.parametrize("mix", [False, True])
def test_rows_that_are_all_kept_with_one_label_or_score_are_refused_by_the_name_of_their_set(
    kind: str, head: str, number: str, mix: bool, tmp_path: Path, tokenization: Tokenization
) -> None:
    file = tmp_path / "rows.csv"
    texts = [f"a cat {n}" if kind == "labelled" else f"a cat {n},a dog {n}" for n in range(20)]
    file.write_text("\n".join([head, *(f"{text},{n // 10}" for n, text in enumerate(texts))]) + "\n")
    own, key = (r"data\.mix\.a",) * 2 if mix else ("data", f"data={kind}")
    few = rf"1 row is less than one batch of 4 \({'data.mix.a' if mix else 'data.batch_size=4'}\)"
    for limit, says in (
        (10, rf"rows\.csv: all 10 rows .* one {number} \({key}\).*{own}\.limit"),
        (1, few),
        (12, None),
    ):
        own = {"files": str(file), "name": kind, "limit": limit}
        config = data_config({"batch_size": 4, "max_length": 24, **({"mix": {"a": own}} if mix else own)})
        fields: Any = {role: (role, tokenization) for role in data_kind(kind).roles}
        data = SentenceDataModule(config, {"a": fields} if mix else fields, seed=5)
        if says is None:
            assert len(data.plan(1)) == 3
        else:
            with pytest.raises(UserError, match=says):
                data.plan(1)


@pytest.mark.parametrize(("settings", "says"), [
    ({"name": "scored", "score_range": [0, 2]},
     r"rated\.csv:\d+: score 2\.?\d* is outside .*\(data\.mix\.b\.score_range\)"),
    ({"name": "scored", "max_chars": 5}, r"\(data\.mix\.b\.max_chars=5\).*data\.mix\.b\.overlong=drop"),
    ({"name": "scored", "columns": {"score": "number"}, "ignore_columns": ["score"]},
     r"rated\.csv:3: the score is 'nan', not a number \(data\.mix\.b\)"),
    ({"name": "pairs", "columns": {"anchor": "x"}},
     r"data\.mix\.b\.columns\.anchor=x.*Fix: data\.mix\.b\.columns\.anchor=NAME"),
    ({"name": "pairs", "columns": {"anchor": "first", "positive": "second"}},
     r"data\.mix\.b=pairs.*Fix: data\.mix\.b\.name=scored data\.mix\.b\.columns\.score=score"),
])  # fmt: skip
def test_a_mistake_in_the_rows_of_a_set_is_said_by_its_own_keys(
    settings: dict[str, Any], says: str, files: dict[str, Path], tokenization: Tokenization
) -> None:
    rated = files["rated"].read_text().splitlines()
    numbers = ["number", "2", "nan", *("1" * 10)]
    files["rated"].write_text("\n".join(map(",".join, zip(rated, numbers, strict=True))) + "\n")
    config = data_config({"mix": {"b": {"files": str(files["rated"]), **settings}}, "batch_size": 4})
    views: Any = {"b": {role: (role, tokenization) for role in data_kind(settings["name"]).roles}}
    with pytest.raises(UserError, match=says):
        SentenceDataModule(config, views, seed=5).prepare_data()
