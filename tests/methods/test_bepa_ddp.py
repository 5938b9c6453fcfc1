"""Two ranks give BEPA's gradients of one big batch, for losses by pairs and for statistics of the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from embedlab.backbones import BackboneConfig, load_backbone
from embedlab.encoder import SentenceEncoder
from embedlab.methods.bepa import BEPA
from embedlab.methods.bepa_config import BEPAConfig
from embedlab.pooling import build_pooling
from embedlab.tokenization import Tokenization
from embedlab.training.optimizer import OptimizerConfig

REPEATED = [("The girl reads.", "a lake"), ("Two dogs run", "the tide"), ("Rain.", "is it open")]
REPEATED += [REPEATED[0]] * 3
"""On the second rank every text comes again, and its anchors have no negative of their own rank."""
SKIPPED = [("Rain.", "Rain."), ("a lake", "a lake"), ("Rain.", "Rain."), *[("Rain.", "a lake")] * 3]
"""The second rank's anchors have no negative anywhere: the mean is over those of the first."""
CASES = [
    (BEPAConfig(lam=2.0), REPEATED),
    (BEPAConfig(lam=2.0), SKIPPED),
    (
        BEPAConfig(lam=2.0, mlm_pack="bi", align_input="packed_blockmask", loss="vicreg", predictor="mlp"),
        REPEATED,
    ),
    (BEPAConfig(lam=2.0, loss="cosine", target="ema", predictor="linear"), REPEATED),
]


def _method(folder: str, config: BEPAConfig) -> BEPA:
    backbone, tokenizer = load_backbone(
        BackboneConfig(source="local", path=folder, dropout=0.0), head="masked_lm"
    )
    encoder = SentenceEncoder(backbone, build_pooling("cls", backbone.info), Tokenization(tokenizer))
    torch.manual_seed(0)
    method = BEPA(encoder, config, OptimizerConfig())
    # Masks are drawn by each rank anew: the alignment is what gathers.
    method.prediction.forward = lambda backbone, ids, mask: _still(backbone, ids, mask)  # type: ignore[method-assign]
    return method.train()


def _still(backbone: nn.Module, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """In place of the masked language modelling: a mean over rows that goes through body and head."""
    logits = backbone.head(backbone(ids, mask)[-1][:, 0])
    return logits.logsumexp(-1).mean(), logits.new_zeros(())


def _batch(method: BEPA, pairs: list[tuple[str, str]], rows: slice) -> dict[str, Any]:
    words = method.encoder.tokenization
    known = sorted({text for pair in pairs for text in pair})
    made = {}
    for view, texts in zip(("source", "target"), zip(*pairs, strict=True), strict=True):
        tokens = words.pad(words.ids(texts), 8)
        tokens["hash"] = torch.tensor([known.index(t) for t in texts])
        made[view] = {k: v[rows] for k, v in tokens.items()}
    return made


class _Step(nn.Module):
    def __init__(self, method: BEPA) -> None:
        super().__init__()
        self.method = method

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.method.total(batch)[0]


def _gradients(method: BEPA) -> dict[str, Any]:
    return {n: p.grad.tolist() for n, p in method.named_parameters() if p.grad is not None}


def _rank(rank: int, port: int, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for config, pairs in CASES:
        method = _method(folder, config)
        model = nn.parallel.DistributedDataParallel(_Step(method))
        model(_batch(method, pairs, slice(3 * rank, 3 * rank + 3))).backward()
        if rank == 0:
            results.put(_gradients(method))
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.timeout(240)
def test_two_ranks_give_the_gradient_of_one_big_batch(tiny: Callable[..., Path]) -> None:
    import torch.multiprocessing as mp

    from tests.training.test_gather import free_port

    folder = str(tiny("xlm-roberta"))
    queue = mp.get_context("spawn").SimpleQueue()
    context = mp.spawn(_rank, args=(free_port(), folder, queue), nprocs=2, join=False)
    found = [queue.get() for _ in CASES]
    while not context.join():
        pass
    for (config, pairs), gradients in zip(CASES, found, strict=True):
        method = _method(folder, config)
        method.total(_batch(method, pairs, slice(None)))[0].backward()
        expected = _gradients(method)
        assert gradients.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                torch.tensor(gradients[name]),
                torch.tensor(value),
                atol=2e-5,
                rtol=1e-3,
                msg=f"{config.loss} {name}",
            )


def test_the_stand_in_is_called(tiny: Callable[..., Path]) -> None:
    """Guards the test above: with another name of the inner call it would compare what is drawn at random."""
    method = _method(str(tiny("xlm-roberta")), CASES[0][0])
    torch.manual_seed(0)
    first = method.total(_batch(method, REPEATED, slice(None)))[0]
    torch.manual_seed(1)
    assert torch.equal(first, method.total(_batch(method, REPEATED, slice(None)))[0])
