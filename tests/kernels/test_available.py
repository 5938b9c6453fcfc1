"""Which parts of a captured step are left on, by one environment variable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedlab.cli.main import main
from embedlab.errors import UserError
from embedlab.kernels.available import SWITCHES, KernelOptions, kernel_options

NAMES = [f.name for f in fields(KernelOptions)]


@given(st.dictionaries(st.sampled_from(NAMES), st.booleans()), st.sampled_from([",", " , ", ",,"]))
def test_what_is_said_counts_and_the_rest_is_the_default(chosen: dict[str, bool], comma: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCHES, comma.join(f"{name}={int(on)}" for name, on in chosen.items()))
        assert asdict(kernel_options()) == asdict(KernelOptions()) | chosen


def test_everything_but_static_shapes_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCHES, raising=False)
    assert kernel_options() == KernelOptions(True, True, True, True, True, static=False)


@pytest.mark.parametrize(
    "text", ["fused_qkv=0", "fused_block", "fused_block=", "static=2", "static=true", "=1", "0"]
)
def test_a_wrong_one_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(SWITCHES, f"dev_graph=0,{text}")
    with pytest.raises(UserError, match=f"{SWITCHES}={text}"):
        kernel_options()


def test_a_run_refuses_it_before_it_trains(
    tiny: Callable[..., Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv(SWITCHES, "last_blok=0")
    given = (
        "backbone=local",
        f"backbone.path={tiny('bert')}",
        f"data.files={text_file}",
        "trainer=cpu",
        "data.batch_size=2",
    )
    assert main(["train", *given, f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    (line,) = (x for x in capsys.readouterr().err.splitlines() if SWITCHES in x)
    assert line.startswith("embedlab: unknown option")
    assert not list((tmp_path / "run").glob("*.ckpt"))
