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


LENGTHS = range(4, 28)
"""Of sentences in tokens, the two special ones not counted: three times as many as the compiler's limit."""


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Of what `Backbone.compile_blocks` compiles."""
    counter, compile_blocks = CompileCounterWithBackend("eager"), Backbone.compile_blocks
    monkeypatch.setattr(
        Backbone, "compile_blocks", lambda blocks, **more: compile_blocks(blocks, backend=counter, **more)
    )
    return counter


@pytest.mark.parametrize(
    ("model_type", "settings", "models"),
    [
        ("bert", (), 1),
        ("roberta", ("pooling=mean",), 1),
        ("llama", ("pooling=last",), 1),
        ("modernbert", ("pooling=mean",), 2),  # whose blocks look near or far
        ("bert", ("method=infocse", "method.mlp=train", "method.weight=0.1"), 3),
        ("bert", ("method=diffcse", "method.mlp=train"), 3),
        ("bert", ("method=distil", "method.teacher={teacher}", "method.k1=null", "method.similarity=1"), 2),
    ],
)
def test_no_length_is_run_eagerly_or_compiled_by_itself(
    compose_run: Callable[..., RunConfig],
    tiny: Callable[..., Path],
    tmp_path: Path,
    counter: CompileCounterWithBackend,
    model_type: str,
    settings: tuple[str, ...],
    models: int,
) -> None:
    text = tmp_path / "lengths.txt"
    rows = [" ".join(["cat", "dog"][(i + j) % 2] for j in range(n)) for n in LENGTHS for i in (0, 1)]
    text.write_text("\n".join(rows) + "\n", encoding="utf-8")
    settings = tuple(s.format(teacher=tiny("bert", width=64)) for s in settings)
    steps = ("step=compile", "backbone.dropout=0.1", "trainer.max_epochs=1", "evaluation.last=false")
    batches = (f"data.files={text}", "data.batch_size=2", "data.shuffle=false", "data.pad_to_multiple=1")
    run = compose_run(*steps, *batches, *settings, model_type=model_type)
    with compiler.patch(fail_on_recompile_limit_hit=True):
        train(run, tmp_path / "run")
    # The first length alone, then any; in two places and in two modes of gradients at most.
    assert 2 <= counter.frame_count <= 3 * models


def test_a_run_compiles_as_if_it_were_the_first_of_its_process(
    compose_run: Callable[..., RunConfig], tmp_path: Path, counter: CompileCounterWithBackend
) -> None:
    """The compiler keeps what it made of a block's code, and past a limit runs the code as it is, without an error."""
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
