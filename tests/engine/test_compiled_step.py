"""Steps with compiled blocks, many runs in one process: each compiles for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo import config as compiler
from torch._dynamo.testing import CompileCounterWithBackend

from embedlab.backbones import Backbone
from embedlab.config.run import RunConfig
from embedlab.run.run import train

ONE_SHAPE = ("data.pad_to_multiple=16", "data.max_length=16", "trainer.max_steps=2", "evaluation.every=2")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_a_run_compiles_as_if_it_were_the_first_of_its_process(
    compose_run: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler keeps what it made of a block's code, and past a limit runs the code as it is, without an error."""
    counter, compile_blocks = CompileCounterWithBackend("eager"), Backbone.compile_blocks
    monkeypatch.setattr(
        Backbone, "compile_blocks", lambda blocks, **more: compile_blocks(blocks, backend=counter, **more)
    )
    compiled = []
    with compiler.patch(fail_on_recompile_limit_hit=True, recompile_limit=2):
        # Other widths, and so other code, in each.
        for width in (32, 48, 64, 80):
            before = counter.frame_count
            settings = ("step=compile", "backbone.dropout=0.1", "evaluation.last=false", *ONE_SHAPE)
            train(compose_run(*settings, hidden_size=width, num_attention_heads=4), tmp_path / str(width))
            compiled.append(counter.frame_count - before)
    assert len(set(compiled)) == 1
    assert compiled[0] > 0
