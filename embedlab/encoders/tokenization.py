"""Text to token ids: the one way from a sentence to a row, in training, scoring, exports, command line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedlab.config.build import from_dict
from embedlab.config.template import Template
from embedlab.encoders.row_marks import Frame, RowMarks
from embedlab.encoders.text_normalization import TEXT_NORMALIZATIONS, lower_case, lower_cases
from embedlab.encoders.token_rows import Row, TokenRows
from embedlab.encoders.windows import LONGEST, beginnings, numbered, splits_at_spaces, windows
from embedlab.errors import UserError

_RULES = 1  # raised when a change here alters ids, so that token caches of older code are not taken
TOKENIZERS = "0.23.3"
"""The release that made the first indexes and cards: it stands in every fingerprint, whichever is installed."""
_UNLIMITED = 1_000_000  # `model_max_length` of a tokenizer that knows no limit is 1e30
AT_ONCE = 1 << 22  # bytes of text tokenised at a time: a token takes about 100 bytes meanwhile
_LETTERS = 1000  # tokens that are tried as texts, where "a" has none


@dataclass(frozen=True)
class _Saved:
    """What `Tokenization.to_dict` says."""

    template: dict[str, Any] | None = None
    max_length: int | None = None
    preparation: str = "raw"
    lower_case: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.max_length, int) and self.max_length < 1:
            what: dict[str, Any] = {"key": "tokenization.max_length", "value": self.max_length}
            raise UserError("must be at least 1", **what, fix="128, or null for the model's own")


class Tokenization:
    """A tokenizer with a template and a length limit: sentences to rows of ids, and rows to padded tensors.

    Sentences are taken as they are: white space at their ends is not stripped.

    Args:
        tokenizer: of Hugging Face, as `embedlab.backbones.load_backbone` returns it.
        template: around each sentence.
        max_length: without a template, tokens of the whole row with its special tokens (SimCSE's 32); with
            one, tokens of the sentence only. None: as long as the model allows. The sentence is cut on the
            tokenizer's `truncation_side` (in a template that is joined as text: on the right), the template never.
        preparation: text normalization before all this, a key of `TEXT_NORMALIZATIONS`.

    Raises:
        UserError: a mask marker without a mask token, a template that the tokenizer merges with what stands
            around a marker, or a limit beyond the model's.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: Template | None = None,
        max_length: int | None = None,
        preparation: str = "raw",
    ) -> None:
        if preparation not in TEXT_NORMALIZATIONS:
            known = ", ".join(TEXT_NORMALIZATIONS)
            raise UserError("unknown preparation", key="preparation", value=preparation, fix=known)
        self.tokenizer = tokenizer
        self.template = template
        self.max_length = max_length
        self.preparation = preparation
        self.marks = RowMarks()
        self._first, self._last = self._frame()
        # A space moved from the template to the sentence, whose first token then has its leading-space form.
        self._lead = ""
        self._before: list[int] = []
        self._between: list[int] | None = None
        self._after: list[int] = []
        self._tail: list[int] = []
        if template is not None:
            self._compile(template)
        around = len(self.prefix_ids), len(self.suffix_ids)
        between = None if self._between is None else len(self._between)
        self.marks.frame = Frame(len(self._first), len(self._last), *around, between)
        self._limit = self._sentence_limit()

    # what a row is made of

    @property
    def pad_id(self) -> int:
        """The id that fills rows up. No model looks at it; a tokenizer without special tokens has none, so it is 0."""
        found = self.tokenizer.pad_token_id
        return 0 if found is None else int(found)

    @property
    def model_limit(self) -> int | None:
        """Tokens that the model takes at most."""
        limit = self.tokenizer.model_max_length
        return int(limit) if limit is not None and 0 < limit < _UNLIMITED else None

    @property
    def row_limit(self) -> int | None:
        """Tokens of a row at most: of the model, or of `max_length` with the template."""
        if self.max_length is None:
            return self.model_limit
        return self.max_length if self.template is None else self._copies * self.max_length + self.overhead

    @property
    def prefix_ids(self) -> list[int]:
        """Special tokens and template ids before the sentence."""
        return self._first + self._before

    @property
    def suffix_ids(self) -> list[int]:
        """Template ids and special tokens after the sentence."""
        return self._after + self._last

    @property
    def overhead(self) -> int:
        """Tokens of the row of an empty sentence."""
        return len(self.prefix_ids) + len(self._between or ()) + len(self.suffix_ids)

    @property
    def _copies(self) -> int:
        """How often a row has its sentence."""
        return 1 if self._between is None else 2

    def tokens_before(self, prompt: str) -> int:
        """Tokens of a row from its start to the end of a prompt, as sentence-transformers counts: of its own row."""
        sentence = (len(self.ids([prompt])[0]) - self.overhead) // self._copies
        return len(self.prefix_ids) + sentence if prompt else 0

    def _frame(self) -> tuple[list[int], list[int]]:
        """Special tokens that the tokenizer puts before and after a text."""
        plain, framed = next(
            (
                (ids, self.tokenizer(text)["input_ids"])
                for text in self._texts()
                if (ids := self._ids_of(text))
            ),
            ([], self.tokenizer("")["input_ids"]),
        )
        for at in range(len(framed) - len(plain) + 1):
            if framed[at : at + len(plain)] == plain:
                return framed[:at], framed[at + len(plain) :]
        raise UserError(
            "the tokenizer changes a text when it adds its special tokens",
            key="backbone",
            fix="another tokenizer",
        )

    def _texts(self) -> Iterator[str]:
        """Texts that may have tokens: a letter, else (a vocabulary of one script, without [UNK]) its tokens."""
        yield "a"
        yield from (str(self.tokenizer.decode([i])) for i in range(min(len(self.tokenizer), _LETTERS)))

    def _ids_of(self, text: str) -> list[int]:
        special = set(self.tokenizer.all_special_ids) - {self.tokenizer.unk_token_id}
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return [] if special & set(ids) else ids

    def _compile(self, template: Template) -> None:
        if "mask" in template.marks and self.tokenizer.mask_token is None:
            raise UserError(
                "the template has a {mask} and the tokenizer has no mask token",
                key="template.text",
                value=template.text,
                fix="an encoder backbone, or a template without {mask}",
            )
        before = template.before
        if template.join == "ids" and before.endswith(" "):
            before, self._lead = before[:-1], " "
        self._before = self.plain_ids([before])[0] if before else []
        if (between := template.between) is not None:
            # The second copy begins as the first does.
            self._between = self._in_context(between.removesuffix(self._lead) if self._lead else between)
        text, ends = "", {}
        for piece in template.after:
            text += self.tokenizer.mask_token if piece.marker == "mask" else piece.text
            if piece.marker:
                ends[piece.marker] = len(text)
        self._after = self._in_context(text)
        for mark, end in ends.items():
            upto = self._in_context(text[:end])
            if self._after[: len(upto)] != upto:
                self._refuse_merge(template, mark)
            self.marks[mark] = len(self.suffix_ids) - len(upto)
            if mark == "mask" and upto[-1] != self.tokenizer.mask_token_id:
                self._refuse_merge(template, mark)
        if template.join == "text" and self.marks:
            # Joined as text, a sentence may merge with the template around it, but not from the first marked
            # token on. These are the ids there, which every row is held against.
            self._tail = self.suffix_ids[-1 - max(self.marks.values()) :]
            if max(self.marks.values()) >= len(self.suffix_ids):
                self._tail = list(self.suffix_ids)

    def _refuse_merge(self, template: Template, mark: str) -> None:
        raise UserError(
            f"this tokenizer merges what stands around {{{mark}}} into one token",
            key="template.text",
            value=template.text,
            fix=f"put a space after {{{mark}}}",
        )

    def _in_context(self, text: str) -> list[int]:
        """Ids of a text inside a sentence (some tokenizers put a word start before every text)."""
        if not text:
            return []
        anchor, both, alone = self.plain_ids(["a", "a" + text, text])
        return both[len(anchor) :] if both[: len(anchor)] == anchor else alone

    def _sentence_limit(self) -> int | None:
        """Tokens that a sentence may have, without special tokens and template."""
        room = None if self.model_limit is None else (self.model_limit - self.overhead) // self._copies
        asked = self.max_length
        if asked is not None and self.template is None:
            asked -= self.overhead
        if asked is not None and asked < 1:
            raise UserError(
                "no room for a sentence between the special tokens",
                key="max_length",
                value=self.max_length,
                fix=f"at least {self.overhead + 1}",
            )
        if room is not None and room < 1:
            raise UserError(
                f"the template leaves no room for a sentence in the model's {self.model_limit} tokens",
                key="template.text",
                value=self.template.text if self.template else None,
                fix="a shorter template",
            )
        if asked is not None and room is not None and asked > room:
            most = room if self.template is not None else self.model_limit
            raise UserError(
                f"longer than the model's {self.model_limit} tokens",
                key="max_length",
                value=self.max_length,
                fix=f"at most {most}",
            )
        return room if asked is None else asked

    # texts to rows

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Rows of ids with special tokens and template, not padded, in the order of `texts`."""
        return self.ids_and_cut(texts)[0]

    def ids_and_cut(self, texts: Sequence[str]) -> tuple[list[list[int]], list[bool]]:
        """`ids`, and for each text whether it was cut."""
        if isinstance(texts, str):
            raise TypeError("give a sequence of sentences, not one string")
        rows: list[list[int]] = []
        cut: list[bool] = []
        for tokens in self.tokenised(texts):
            rows += tokens.rows()
            cut += tokens.cut.tolist()
        return rows, cut

    def tokenised(self, texts: Iterable[str]) -> Iterator[TokenRows]:
        """`tokenise`, a bounded number of texts at a time."""
        for before, window in numbered(windows(texts, size=AT_ONCE)):
            yield self.tokenise(window, before)

    def tokenise(self, texts: list[str], before: int = 0) -> TokenRows:
        """Rows of texts that are held in memory together, so many after the first; threads may be here at once.

        Raises:
            UserError: a text of millions of characters, of which this tokenizer would have to read all.
        """
        needed = self._needed(texts, before)
        return self._rows_of_text(needed) if self._joins_text else self._rows_of_ids(needed)

    def count_cut(self, texts: Iterable[str]) -> int:
        """How many of the texts are cut."""
        return sum(int(tokens.cut.sum()) for tokens in self.tokenised(texts))

    @cached_property
    def _splits_at_spaces(self) -> bool:
        return splits_at_spaces(self.tokenizer)

    def _needed(self, texts: list[str], before: int) -> list[str]:
        """Prepared texts, so many after the first; of long ones what has more tokens than a row takes, and a word."""
        prepare = TEXT_NORMALIZATIONS[self.preparation]
        if self._limit is not None and not self._cuts_left and self._splits_at_spaces:
            texts = beginnings(texts, self._limit, lambda some: self.plain_ids([prepare(t) for t in some]))
        for i, text in enumerate(texts):
            if len(text) > LONGEST:
                why = "has no space where this tokenizer could stop reading"
                if self._cuts_left:
                    why = "would be read to its end, which is what this tokenizer keeps"
                problem = f"a text of {len(text):,} characters {why}"
                fix, value = f"texts of at most {LONGEST:,} characters", text[:20] + "…"
                raise UserError(problem, key="text", value=value, fix=fix, index=before + i)
        return [prepare(text) for text in texts]

    @property
    def _cuts_left(self) -> bool:
        """Whether of a text that is too long the end is kept."""
        return self.tokenizer.truncation_side == "left" and not self._joins_text

    @property
    def _joins_text(self) -> bool:
        return self.template is not None and self.template.join == "text"

    def _rows_of_ids(self, texts: list[str]) -> TokenRows:
        """Each part tokenised apart."""
        # An empty sentence has no tokens; a lone space would be one.
        plain = self.plain_ids([self._lead + t if t else "" for t in texts])
        lengths = np.fromiter(map(len, plain), np.int64, len(plain))
        flat = np.fromiter(chain.from_iterable(plain), np.int32, int(lengths.sum()))
        prefix, suffix = self.prefix_ids, self.suffix_ids
        if self._between is not None:
            most = self._limit
            kept = [ids if most is None else ids[-most:] if self._cuts_left else ids[:most] for ids in plain]
            rows = [self._filled(prefix + ids + self._between + ids + suffix) for ids in kept]
            return TokenRows.of(rows, [len(a) < len(b) for a, b in zip(kept, plain, strict=True)])
        filler = 0 if prefix or suffix or lengths.all() else self._filled([])[0]
        return TokenRows.framed(flat, lengths, prefix, suffix, self._limit, self._cuts_left, filler)

    def _rows_of_text(self, texts: list[str]) -> TokenRows:
        """The sentence cut as a string, put into the template and tokenised with it."""
        assert self.template is not None
        before = self.template.before
        after = "".join(
            self.tokenizer.mask_token if p.marker == "mask" else p.text for p in self.template.after
        )
        kept = [
            self._shorten(t, ids, self._limit) for t, ids in zip(texts, self.plain_ids(texts), strict=True)
        ]
        rows = []
        for text, ids in zip(kept, self.plain_ids([before + t + after for t in kept]), strict=True):
            row = self._first + ids + self._last
            while self.model_limit is not None and len(row) > self.model_limit:
                # Tokenised anew with its neighbours, a sentence may have a token or two more than alone.
                tokens = self.plain_ids([text])[0]
                text = self._shorten(text, tokens, max(0, len(tokens) - (len(row) - self.model_limit)))
                row = self._first + self.plain_ids([before + text + after])[0] + self._last
            if self._tail and row[-len(self._tail) :] != self._tail:
                row = self.prefix_ids + self.plain_ids([text])[0][: self._limit] + self.suffix_ids
            rows.append(self._filled(row))
        return TokenRows.of(rows, [len(short) < len(text) for short, text in zip(kept, texts, strict=True)])

    def _shorten(self, text: str, ids: list[int], limit: int | None) -> str:
        """`text` cut where its first `limit` tokens end, again while the rest alone has more than that."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        while limit is not None and len(ids) > limit:
            if backend is None:
                return str(self.tokenizer.decode(ids[:limit]))
            offsets = backend.encode(text, add_special_tokens=False).offsets
            end = offsets[limit - 1][1] if limit else 0
            if limit and offsets[limit][0] < end:  # both are bytes of one character
                end = offsets[limit][0]
            text = text[: min(end, len(text) - 1)]
            ids = self.plain_ids([text])[0]
        return text

    def _filled(self, row: list[int]) -> list[int]:
        """A row has at least one token, also where the tokenizer adds none to an empty text."""
        if row:
            return row
        t = self.tokenizer
        for i in (t.bos_token_id, t.eos_token_id, t.unk_token_id, t.pad_token_id):
            if i is not None:
                return [i]
        raise UserError(
            "a text has no tokens, and the tokenizer has no special token to stand for it",
            key="backbone",
            fix="leave empty texts out, or a tokenizer with an end-of-text token",
        )

    def plain_ids(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text as it is: without special tokens, not cut, not padded."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            if not texts:  # which such a tokenizer refuses
                return []
            return list(self.tokenizer(texts, add_special_tokens=False, truncation=False)["input_ids"])
        # A tokenizer file may carry a truncation and a padding of its own (MiniLM's cuts at 128). Where there is none
        # nothing is set: another thread may be tokenising.
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        return [e.ids for e in backend.encode_batch_fast(texts, add_special_tokens=False)]

    # rows to tensors

    def pad(self, rows: Sequence[Row], multiple: int = 1) -> dict[str, Tensor]:
        """``input_ids`` and ``attention_mask``, int64 [B, L]: L is the longest row, rounded up to `multiple`.

        Filled up on the tokenizer's `padding_side`.
        """
        ids, real = TokenRows.of(rows).filled(self.pad_id, self.tokenizer.padding_side == "left", multiple)
        return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(real.astype(np.int64))}

    # identity

    @cached_property
    def fingerprint(self) -> str:
        """Hex hash of all that decides the ids: tokenizer, template, limit and the rules of this file."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        vocabulary = json.dumps(self.tokenizer.get_vocab(), sort_keys=True) if backend is None else ""
        if backend is not None:
            backend.no_truncation()
            backend.no_padding()
            vocabulary = backend.to_str()
        settings = {
            "rules": _RULES,
            "tokenizers": TOKENIZERS,
            "template": asdict(self.template) if self.template else None,
            "limit": self._limit,
            "frame": [self._first, self._last],
            "special": [self.tokenizer.pad_token_id, self.tokenizer.mask_token_id],
            "preparation": self.preparation,
        }
        if self.tokenizer.truncation_side != "right":
            # 2: of a long text, too, the end is kept.
            settings["cut"] = "left 2" if self._cuts_left else self.tokenizer.truncation_side
        content = vocabulary + json.dumps(settings, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def to_dict(self) -> dict[str, Any]:
        """Template and limit as plain values; the tokenizer is saved by itself."""
        return {
            "template": asdict(self.template) if self.template else None,
            "max_length": self.max_length,
            "preparation": self.preparation,
        } | ({"lower_case": True} if lower_cases(self.tokenizer) else {})

    @classmethod
    def from_dict(cls, tokenizer: Any, values: dict[str, Any]) -> Tokenization:
        """The counterpart of `to_dict`.

        Raises:
            UserError: a value of another type, by key.
        """
        saved = from_dict(_Saved, values, "tokenization")
        template = from_dict(Template, saved.template, "tokenization.template") if saved.template else None
        if saved.lower_case:
            lower_case(tokenizer)
        return cls(tokenizer, template, saved.max_length, saved.preparation)
