"""Prompts that texts were trained with are those that the encoder is used with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import embedlab
from embedlab.encoders.usage import Usage
from tests.tiny_run import text_file as text_file


@pytest.mark.parametrize(
    ("sets", "prompts", "default"),
    [
        ([], {}, None),
        ([{}], {}, None),
        (
            [{"anchor": "q: ", "positive": "d: ", "negatives": "d: "}],
            {"query": "q: ", "document": "d: "},
            None,
        ),
        ([{"anchor": "q: "}, {"positive": "d: "}], {"query": "q: ", "document": "d: "}, None),
        ([{"first": "t: ", "second": "t: "}], {"text": "t: "}, "text"),
        ([{"sentence": "t: "}], {"text": "t: "}, "text"),
        ([{"sentence": None}], {}, None),
        ([{"anchor": "q: "}, {"anchor": "other: ", "positive": "d: "}], {"document": "d: "}, None),
        ([{"first": "a: ", "second": "b: "}], {}, None),
    ],
)
def test_roles_become_names(
    sets: list[dict[str, str | None]],
    prompts: dict[str, str],
    default: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    usage = Usage.of_training(sets)
    assert (usage.prompts, usage.default_prompt) == (prompts, default)
    given = {prompt for one in sets for prompt in one.values() if prompt}
    assert bool(caplog.text) == bool(given - set(prompts.values()))


def test_a_run_saves_its_prompts_with_the_encoder(text_file: Path, tmp_path: Path) -> None:
    from tests.test_readme import train

    pairs = tmp_path / "pairs.csv"
    lines = text_file.read_text(encoding="utf-8").splitlines()[:16]
    rows = "".join(
        f'"{line.replace(chr(34), "")}","{i} {line.replace(chr(34), "")}"\n' for i, line in enumerate(lines)
    )
    pairs.write_text("query,answer\n" + rows, encoding="utf-8")
    train(
        tmp_path, "method=supervised", "data=pairs", f"data.files={pairs}", "backbone=mini", "pooling=mean",
        "data.prompts.anchor='ask: '", "data.prompts.positive='say: '",
    )  # fmt: skip
    for name in ("export", "last.ckpt"):
        encoder = embedlab.load(tmp_path / "run" / name)
        assert encoder.prompts == {"query": "ask: ", "document": "say: "}
        assert encoder.default_prompt is None
        np.testing.assert_array_equal(encoder.encode_query(["x"]), encoder.encode(["ask: x"]))
        np.testing.assert_array_equal(
            encoder.encode_document(["x"]), encoder.encode(["x"], prompt_name="document")
        )
