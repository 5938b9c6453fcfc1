"""The LightningDataModule of every kind of sentence data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.loops.progress import _ProcessedTracker
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only

from embedlab.config.data import DataConfig
from embedlab.data.build import FieldSpec, build_token_table
from embedlab.data.contamination.overlap import Overlap
from embedlab.data.kinds import in_set
from embedlab.data.loader import BatchLoader
from embedlab.data.mix import MixedTable
from embedlab.data.plan import BatchPlan
from embedlab.data.plans import Plan, training_plan
from embedlab.data.report import print_report
from embedlab.data.resident import ResidentTable
from embedlab.data.table import PackedTable, Table
from embedlab.errors import UserError


class SentenceDataModule(LightningDataModule):
    """Builds the token cache once, and gives each device its batches, from any point of the run on.

    The run's place in the data is part of every checkpoint: the next batch of a resumed run is the one that
    the run would have had, in the middle of an epoch as at its edge.

    Args:
        config: source and batches.
        fields: name of a view -> (role of its text, how it is tokenised); of a mix, name of a set -> its fields.
        seed: of the order of the rows; the same on every device.
        emit: ``tokens`` or ``rows`` (`BatchLoader`).
        validation: what `val_dataloader` gives; nothing here has a use for it, but without one Lightning runs
            no validation, and with it no callback that scores.
        overlap: the evaluation sets that ``config.decontaminate`` names.
    """

    def __init__(
        self,
        config: DataConfig,
        fields: Mapping[str, FieldSpec] | Mapping[str, Mapping[str, FieldSpec]],
        seed: int,
        emit: str = "tokens",
        validation: Iterable[Any] | None = None,
        overlap: Overlap | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.views = dict(fields)
        self.seed = seed
        self.emit = emit
        self.validation = validation
        self.overlap = overlap
        self._resident: ResidentTable | None = None
        self._loader: BatchLoader | None = None
        self._resumed: dict[str, Any] | None = None
        self._reported = False
        self._plans: dict[tuple[int, int], Plan] = {}

    # ---- the table
    # ----------------------------------------------------------------------------------------------

    @cached_property
    def table(self) -> Table | MixedTable:
        """The rows of tokens: a `TokenTable`, a `PackedTable` view of one with `data.pack`, or those of a mix."""
        if self.config.mix:
            parts = {}
            for name, one in self.config.sets.items():
                with in_set(name):
                    parts[name] = build_token_table(one.config, self.views[name], overlap=self.overlap)  # type: ignore[arg-type]
            return MixedTable(parts)
        table = build_token_table(self.config, self.views, overlap=self.overlap)  # type: ignore[arg-type]
        return table if self.config.pack is None else PackedTable(table, self.config.pack)

    def prepare_data(self) -> None:
        """Build the token cache where there is none, and print its report (once).

        Raises:
            UserError: bad input, named by file and row.
        """
        report = self.table.report
        if self.config.report and not self._reported:
            for one in report["sets"].values() if self.config.mix else [report]:
                rank_zero_only(print_report)(one)
        self._reported = True

    @property
    def n_rows(self) -> int:
        """Rows of an epoch (sentences, or packed sequences)."""
        return self.table.n_rows

    @property
    def report(self) -> dict[str, Any]:
        """The data report, as in the cache's ``report.json``."""
        return self.table.report

    def describe_rows(self, rows: Sequence[int]) -> str:
        """Files and row numbers of rows of the table."""
        return self.table.describe(rows)

    def resident(self, device: torch.device | str) -> ResidentTable:
        """The table's tokens on a device; put there once."""
        device = torch.device(device)
        if self._resident is None or self._resident.device != device:
            self._resident = ResidentTable(self.table, device)
        return self._resident

    # ---- batches
    # ------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> BatchLoader:
        """This device's batches; a later epoch's for a trainer that has done some.

        Raises:
            UserError: fewer rows than a batch.
        """
        loader = self._loader_of(self.plan(*self._place))
        loader.progress = self._progress
        if self._resumed is not None:
            loader.load_state_dict(self._resumed)
            self._resumed = None
        elif self.trainer is not None:
            loader.set_epoch(self.trainer.current_epoch)
        self._loader = loader
        return loader

    def predict_dataloader(self) -> BatchLoader:
        """All rows in their order, this device's share of each batch."""
        if self.config.mix:
            raise UserError("its sets have texts of their own", key="data.mix", fix="one of them alone")
        size = self.config.batch_size
        return self._loader_of(
            BatchPlan(self.n_rows, size, self.seed, *self._place, drop_last=False, shuffle=False)
        )

    def plan(self, world: int, rank: int = 0) -> Plan:
        """The batches of training on so many devices.

        Raises:
            UserError: fewer rows than a batch.
        """
        if (world, rank) not in self._plans:  # which may have looked at every text
            self._plans[world, rank] = training_plan(self.config, self.table, self.seed, world, rank)
        return self._plans[world, rank]

    @property
    def _place(self) -> tuple[int, int]:
        """Devices, and this one's number."""
        return (1, 0) if self.trainer is None else (self.trainer.world_size, self.trainer.global_rank)

    def _loader_of(self, plan: Plan) -> BatchLoader:
        return BatchLoader(self.table, plan, self.emit, self.config.pad_to_multiple)

    def val_dataloader(self) -> Any:
        return [] if self.validation is None else self.validation

    def _progress(self) -> tuple[int, bool]:
        """Batches that the trainer holds and has not worked on, and whether it has ended the epoch."""
        if self.trainer is None:
            return 0, False
        batches = self.trainer.fit_loop.epoch_loop.batch_progress
        current = cast("_ProcessedTracker", batches.current)
        return current.ready - current.processed, batches.is_last_batch and current.ready == current.processed

    # ---- resuming
    # -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Place in the data, and what makes it a place: plain numbers and strings."""
        place = self._resumed or {"epoch": 0, "batch": 0}
        if self._loader is not None:
            place = self._loader.state_dict()
        return {"epoch": place["epoch"], "batch": place["batch"], **self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at a place that `state_dict` gave.

        Raises:
            UserError: other data, another batch size, another number of devices: the place would be another
                one.
        """
        if self.trainer is not None and self.trainer.state.fn not in (None, TrainerFn.FITTING):
            return
        identity = self._identity()
        for key in dict.fromkeys((*identity, *state_dict)):
            saved, here = state_dict.get(key), identity.get(key)
            if key not in ("epoch", "batch") and saved != here:
                if key in ("n_rows", "data"):
                    what = f"{saved} rows of text, not {here}" if key == "n_rows" else "other text"
                    raise UserError(
                        f"the checkpoint was made with {what}: its place in it means nothing here",
                        key="data",
                        fix="the text that it was made with, or a new run without ckpt_path",
                    )
                name = {"world": "trainer.devices", "seed": "seed"}.get(key, f"data.{key}")
                raise UserError(
                    f"the checkpoint was made with {key}={saved}, this run has {here}: no place is the same",
                    key=name,
                    value=here,
                    fix=f"{name}={'null' if saved is None else saved}",
                )
        self._resumed = {"epoch": state_dict["epoch"], "batch": state_dict["batch"]}
        if self._loader is not None and self._loader.done == 0:
            # Sharded weights are restored after the optimiser is made, which has asked for the loader.
            self._loader.load_state_dict(self._resumed)
            self._resumed = None
        if self.trainer is not None and state_dict["batch"] + state_dict["epoch"] > 0:
            checkpoint = self.trainer._checkpoint_connector._loaded_checkpoint
            if "loops" in checkpoint:
                _rewind_loop_counters(
                    checkpoint["loops"]["fit_loop"], state_dict["epoch"], state_dict["batch"]
                )

    def _identity(self) -> dict[str, Any]:
        config = self.config
        return {
            "n_rows": self.n_rows,
            "data": self.report["content"],
            "batch_size": config.batch_size,
            "mega_batch": config.mega_batch,
            "drop_last": config.drop_last,
            "shuffle": config.shuffle,
            "world": 1 if self.trainer is None else self.trainer.world_size,
            "seed": self.seed,
            # Only where they are set: checkpoints of before there were these go on.
            **{key: value for key in _OF_PLAN if (value := getattr(config, key)) not in (None, False)},
            **({key: getattr(config, key) for key in _OF_MIX} if config.mix else {}),
            **{
                f"mix.{name}.{key}": value
                for name, one in config.sets.items()
                for key, value, usual in (
                    ("weight", one.weight, 1),
                    ("per_label", one.config.per_label, None),
                )
                if value != usual
            },
        }


_OF_PLAN = ("no_duplicates", "per_label")
_OF_MIX = ("sampling", "temperature", "epoch_steps")


def _rewind_loop_counters(loops: dict[str, Any], epoch: int, batch: int) -> None:
    """Rewrite a checkpoint's loop counters so that Lightning 2.6 goes on at this place in the data.

    With a limit of steps it restarts inside the epoch of the checkpoint, even where it has counted that epoch as over;
    it finds no batch left in it and counts it again, so the run would end an epoch early by `max_epochs`. From the last
    batch it goes on rightly. But then it does not count the next epoch as begun: `ready` and `started` of that run's
    own checkpoints are one behind, by which the next resume would take an epoch for over that is not.
    """
    epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    is_over = batch == 0 and epochs["current"]["processed"] == epoch
    begun = epoch if batch == 0 else epoch + 1
    for count in (epochs["total"], epochs["current"]):
        count["ready"] = count["started"] = begun
        count["processed"] = count["completed"] = begun - 1
    if not is_over:
        return
    for count in (batches["total"], batches["current"]):
        count["completed"] = count["processed"] - 1
    batches["is_last_batch"] = True
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
