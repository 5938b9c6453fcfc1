"""Prompts of the training data are the encoder's afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from embedlab.data.kinds import data_config
from embedlab.encoders.loading import load
from embedlab.encoders.usage import Usage
from embedlab.run.prompts import with_prompts
from embedlab.run.run import train
from tests.tiny_run import compose_run as compose_run
from tests.tiny_run import text_file as text_file


@pytest.mark.parametrize(("kind", "given", "kept", "default"), [
    ("pairs", {}, {}, None),
    ("pairs", {"anchor": "query: ", "positive": "passage: "}, {"query": "query: ", "document": "passage: "}, None),
    ("triplets", {"negatives": "passage: "}, {}, None),
    ("sentences", {"sentence": "text: "}, {"sentence": "text: "}, "sentence"),
    ("scored", {"first": "a: ", "second": "a: "}, {"sentence": "a: "}, "sentence"),
])  # fmt: skip
def test_prompts_are_kept_by_what_their_texts_are(
    kind: str, given: Any, kept: Any, default: str | None
) -> None:
    usage = with_prompts(Usage(truncate_dim=8), data_config({"name": kind, "files": "x", "prompts": given}))
    assert usage == Usage(kept, default, truncate_dim=8)


def test_sets_with_different_prompts_keep_each_its_own() -> None:
    sets = {
        name: {"name": "pairs", "files": "x", "prompts": {"anchor": f"{name}: ", "positive": "p: "}}
        for name in "ab"
    }
    usage = with_prompts(Usage(), data_config({"mix": sets}))
    assert usage.prompts == {"a_query": "a: ", "b_query": "b: ", "document": "p: "}


def test_a_run_saves_them_with_its_encoder(compose_run, text_file, tmp_path):  # type: ignore[no-untyped-def]
    texts = text_file.read_text().splitlines()
    file = tmp_path / "pairs.csv"
    file.write_text(
        "anchor,positive\n" + "".join(f"{a},{b}\n" for a, b in zip(texts[::2], texts[1::2], strict=True))
    )
    config = compose_run(
        "method=supervised",
        "data=pairs",
        f"data.files={file}",
        "data.prompts.anchor='query: '",
        "data.max_length=32",
        "trainer.max_steps=1",
    )
    train(config, tmp_path / "run")
    encoder = load(tmp_path / "run" / "export")
    assert encoder.usage.prompts == {"query": "query: "}
    asked = encoder.encode_query(["a cat"])
    assert (asked == encoder.encode(["query: a cat"], prompt="")).all()
    assert not (asked == encoder.encode(["a cat"])).all()
