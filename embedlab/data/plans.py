"""The plan of a run's batches, as its configuration says."""

from __future__ import annotations

from typing import Any

import numpy as np

from embedlab.config.data import DataConfig, kind_name
from embedlab.data.distinct import DistinctPlan, PerLabelPlan
from embedlab.data.kinds import in_set
from embedlab.data.mix import MixedTable, MixPlan
from embedlab.data.plan import GOLDEN, BatchPlan, tell_dropped
from embedlab.data.table import PackedTable, Table
from embedlab.errors import UserError

Plan = BatchPlan | MixPlan
_TOLD_APART_BY = {"labelled": "label", "scored": "score"}
"""Kinds of data whose rows are compared by a number: where all have the same, every loss of them is a constant."""


def training_plan(
    config: DataConfig, table: Table | MixedTable, seed: int, world: int = 1, rank: int = 0
) -> Plan:
    """Which rows of a table are in which batch of training.

    Raises:
        UserError: fewer rows than one batch needs, or all with one label or score; of a mix, by the name of the set.
    """
    if not isinstance(table, MixedTable):
        return _one(config, table, seed, world, rank)
    parts = []
    for place, (name, one) in enumerate(config.sets.items(), 1):
        own = (seed + place * int(GOLDEN)) % 2**64
        with in_set(name, rows=True):
            parts.append(_one(one.config, table.parts[name], own, world, rank))
    plan = MixPlan(
        parts,
        table.starts,
        seed,
        config.sampling,
        config.temperature,
        [one.weight for one in config.sets.values()],
        config.epoch_steps,
    )
    for name, count in zip(config.sets, plan.counts, strict=True):
        if count == 0:
            raise UserError(
                f"none of the {len(plan):,} steps of an epoch is of it",
                key=f"data.mix.{name}",
                fix="a larger data.epoch_steps, data.temperature or weight of the set",
            )
    return plan


def _one(config: DataConfig, table: Table, seed: int, world: int, rank: int) -> BatchPlan:
    try:
        plan = _batches(config, table, seed, world, rank)
    except UserError as error:  # the report, which says so too, is of data that can be trained on
        tell_dropped(error, table.report["read"], table.report["dropped"])
        raise
    number = _TOLD_APART_BY.get(kind_name(config.name))
    if number is not None and np.ptp(table.numbers[number]) == 0:
        # As `data.limit` and dropped rows may leave it, of a source with several.
        raise UserError(
            f"all {table.n_rows:,} rows that are kept have one {number}", file=config.source, key="data",
            value=config.name, fix=f"rows that differ in their {number}, or a larger data.limit",
        )  # fmt: skip
    return plan


def _batches(config: DataConfig, table: Table, seed: int, world: int, rank: int) -> BatchPlan:
    common: dict[str, Any] = {
        "n_rows": table.n_rows,
        "batch_size": config.batch_size,
        "seed": seed,
        "world": world,
        "rank": rank,
        "drop_last": config.drop_last,
        "shuffle": config.shuffle,
    }
    if config.per_label is not None:
        return PerLabelPlan(**common, per_label=config.per_label, labels=table.numbers["label"])
    if config.no_duplicates:
        assert not isinstance(table, PackedTable)
        # Of the texts: a view of the same text in another template has the same ones.
        hashes = {id(view.hashes): view.hashes for view in table.fields.values()}
        return DistinctPlan(**common, hashes=np.stack(list(hashes.values()), axis=1))
    lengths = table.longest if config.mega_batch > 1 else None
    return BatchPlan(**common, mega_batch=config.mega_batch, lengths=lengths)
