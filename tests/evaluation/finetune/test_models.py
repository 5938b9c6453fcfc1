"""Heads on every kind of backbone, and the training loop's parts."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import embedlab
from embedlab.encoders.tokenization import Tokenization
from embedlab.evaluation.finetune import fit
from embedlab.evaluation.finetune.buckets import Buckets
from embedlab.evaluation.finetune.config import FineTuneConfig
from embedlab.evaluation.finetune.fit import FineTuning, predict, train
from embedlab.evaluation.finetune.models import Classifier, SpanReader, trainable_copy
from embedlab.evaluation.finetune.rows import Rows
from tests.support import SENTENCES

FIRST, SECOND = list(SENTENCES[:6]), list(SENTENCES[6:12])


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "modernbert", "gpt2", "llama"])
@pytest.mark.parametrize("vector", ["first", "mean"])
def test_logits_do_not_depend_on_padding_or_batch_mates(
    tiny: Callable[..., Path], kind: str, vector: str
) -> None:
    encoder = embedlab.load(str(tiny(kind)))
    rows = Rows(encoder, 48)
    ids = rows.pairs(FIRST, SECOND)
    assert all(len(row) <= 48 for row in ids)
    torch.manual_seed(0)
    model = Classifier(trainable_copy(encoder), 3, 0.1, vector).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.mul_(20)  # as it starts, rows hardly differ
    data = Buckets(ids, {"label": torch.zeros(6, dtype=torch.int64)}, rows.pad_id, "cpu")
    together = torch.empty(6, 3)
    for batch, logits in predict(model, data, half=False):
        together[batch["rows"]] = logits
    for i, row in enumerate(ids):
        one = {"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row), dtype=torch.int64)}
        torch.testing.assert_close(model(one)[0], together[i], atol=1e-5, rtol=1e-4)
    assert together.std(dim=0).min() > 1e-3, "and rows differ"


@pytest.mark.parametrize(("kind", "at"), [("bert", 0), ("gpt2", 2)])
def test_the_head_reads_one_token_or_their_mean(tiny: Callable[..., Path], kind: str, at: int) -> None:
    backbone = trainable_copy(embedlab.load(str(tiny(kind))))
    ids, mask = torch.tensor([[5, 6, 7, 0]]), torch.tensor([[1, 1, 1, 0]])
    (hidden,) = backbone(ids, mask)
    for vector, pooled in (("first", hidden[:, at]), ("mean", hidden[:, :3].mean(1))):
        model = Classifier(backbone, 3, 0.1, vector).eval()  # type: ignore[arg-type]
        found = model({"input_ids": ids, "attention_mask": mask})
        torch.testing.assert_close(found, model.head(pooled))


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_rows_equal_the_tokenizers_own_form(tiny: Callable[..., Path], kind: str) -> None:
    encoder = embedlab.load(str(tiny(kind)))
    rows = Rows(encoder, 64)
    assert rows.single(FIRST) == Tokenization(encoder.tokenizer).ids(FIRST)
    a, b = (Tokenization(encoder.tokenizer).ids([text])[0] for text in ("a man", "a dog"))
    (pair,) = rows.pairs(["a man"], ["a dog"])
    # BERT: [CLS] A [SEP] B [SEP]; RoBERTa: <s> A </s></s> B </s>.
    assert pair == a + ([a[-1]] if kind == "xlm-roberta" else []) + b[1:]


def test_span_scores_leave_padding_out(tiny: Callable[..., Path]) -> None:
    encoder = embedlab.load(str(tiny("bert")))
    model = SpanReader(trainable_copy(encoder)).eval()
    batch = {
        "input_ids": torch.ones(1, 6, dtype=torch.int64),
        "attention_mask": torch.tensor([[1, 1, 1, 0, 0, 0]]),
    }
    scores = model(batch)
    assert scores.shape == (1, 6, 2)
    assert scores[0, :3].isfinite().all()
    assert scores[0, 3:].isneginf().all()


def test_the_copy_shares_nothing_and_trains_whole(tiny: Callable[..., Path]) -> None:
    encoder = embedlab.load(str(tiny("bert")))
    encoder.requires_grad_(False)
    copy = trainable_copy(encoder)
    assert copy.head is None
    assert all(p.requires_grad for p in copy.parameters())
    mine = {p.data_ptr() for p in encoder.parameters()}
    assert not mine & {p.data_ptr() for p in copy.parameters()}


class Counter(torch.nn.Module):
    """A model whose state is its number of training batches: the dev score can be made to peak anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("seen", torch.zeros(1))

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.seen += 1
        return (self.weight * batch["label"].float().mean()).sum()


@pytest.mark.parametrize(("peak", "kept"), [(4.0, 4.0), (100.0, 12.0), (0.0, 4.0)])
def test_the_best_look_at_dev_is_kept(peak: float, kept: float) -> None:
    model = Counter()
    data = Buckets([[1]] * 8, {"label": torch.ones(8, dtype=torch.int64)}, 0, "cpu")
    config = FineTuneConfig(steps=12, batch_size=2, evaluations=3)
    fitted = train(model, data, config, name="x", half=False, dev=lambda: -abs(float(model.seen) - peak))
    assert len(fitted.dev) == 3
    assert float(model.seen) == kept


def test_training_leaves_no_file_and_says_how_long_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = Buckets([[1]] * 8, {"label": torch.ones(8, dtype=torch.int64)}, 0, "cpu")
    before = time.perf_counter()
    fitted = train(Counter(), data, FineTuneConfig(epochs=1, batch_size=2), name="x", half=False)
    assert 0 < fitted.seconds < time.perf_counter() - before
    assert not list(tmp_path.iterdir())
    assert "x: step 4 of 4, loss " in capsys.readouterr().err, "where there is no terminal"


@pytest.mark.parametrize(
    ("device", "half", "asked"),
    [("cuda:1", True, ("gpu", [1], "bf16-mixed")), ("cpu", False, ("cpu", 1, "32-true"))],
)
def test_training_is_where_the_data_are(
    device: str, half: bool, asked: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, object] = {}

    def trainer(**settings: object) -> None:
        given.update(settings)
        raise InterruptedError

    monkeypatch.setattr(fit, "Trainer", trainer)
    monkeypatch.setattr(fit, "seeded", lambda *_: nullcontext())
    data: Any = SimpleNamespace(device=torch.device(device), steps=lambda rows: 4)
    with pytest.raises(InterruptedError):
        train(Counter(), data, FineTuneConfig(epochs=1), name="x", half=half)
    assert (given["accelerator"], given["devices"], given["precision"]) == asked


def test_without_dev_the_last_weights_stay_and_epochs_count() -> None:
    model = Counter()
    data = Buckets([[1]] * 9, {"label": torch.ones(9, dtype=torch.int64)}, 0, "cpu")
    fitted = train(model, data, FineTuneConfig(epochs=2, batch_size=2), name="x", half=False)
    assert (fitted.steps, float(model.seen), fitted.dev) == (10, 10.0, [])
    assert train(model, data, FineTuneConfig(epochs=0.1, batch_size=9), name="x", half=False).steps == 1


def test_biases_do_not_decay() -> None:
    task = FineTuning(torch.nn.Linear(3, 2), FineTuneConfig(weight_decay=0.5, warmup=0.1, lr=1.0), 10)
    made = task.configure_optimizers()
    decays = {
        g["weight_decay"]: [tuple(p.shape) for p in g["params"]] for g in made["optimizer"].param_groups
    }
    assert decays == {0.5: [(2, 3)], 0.0: [(2,)]}
    assert made["lr_scheduler"]["interval"] == "step"
    assert made["optimizer"].param_groups[0]["lr"] == 0.0, "warm-up starts at 0"


def test_gradients_are_clipped() -> None:
    class Steep(Counter):
        norms: list[float]

        def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            if self.weight.grad is not None:  # of the step before: it is cleared later
                self.norms.append(float(self.weight.grad.norm()))
            return 1000 * super().loss(batch)

    model = Steep()
    model.norms = []
    data = Buckets([[1]] * 8, {"label": torch.ones(8, dtype=torch.int64)}, 0, "cpu")
    train(model, data, FineTuneConfig(steps=3, batch_size=2, clip=0.5), name="x", half=False)
    assert model.norms == pytest.approx([0.5, 0.5], rel=1e-3)
