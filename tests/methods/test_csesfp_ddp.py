"""Two ranks give the adapters' gradients of one big batch, also with 4 bits, chunks and checkpointed blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from embedlab.backbones import BackboneConfig, load_backbone
from embedlab.backbones.adapters import AdapterConfig, adapt
from embedlab.encoder import SentenceEncoder
from embedlab.methods.csesfp import CSESFP, CSESFPConfig
from embedlab.methods.prompteol import PromptEOL, PromptEOLConfig
from embedlab.pooling import build_pooling
from embedlab.tokenization import Template, Tokenization
from embedlab.training.optimizer import OptimizerConfig

TWO_STAGES = Template('It : "{sentence}" means a word{rep1}, so it is{rep2}', "text")
TEXTS = ["The girl reads.", "Two dogs run", "Rain.", "He said yes", "The girl reads.", "A plane"]
PLAIN = AdapterConfig("lora", r=2, dropout=0.0)
SMALL = AdapterConfig("qlora", r=2, dropout=0.0, quantization="nf4", gradient_checkpointing=True)
CASES: list[tuple[Any, Any, AdapterConfig, int | None]] = [
    (CSESFP, CSESFPConfig(), PLAIN, None),
    (PromptEOL, PromptEOLConfig(), SMALL, 2),
]


def _method(folder: str, case: int) -> Any:
    cls, config, adapter, chunk = CASES[case]
    base = BackboneConfig(source="local", path=folder)
    backbone, tokenizer = load_backbone(base)
    torch.manual_seed(0)
    adapt(backbone, adapter, base, torch.device("cpu"))
    with torch.no_grad():
        for name, p in backbone.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.2)
    pooling = build_pooling("rep2", backbone.info)
    encoder = SentenceEncoder(backbone, pooling, Tokenization(tokenizer, TWO_STAGES))
    return cls(encoder, config, OptimizerConfig(chunk=chunk)).train()


def _batch(method: Any, rows: slice) -> dict[str, Any]:
    tokenization = method.encoder.tokenization
    view = tokenization.pad(tokenization.ids(TEXTS), 8)
    hashes = torch.tensor([sorted(set(TEXTS)).index(t) for t in TEXTS])
    return {"sentence": {k: v[rows] for k, v in (view | {"hash": hashes}).items()}}


class _Step(nn.Module):
    def __init__(self, method: Any) -> None:
        super().__init__()
        self.method = method

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.method.total(batch)[0]


def _gradients(method: Any) -> dict[str, Any]:
    return {n: p.grad.tolist() for n, p in method.named_parameters() if p.grad is not None}


def _rank(rank: int, port: int, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for case in range(len(CASES)):
        method = _method(folder, case)
        model = nn.parallel.DistributedDataParallel(_Step(method))
        model(_batch(method, slice(3 * rank, 3 * rank + 3))).backward()
        if rank == 0:
            results.put(_gradients(method))
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.timeout(240)
def test_two_ranks_give_the_gradient_of_one_big_batch(tiny: Callable[..., Path]) -> None:
    import torch.multiprocessing as mp

    from tests.training.test_gather import free_port

    folder = str(tiny("llama"))
    queue = mp.get_context("spawn").SimpleQueue()
    context = mp.spawn(_rank, args=(free_port(), folder, queue), nprocs=2, join=False)
    found = [queue.get() for _ in CASES]
    while not context.join():
        pass
    for case, gradients in enumerate(found):
        method = _method(folder, case)
        method.total(_batch(method, slice(None)))[0].backward()
        expected = _gradients(method)
        assert gradients.keys() == expected.keys()
        assert len(expected) == 28
        for name, value in expected.items():
            torch.testing.assert_close(
                torch.tensor(gradients[name]), torch.tensor(value), atol=1e-5, rtol=1e-3
            )
