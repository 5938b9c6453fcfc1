"""Prompts of the training data are the encoder's afterwards."""

from __future__ import annotations

from embedlab.encoders.loading import load
from embedlab.run.run import train
from tests.tiny_run import compose_run as compose_run
from tests.tiny_run import text_file as text_file


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
