"""The data module under the ordinary Trainer: above all, that a resumed run sees the rows that it would have seen."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from embedlab.config.data import DataConfig
from embedlab.data.module import SentenceDataModule
from embedlab.data.table import PackedTable
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from tests.data.standin import WordTokenization

WORDS: Any = WordTokenization()
BATCHES = 12  # of an epoch: 100 rows in batches of 8


class Recorder(LightningModule):
    """Records the rows of its batches; its weight depends on every one of them, in their order."""

    def __init__(self, manual: bool = False, fail_at: int | None = None, estimate: bool = True) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.seen: list[list[int]] = []
        self.automatic_optimization = not manual
        self.fail_at = fail_at
        self.estimate = estimate

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        if len(self.seen) == self.fail_at:
            raise KeyError("a failure in the step")
        self.seen.append(batch["rows"].tolist())
        noise = torch.rand(1, dtype=torch.float64)
        loss = (self.weight * batch["rows"].double().mean() * (1 + noise)).sin().sum()
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        if self.estimate:  # as schedules do; Lightning then makes the loader before it restores its counters
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["random"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.random = checkpoint["random"]

    def on_train_start(self) -> None:
        if hasattr(self, "random"):
            torch.set_rng_state(self.random)

    def on_train_end(self) -> None:
        loop = self.trainer.fit_loop
        self.ended = (self.trainer.current_epoch, self.global_step, loop.epoch_loop._batches_that_stepped)


@dataclass
class SaveAt(Callback):
    """Saves a checkpoint in one hook, at its n-th call."""

    hook: str
    call: int
    path: Path
    calls: int = 0

    def _called(self, trainer: Trainer, hook: str) -> None:
        if hook == self.hook and not trainer.sanity_checking:
            self.calls += 1
            if self.calls == self.call:
                trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:  # type: ignore[override]
        self._called(trainer, "batch")

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:  # type: ignore[override]
        self._called(trainer, "validation")

    def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:  # type: ignore[override]
        self._called(trainer, "epoch end")

    def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:  # type: ignore[override]
        self._called(trainer, "epoch start")

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:  # type: ignore[override]
        self._called(trainer, "train end")

    def on_exception(self, trainer: Trainer, *args: Any) -> None:  # type: ignore[override]
        self._called(trainer, "exception")


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "a.txt").write_text("".join(f"row {i} {'word ' * (i % 9)}\n" for i in range(100)))
    return DataConfig(files=str(tmp_path / "a.txt"), batch_size=8, report=False)


def data_of(config: DataConfig, emit: str = "tokens", **settings: Any) -> SentenceDataModule:
    return SentenceDataModule(
        config, {"sentence": ("sentence", WORDS)}, seed=settings.pop("seed", 3), emit=emit, **settings
    )


def trainer_of(*callbacks: Callback, **settings: Any) -> Trainer:
    settings = {"max_epochs": -1 if "max_steps" in settings else 3, **settings}
    return Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        num_sanity_val_steps=0,
        **settings,
    )


def run(
    config: DataConfig,
    *callbacks: Callback,
    resume: Path | None = None,
    model: Recorder | None = None,
    emit: str = "tokens",
    **settings: Any,
) -> Recorder:
    torch.manual_seed(0)
    model = model or Recorder(estimate=settings.pop("estimate", True))
    data = data_of(config, emit, validation=[torch.zeros(1)] if "val_check_interval" in settings else None)
    trainer_of(*callbacks, **settings).fit(model, datamodule=data, ckpt_path=resume, weights_only=True)
    return model


def check_resume(
    config: DataConfig, tmp_path: Path, hook: str, call: int, after: int, **settings: Any
) -> None:
    """A run with a checkpoint after `after` batches goes on as if it had not been stopped."""
    path = tmp_path / "run.ckpt"
    straight = run(config, SaveAt(hook, call, path), **settings)
    assert path.exists()
    resumed = run(config, resume=path, **settings)
    assert len(straight.seen) > after
    assert resumed.seen == straight.seen[after:]
    assert torch.equal(resumed.weight, straight.weight)
    assert resumed.ended == straight.ended  # what schedules, cadences and loggers go by


BY_STEPS, BY_EPOCHS = {"max_steps": 28}, {"max_epochs": 3}
BY_BOTH = {"max_epochs": 3, "max_steps": 1000}
EITHER = pytest.mark.parametrize("until", [BY_STEPS, BY_EPOCHS], ids=["by steps", "by epochs"])
ANY = pytest.mark.parametrize(
    "until", [BY_STEPS, BY_EPOCHS, BY_BOTH], ids=["by steps", "by epochs", "by both"]
)


def test_epochs_differ_and_each_has_every_row_once(config: DataConfig) -> None:
    seen = run(config, max_epochs=2).seen
    assert len(seen) == 2 * BATCHES
    first, second = ([row for rows in part for row in rows] for part in (seen[:BATCHES], seen[BATCHES:]))
    assert len(set(first)) == len(set(second)) == 96
    assert first != second


@EITHER
@pytest.mark.parametrize("k", [5, 12, 13])
def test_resume_after_any_batch(config: DataConfig, tmp_path: Path, k: int, until: dict[str, Any]) -> None:
    check_resume(config, tmp_path, "batch", k, k, **until)


@ANY
@pytest.mark.parametrize("estimate", [False, True])
def test_resume_at_the_end_of_an_epoch(
    config: DataConfig, tmp_path: Path, estimate: bool, until: dict[str, Any]
) -> None:
    check_resume(config, tmp_path, "epoch end", 1, BATCHES, estimate=estimate, **until)


@ANY
def test_resume_at_the_start_of_an_epoch(config: DataConfig, tmp_path: Path, until: dict[str, Any]) -> None:
    check_resume(config, tmp_path, "epoch start", 2, BATCHES, **until)


@EITHER
@pytest.mark.parametrize(("call", "after"), [(1, 4), (3, 12)])
def test_resume_with_validation_in_between(
    config: DataConfig, tmp_path: Path, call: int, after: int, until: dict[str, Any]
) -> None:
    check_resume(config, tmp_path, "validation", call, after, val_check_interval=4, **until)


@pytest.mark.parametrize(
    ("hook", "call", "after"), [("validation", 2, 10), ("validation", 3, 15), ("batch", 10, 10)]
)
def test_resume_with_validation_over_epochs(
    config: DataConfig, tmp_path: Path, hook: str, call: int, after: int
) -> None:
    settings = {"val_check_interval": 5, "check_val_every_n_epoch": None, **BY_STEPS}
    check_resume(config, tmp_path, hook, call, after, **settings)


@EITHER
@pytest.mark.parametrize("k", [4, 12])
def test_resume_with_accumulation(config: DataConfig, tmp_path: Path, k: int, until: dict[str, Any]) -> None:
    settings = {**until, "accumulate_grad_batches": 2}
    if "max_steps" in settings:
        settings["max_steps"] = 15
    check_resume(config, tmp_path, "batch", k, k, **settings)


@EITHER
@pytest.mark.parametrize(("hook", "call", "after"), [("batch", 3, 3), ("batch", 7, 7), ("epoch end", 1, 7)])
def test_resume_with_epochs_cut_short(
    config: DataConfig, tmp_path: Path, hook: str, call: int, after: int, until: dict[str, Any]
) -> None:
    until = {key: min(value, 20) for key, value in until.items()}
    check_resume(config, tmp_path, hook, call, after, limit_train_batches=7, **until)


def test_resume_of_a_resumed_run(config: DataConfig, tmp_path: Path) -> None:
    straight = run(config, SaveAt("batch", 5, tmp_path / "1.ckpt"), max_steps=40)
    second = run(config, SaveAt("batch", 9, tmp_path / "2.ckpt"), resume=tmp_path / "1.ckpt", max_steps=40)
    third = run(config, SaveAt("epoch end", 1, tmp_path / "3.ckpt"), resume=tmp_path / "2.ckpt", max_steps=40)
    fourth = run(config, resume=tmp_path / "3.ckpt", max_steps=40)
    assert second.seen == straight.seen[5:]
    assert third.seen == straight.seen[14:]
    assert fourth.seen == straight.seen[24:]
    assert torch.equal(fourth.weight, straight.weight)


@pytest.mark.parametrize("hook", ["epoch end", "train end"])
def test_a_finished_run_goes_on_with_more_steps(config: DataConfig, tmp_path: Path, hook: str) -> None:
    straight = run(config, max_steps=30)
    run(config, SaveAt(hook, 2 if hook == "epoch end" else 1, tmp_path / "a.ckpt"), max_steps=17)
    assert run(config, resume=tmp_path / "a.ckpt", max_steps=30).seen == straight.seen[17:]


@pytest.mark.parametrize("limits", [{}, {"max_steps": 1000}])
def test_a_finished_run_goes_on_with_more_epochs(
    config: DataConfig, tmp_path: Path, limits: dict[str, int]
) -> None:
    straight = run(config, max_epochs=3)
    run(config, SaveAt("train end", 1, tmp_path / "a.ckpt"), max_epochs=2, **limits)
    resumed = run(config, resume=tmp_path / "a.ckpt", max_epochs=3, **limits)
    assert resumed.seen == straight.seen[2 * BATCHES :]


def test_a_failed_step_is_done_again(config: DataConfig, tmp_path: Path) -> None:
    straight = run(config, max_steps=20)
    with pytest.raises(KeyError, match="a failure in the step"):
        run(config, SaveAt("exception", 1, tmp_path / "a.ckpt"), model=Recorder(fail_at=15), max_steps=20)
    assert run(config, resume=tmp_path / "a.ckpt", max_steps=20).seen == straight.seen[15:]


@pytest.mark.parametrize("k", [5, 12])
def test_resume_with_manual_optimisation(config: DataConfig, tmp_path: Path, k: int) -> None:
    straight = run(config, SaveAt("batch", k, tmp_path / "a.ckpt"), model=Recorder(manual=True), max_steps=30)
    resumed = run(config, resume=tmp_path / "a.ckpt", model=Recorder(manual=True), max_steps=30)
    assert resumed.seen == straight.seen[k:]


@pytest.mark.parametrize("change", [{"mega_batch": 4}, {"drop_last": False}, {"shuffle": False}])
def test_resume_with_other_plans(config: DataConfig, tmp_path: Path, change: dict[str, Any]) -> None:
    check_resume(replace(config, **change), tmp_path, "batch", 15, 15, max_steps=30)


def test_row_numbers_alone_in_the_same_order(config: DataConfig, tmp_path: Path) -> None:
    tokens = run(config, max_steps=15)
    rows = run(config, SaveAt("batch", 7, tmp_path / "a.ckpt"), emit="rows", max_steps=15)
    assert rows.seen == tokens.seen
    assert run(config, emit="rows", resume=tmp_path / "a.ckpt", max_steps=15).seen == tokens.seen[7:]


def test_no_warning_that_the_loader_cannot_resume(
    config: DataConfig, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    check_resume(config, tmp_path, "batch", 5, 5, max_steps=20)
    assert not [w for w in recwarn if "not resumable" in str(w.message)]


def test_the_state_is_plain_and_says_where_the_run_is(config: DataConfig, tmp_path: Path) -> None:
    run(config, SaveAt("batch", 15, tmp_path / "a.ckpt"), max_steps=20)
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["SentenceDataModule"]
    assert json.loads(json.dumps(state)) == state
    assert {key: state[key] for key in ("epoch", "batch", "n_rows", "batch_size", "world", "seed")} == {
        "epoch": 1,
        "batch": 3,
        "n_rows": 100,
        "batch_size": 8,
        "world": 1,
        "seed": 3,
    }


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"batch_size": 4}, "data.batch_size"),
        ({"limit": 99}, "data"),
        ({"mega_batch": 2}, "data.mega_batch"),
        ({"shuffle": False}, "data.shuffle"),
    ],
)
def test_resume_with_other_data_is_refused(
    config: DataConfig, tmp_path: Path, change: dict[str, Any], key: str
) -> None:
    run(config, SaveAt("batch", 5, tmp_path / "a.ckpt"), max_steps=6)
    with pytest.raises(UserError, match="the checkpoint was made with") as caught:
        run(replace(config, **change), resume=tmp_path / "a.ckpt", max_steps=20)
    assert caught.value.key == key


def test_resume_with_changed_text_or_seed_is_refused(config: DataConfig, tmp_path: Path) -> None:
    run(config, SaveAt("batch", 5, tmp_path / "a.ckpt"), max_steps=6)
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["SentenceDataModule"]
    with pytest.raises(UserError, match=r"\(seed=4\). Fix: seed=3"):
        data_of(config, seed=4).load_state_dict(state)
    path = Path(str(config.files))
    path.write_text(path.read_text().replace("row 7", "row seven"))
    with pytest.raises(UserError, match="made with other text"):
        data_of(config).load_state_dict(state)


def test_a_table_with_less_than_a_batch(config: DataConfig) -> None:
    with pytest.raises(UserError, match="100 rows are less than one batch"):
        run(replace(config, batch_size=101), max_steps=1)


def test_one_table_on_each_device(config: DataConfig) -> None:
    data = data_of(config)
    resident = data.resident("cpu")
    assert data.resident(torch.device("cpu")) is resident
    assert data.n_rows == 100
    assert data.describe_rows([99]) == f"{config.files}:100"
    assert data.report["rows"] == 100


def test_packed_data(config: DataConfig, tokenization: Tokenization) -> None:
    data = SentenceDataModule(
        replace(config, pack=16, batch_size=2), {"sentence": ("sentence", tokenization)}, 0
    )
    assert isinstance(data.table, PackedTable)
    batch = next(iter(data.train_dataloader()))
    assert batch["sentence"]["input_ids"].shape == (2, 16)
    assert batch["tokens"] == batch["padded_tokens"] == 32


def test_the_report_is_printed_once_to_standard_error(
    config: DataConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    data = data_of(replace(config, report=True))
    data.prepare_data()
    data.prepare_data()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("Tokens a row") == 1
    assert str(config.files) in "".join(printed.err.split())


def test_two_ranks_share_every_batch(config: DataConfig) -> None:
    alone = data_of(replace(config, batch_size=8)).train_dataloader()
    shared = []
    for rank in range(2):
        data = data_of(replace(config, batch_size=4))
        data.trainer = type("Trainer", (), {"world_size": 2, "global_rank": rank, "current_epoch": 0})()  # type: ignore[assignment]
        loader = data.train_dataloader()
        shared.append([rows.tolist() for rows in loader.plan.epoch(0)])
    for i, rows in enumerate(alone.plan.epoch(0)):
        assert sorted(shared[0][i] + shared[1][i]) == sorted(rows.tolist())
