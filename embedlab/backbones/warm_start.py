"""Fresh backbones that begin with another checkpoint's body under a vocabulary of their own.

Artetxe et al. 2020 (arXiv 1910.11856): a transformer's body learned in one language serves others once the token
embeddings are learned anew. Embeddings of tokens that both vocabularies have are copied, the others drawn like them
(the simplest start of those that WECHSEL, arXiv 2112.06598, and FOCUS, arXiv 2305.14481, compare).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from embedlab.errors import UserError

KEY = "backbone.fresh.init_from"
_SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
_HEAD = {"layer_norm": "LayerNorm"}
_KINDS = {"encoder": "bidirectional encoder", "decoder": "decoder"}


class Warm(NamedTuple):
    """What a fresh backbone took over: tensors of the body and head, and tokens of its vocabulary."""

    tensors: int
    tokens: int
    vocabulary: int


def warm_start(fresh: Any, tokenizer: Any, donor: Any, donor_tokenizer: Any, name: str) -> Warm:
    """Copy the weights of `donor` into `fresh`, in place.

    Blocks, position and type embeddings, the embeddings' norm and the head's transform are copied as they are;
    where one of the two has more positions or types, the rows that both have. Token embeddings ``[V, D]`` and the
    head's bias ``[V]`` go by the tokens' text (`shared_tokens`); other embeddings are drawn from a normal distribution
    with mean and standard deviation of the copied ones by dimension, other biases are the copied ones' mean.

    Args:
        fresh, donor: Hugging Face models of one class of head (or none), such as XLM-RoBERTa and BERT, that
            `check_donor` lets through.
        tokenizer, donor_tokenizer: of each.
        name: of the donor, for messages.

    Raises:
        UserError: a body with other parts, a tokenizer of other weights, no tokens in common, or weights that are
            not finite.
    """
    with torch.no_grad():
        copied = _copy_body(fresh.base_model, donor.base_model, name)
        copied += _copy_head(fresh, donor)
        here, there = shared_tokens(tokenizer, donor_tokenizer)
        if len(here) < 2:  # one has no distribution
            raise UserError(
                "has no tokens in common with the new vocabulary", key=KEY, value=name, fix="null"
            )
        new = fresh.get_input_embeddings().weight
        rows = len(donor.get_input_embeddings().weight)
        if int(there.max()) >= rows:
            raise UserError(
                f"its tokenizer has a token {int(there.max())}, its embeddings end at {rows - 1}",
                key=KEY,
                value=name,
                fix="the folder with the tokenizer that belongs to the weights",
            )
        _fill(new, donor.get_input_embeddings().weight, here, there, spread=True)
        padding = getattr(fresh.get_input_embeddings(), "padding_idx", None)
        if padding is not None:
            new[padding].zero_()
        ours, theirs = _output(fresh), _output(donor)
        if ours is not None and theirs is not None:
            if ours.weight.data_ptr() != new.data_ptr():
                _fill(ours.weight, theirs.weight, here, there, spread=True)
            if ours.bias is not None and theirs.bias is not None:
                _fill(ours.bias, theirs.bias, here, there, spread=False)
        bad = next((n for n, p in fresh.named_parameters() if not p.isfinite().all()), None)
        if bad is not None:
            raise UserError(
                f"its weights are not finite, the first of them in {bad}",
                key=KEY,
                value=name,
                fix="another checkpoint",
            )
    return Warm(copied, len(here), len(tokenizer))


def shared_tokens(tokenizer: Any, donor: Any) -> tuple[Tensor, Tensor]:
    """Ids of the tokens of the same text in both vocabularies: here and in the donor, int64 [n] each.

    A token's text is what it writes, a mark saying whether it begins a word: ``##x`` of WordPiece, ``Ġx`` of byte-level
    BPE and ``▁x`` of SentencePiece are one notation. Special tokens are matched by role. A text that is missing is
    looked for in lower case, for a donor without capitals; an inner piece that the donor does not have is looked for
    among its words.
    """
    theirs = _pieces(donor)
    here, there = [], []
    for role in ("pad", "unk", "cls", "sep", "mask", "bos", "eos"):
        a, b = (getattr(t, f"{role}_token_id", None) for t in (tokenizer, donor))
        if a is not None and b is not None and a not in here:
            here.append(a)
            there.append(b)
    for (begins, text), i in _pieces(tokenizer).items():
        low = text.lower()
        # A text may begin with a word, without the mark; and scripts without spaces have none.
        keys = [(begins, text), (begins, low), *([] if begins else [(True, text), (True, low)])]
        for key in keys:
            if key in theirs:
                here.append(i)
                there.append(theirs[key])
                break
    return torch.tensor(here, dtype=torch.int64), torch.tensor(there, dtype=torch.int64)


def _pieces(tokenizer: Any) -> dict[tuple[bool, str], int]:
    """(whether it begins a word, its text) -> id, without special tokens and without broken UTF-8."""
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    special = set(tokenizer.all_special_tokens)
    marks = {kind: sum(t.startswith(kind) for t in vocabulary) for kind in ("##", "Ġ", "▁")}
    kind = max(marks, key=lambda k: marks[k])
    letters = _byte_letters() if kind == "Ġ" else {}
    found: dict[tuple[bool, str], int] = {}
    for token, i in sorted(vocabulary.items(), key=lambda item: item[1]):
        if token in special:
            continue
        begins = not token.startswith("##") if kind == "##" else token.startswith(kind)
        text = token.removeprefix(kind)
        if letters:
            try:
                text = bytes(letters[c] for c in text).decode("utf-8")
            except (KeyError, UnicodeDecodeError):
                continue
        # BERT's splitter parts punctuation from words, so that it never has an inner form.
        if kind == "##" and begins and not re.search(r"\w", text):
            found.setdefault((False, text), i)
        if text:
            found.setdefault((begins, text), i)
    return found


def _byte_letters() -> dict[str, int]:
    """GPT-2's letter of each byte (Radford et al. 2019), the other way round."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


def check_donor(ours: Any, theirs: Any, name: str) -> None:
    """Raise UserError if a checkpoint's configuration says that a fresh backbone cannot begin with its body.

    Args:
        ours, theirs: Hugging Face configurations of the fresh backbone and of the checkpoint.
        name: of the checkpoint, for messages.
    """
    from embedlab.backbones.architecture import kind_of

    if kind_of(ours) != kind_of(theirs):
        raise UserError(
            f"{theirs.model_type} is a {_KINDS[kind_of(theirs)]}, the fresh {ours.model_type} a "
            f"{_KINDS[kind_of(ours)]}",
            key=KEY,
            value=name,
            fix="a checkpoint of backbone.fresh's kind",
        )
    for key in _SHAPE:
        a, b = getattr(ours, key, None), getattr(theirs, key, None)
        if a != b:
            raise UserError(
                f"another shape: its {key} is {b}, the fresh backbone's {a}",
                key=KEY,
                value=name,
                fix="a checkpoint of backbone.fresh's layers, width, heads and ffn, or these of the checkpoint",
            )


def _copy_body(ours: Any, theirs: nn.Module, name: str) -> int:
    """Everything but the token embeddings, by name; counts the tensors."""
    mine, his = dict(ours.named_parameters()), dict(theirs.named_parameters())
    tokens = next(n for n, p in mine.items() if p is ours.get_input_embeddings().weight)
    mine.pop(tokens)
    for key, value in mine.items():
        other = his.get(key)
        if other is None or other.shape[1:] != value.shape[1:]:
            raise UserError(
                f"its body has no {key} of this shape", key=KEY, value=name, fix="a BERT or RoBERTa"
            )
        if key.endswith("position_embeddings.weight"):
            _copy_rows(value[_offset(ours) :], other[_offset(theirs) :])
        elif key.endswith("token_type_embeddings.weight"):
            _copy_rows(value, other)
        elif other.shape == value.shape:
            value.copy_(other)
        else:
            raise UserError(
                f"its {key} is of another shape", key=KEY, value=name, fix="a checkpoint of this shape"
            )
    return len(mine)


def _offset(body: Any) -> int:
    from embedlab.backbones.architecture import position_offset

    return int(position_offset(body.config))


def _copy_rows(ours: Tensor, theirs: Tensor) -> None:
    n = min(len(ours), len(theirs))
    ours[:n].copy_(theirs[:n])


def _copy_head(fresh: Any, donor: Any) -> int:
    """The transform before the projection onto the vocabulary, by the last parts of the names."""
    mine, his = _transform(fresh), _transform(donor)
    copied = 0
    for key, value in mine.items():
        other = his.get(key)
        if other is not None and other.shape == value.shape:
            value.copy_(other)
            copied += 1
    return copied


def _transform(whole: Any) -> dict[str, Tensor]:
    body, last = whole.base_model, _output(whole)
    if body is whole or last is None:
        return {}
    inner = {id(p) for p in [*body.parameters(), *last.parameters()]}
    found = {}
    for name, value in whole.named_parameters():
        if id(value) not in inner:
            *_, part, kind = name.split(".")
            found[f"{_HEAD.get(part, part)}.{kind}"] = value
    return found


def _output(whole: Any) -> Any:
    return whole.get_output_embeddings() if whole.base_model is not whole else None


def _fill(ours: Tensor, theirs: Tensor, here: Tensor, there: Tensor, *, spread: bool) -> None:
    """Rows `here` of `ours` from rows `there` of `theirs`; the other rows from the copied ones' distribution."""
    rows = theirs[there].to(ours.dtype)
    mean, deviation = rows.mean(dim=0), rows.std(dim=0)
    ours.copy_(mean + deviation * torch.randn_like(ours) if spread else mean.expand_as(ours))
    ours[here] = rows
