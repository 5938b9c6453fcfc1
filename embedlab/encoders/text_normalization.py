"""What is done to a text before it is tokenised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tokenizers

from embedlab.errors import UserError


def close_sentence(text: str) -> str:
    """One sentence that ends in a full stop and has no double quotes, for prompts that quote it.

    As in PromptEOL's and CSE-SFP's evaluation, in this order: single spaces; a full stop unless the text ends
    in one of ``. ? " '``; double quotes become single ones; a question mark at the end becomes a full stop.
    """
    text = add_period(" ".join(text.split())).replace('"', "'")
    return text[:-1] + "." if text.endswith("?") else text


def add_period(text: str) -> str:
    """The text with a full stop, unless it ends in one of ``. ? " '`` (PromptBERT's final test)."""
    return text if not text or text[-1] in ".?\"'" else text + "."


def lower_case(tokenizer: Any) -> None:
    """Let a Hugging Face tokenizer lower-case its texts, as ``do_lower_case`` of sentence-transformers asks for.

    Raises:
        UserError: a tokenizer that is not of the `tokenizers` library.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        fix = "sentence-transformers itself, or a model with a tokenizer.json"
        raise UserError("cannot be had with this tokenizer", key="do_lower_case", value=True, fix=fix)
    lower = tokenizers.normalizers.Lowercase()
    parts = [lower] if backend.normalizer is None else [lower, backend.normalizer]
    backend.normalizer = tokenizers.normalizers.Sequence(parts)


TEXT_NORMALIZATIONS: dict[str, Callable[[str], str]] = {
    "raw": str,
    "closed": close_sentence,
    "stopped": add_period,
}
"""By their names in configurations, where a method scores other text than it trains on."""
