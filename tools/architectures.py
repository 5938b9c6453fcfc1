"""Writes the table of docs/architectures.md: what each text architecture of the installed transformers can do here.

    python -m tools.architectures

The claims are those of `embedlab.backbones.architecture`; `make test-all ARGS=tests/backbones/test_model_types.py`
holds each of them against a tiny random model of the type.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from transformers import CONFIG_MAPPING

from embedlab.backbones import architecture
from embedlab.kernels.packing import DECODER_TYPES, MODEL_TYPES
from tests.model_zoo import LEFT_OUT, text_types

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
_HEAD = (
    "| type | looks | attention | padding | states of all layers | adapters | compiled blocks | unpadded |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
)
_START, _END = "<!-- table: python -m tools.architectures -->\n", "<!-- end of the table -->\n"


def row(model_type: str) -> str:
    """The table's line of a type."""
    found = CONFIG_MAPPING[model_type]()
    looks = "both ways" if architecture.kind_of(found) == "encoder" else "back"
    if architecture.is_encoder_decoder(found):
        looks += " (the encoder is taken)"
    cells = (
        looks,
        "eager" if architecture.runs_eager(model_type) else "sdpa",
        "rows of one length at a time" if architecture.mixes_padding(model_type) else "masked",
        _yes(architecture.has_layer_states(model_type)),
        _yes(architecture.can_be_adapted(model_type)),
        _yes(architecture.has_blocks(model_type)),
        _yes(model_type in MODEL_TYPES | DECODER_TYPES),
    )
    return f"| `{model_type}` | {' | '.join(cells)} |"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def listed() -> list[str]:
    """The types in the page's table."""
    return re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def table(types: Iterable[str]) -> str:
    return _HEAD + "".join(row(name) + "\n" for name in types if name not in LEFT_OUT)


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(_START)
    after = rest.split(_END)[1]
    types = text_types()
    left = "".join(f"- `{name}`: {why}\n" for name, why in sorted(LEFT_OUT.items()) if name in types)
    PAGE.write_text(f"{before}{_START}{table(types)}\nLeft out:\n\n{left}{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
