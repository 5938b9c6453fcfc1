"""What happens to a sentence before it is tokenised, where a method scores other text than it trains on."""

from __future__ import annotations

from collections.abc import Callable


def raw(text: str) -> str:
    """The text as it is."""
    return text


def closed(text: str) -> str:
    """One sentence that ends in a full stop and has no double quotes, for prompts that quote it.

    As in PromptEOL's and CSE-SFP's evaluation, in this order: single spaces; a full stop unless the text ends
    in one of ``. ? " '``; double quotes become single ones; a question mark at the end becomes a full stop.
    """
    text = " ".join(text.split())
    if text and text[-1] not in ".?\"'":
        text += "."
    text = text.replace('"', "'")
    return text[:-1] + "." if text.endswith("?") else text


def stopped(text: str) -> str:
    """The text with a full stop, unless it ends in one of ``. ? " '`` (PromptBERT's final test)."""
    return text if not text or text[-1] in ".?\"'" else text + "."


PREPARATIONS: dict[str, Callable[[str], str]] = {"raw": raw, "closed": closed, "stopped": stopped}
