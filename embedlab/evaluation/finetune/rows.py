"""Texts and pairs of texts as rows of token ids, with the special tokens of the backbone's kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError

if TYPE_CHECKING:
    from embedlab.encoders.encoder import SentenceEncoder

_DOUBLE_SEPARATOR = frozenset(
    ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer")
)


class Rows:
    """Builds rows of at most `max_length` tokens: "first A last" or "first A separator B last".

    BERT's kind: [CLS] A [SEP] B [SEP] (token types are not used); RoBERTa's: <s> A </s></s> B </s>; a decoder
    without special tokens: A eos B. Templates of the encoder play no part.

    Raises UserError for a tokenizer without a fast backend or too little room.
    """

    def __init__(self, encoder: SentenceEncoder, max_length: int) -> None:
        plain = Tokenization(encoder.tokenizer)
        backend = getattr(encoder.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError("fine-tuning needs a fast tokenizer", fix="a checkpoint with tokenizer.json")
        self._backend = backend
        self.pad_id = plain.pad_id
        self.first, self.last = plain.prefix_ids, plain.suffix_ids
        info = encoder.backbone.info
        self.separator = list(self.last) * (2 if info.model_type in _DOUBLE_SEPARATOR else 1)
        if not self.separator and encoder.tokenizer.eos_token_id is not None:
            self.separator = [int(encoder.tokenizer.eos_token_id)]
        limits = [n for n in (max_length, plain.model_limit, info.max_positions) if n is not None]
        self.max_length = min(limits)
        if self.max_length < self.overhead + 2:
            raise UserError("too short for a pair", key="finetune.max_length", value=max_length, fix="128")

    @property
    def overhead(self) -> int:
        """Special tokens of a pair."""
        return len(self.first) + len(self.separator) + len(self.last)

    def encode(self, texts: Sequence[str]) -> list[Any]:
        """`tokenizers.Encoding` of each text (ids and offsets), without special tokens, not cut."""
        self._backend.no_truncation()
        self._backend.no_padding()
        return list(self._backend.encode_batch(list(texts), add_special_tokens=False))

    def single(self, texts: Sequence[str]) -> list[list[int]]:
        """A row for each text, cut on the right."""
        room = self.max_length - len(self.first) - len(self.last)
        return [self.first + e.ids[:room] + self.last or [self.pad_id] for e in self.encode(texts)]

    def pairs(self, first: Sequence[str], second: Sequence[str]) -> list[list[int]]:
        """A row for each pair; the longer side is cut first."""
        # Premises repeat: each distinct text is tokenised once.
        texts = list(dict.fromkeys([*first, *second]))
        ids = dict(zip(texts, (e.ids for e in self.encode(texts)), strict=True))
        return [self.pair(ids[a], ids[b]) for a, b in zip(first, second, strict=True)]

    def pair(self, a: Sequence[int], b: Sequence[int]) -> list[int]:
        """One row of two sides given as ids."""
        room = self.max_length - self.overhead
        if len(a) + len(b) > room:
            short = min(len(a), len(b), room // 2)
            keep = (short, room - short) if len(a) <= len(b) else (room - short, short)
            a, b = a[: keep[0]], b[: keep[1]]
        return [*self.first, *a, *self.separator, *b, *self.last]
