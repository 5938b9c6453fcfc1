"""Backbones from nothing: the architecture of random weights, and a tokenizer learned from text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any, cast

from embedlab.backbones.architecture import is_decoder
from embedlab.config.backbone import TOKENIZERS
from embedlab.errors import UserError, one_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

_ALPHABET = 1000  # characters of a WordPiece vocabulary, as BERT's; rarer ones become [UNK]
_LONGEST_TEXT = 100_000


@dataclass(frozen=True)
class FreshConfig:
    """The architecture of random weights. `more`: keys of the architecture's own configuration.

    `init_from`: begin with the body of this checkpoint instead (`embedlab.backbones.warm_start`).
    """

    model_type: str = "bert"
    layers: int = 12
    width: int = 256
    heads: int = 4
    ffn: int = 1024
    vocab_size: int = 16384
    max_positions: int = 512
    tokenizer: str = "wordpiece"
    lowercase: bool = True
    init_from: str | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("layers", "width", "heads", "ffn", "vocab_size", "max_positions"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                key = f"backbone.fresh.{key}"
                raise UserError("not a whole number from 1 up", key=key, value=value, fix=f"{key}=64")
        if self.width % self.heads:
            raise UserError(
                f"the width {self.width} does not divide into the heads",
                key="backbone.fresh.heads",
                value=self.heads,
                fix="a divisor of the width",
            )
        if self.init_from is not None and not (isinstance(self.init_from, str) and self.init_from):
            raise UserError(
                "neither the name of a shipped encoder nor the path of a model folder",
                key="backbone.fresh.init_from",
                value=self.init_from,
                fix="mini, the path of a model folder, or null for random weights",
            )
        if self.tokenizer not in TOKENIZERS:
            raise UserError(
                "unknown tokenizer",
                key="backbone.fresh.tokenizer.type",
                value=self.tokenizer,
                fix=one_of(self.tokenizer, TOKENIZERS),
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FreshConfig:
        """Read ``backbone.fresh``.

        Raises:
            UserError: a value out of range.
        """
        plain = dict(values)
        tokenizer = dict(plain.pop("tokenizer", None) or {})
        kind = tokenizer.pop("type", "wordpiece")
        lowercase = bool(tokenizer.pop("lowercase", kind == "wordpiece"))
        if tokenizer:
            key = next(iter(tokenizer))
            raise UserError(
                "unknown key",
                key=f"backbone.fresh.tokenizer.{key}",
                value=tokenizer[key],
                fix="type, lowercase",
            )
        own = {k: plain.pop(k) for k in list(plain) if k in cls.__dataclass_fields__ and k != "more"}
        if own.get("ffn") is None:
            own["ffn"] = 4 * own.get("width", cls.width)
        return cls(**own, tokenizer=kind, lowercase=lowercase, more=plain)


def fresh_config(fresh: FreshConfig, tokenizer: PreTrainedTokenizerFast | None = None) -> PretrainedConfig:
    """The Hugging Face configuration of a fresh backbone.

    Args:
        fresh: its shape.
        tokenizer: for the size of the vocabulary and the special ids.

    Raises:
        UserError: an architecture that transformers does not have, or a key that it does not have.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(fresh.model_type)
    except ValueError as error:
        raise UserError(
            "transformers has no such architecture",
            key="backbone.fresh.model_type",
            value=fresh.model_type,
            fix="bert, distilbert, roberta, modernbert, gpt2, llama, qwen2, ...",
        ) from error
    from embedlab.backbones.architecture import position_offset

    shape: dict[str, Any] = {
        "num_hidden_layers": fresh.layers,
        "hidden_size": fresh.width,
        "num_attention_heads": fresh.heads,
        "vocab_size": max(fresh.vocab_size, len(tokenizer) if tokenizer is not None else 0),
    }
    for key in ("intermediate_size", "hidden_dim", "n_inner", "ffn_dim"):
        if hasattr(config, key):
            shape[key] = fresh.ffn
            break
    if hasattr(config, "num_key_value_heads"):
        shape["num_key_value_heads"] = fresh.heads
    if hasattr(config, "head_dim"):
        shape["head_dim"] = fresh.width // fresh.heads
    if hasattr(config, "word_embed_proj_dim"):
        shape["word_embed_proj_dim"] = fresh.width
    for key in ("pad", "bos", "eos", "cls", "sep"):
        if hasattr(config, f"{key}_token_id"):
            shape[f"{key}_token_id"] = getattr(tokenizer, f"{key}_token_id", None)
    for key, value in fresh.more.items():
        if not hasattr(config, key):
            fix = f"leave it out, or one of transformers' {type(config).__name__}"
            raise UserError(
                f"{fresh.model_type} has no such setting", key=f"backbone.fresh.{key}", value=value, fix=fix
            )
        shape[key] = value
    config = AutoConfig.for_model(fresh.model_type, **shape)
    config.max_position_embeddings = fresh.max_positions + position_offset(config)
    return config


def train_tokenizer(fresh: Mapping[str, Any] | FreshConfig, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Learn a tokenizer: the same one from the same texts.

    ``wordpiece``: BERT's, [CLS] text [SEP]. ``bpe``: byte-level; a decoder's adds no special tokens at all,
    an encoder's has RoBERTa's. ``unigram``: SentencePiece-like, XLM-RoBERTa's special tokens (none added
    for a decoder).

    Args:
        fresh: its type and size, and of which architecture.
        texts: read once, as a stream.

    Raises:
        UserError: no text, or a WordPiece tokenizer for a decoder.
    """
    from transformers import PreTrainedTokenizerFast

    if not isinstance(fresh, FreshConfig):
        fresh = FreshConfig.from_dict(fresh)
    decoder = is_decoder(fresh.model_type)
    if fresh.tokenizer == "wordpiece" and decoder:
        raise UserError(
            "WordPiece forgets white space, which a decoder writes",
            key="backbone.fresh.tokenizer.type",
            value="wordpiece",
            fix="bpe or unigram",
        )
    learn = {"wordpiece": _wordpiece, "bpe": _bpe, "unigram": _unigram}[fresh.tokenizer]
    stream = _Counted(texts)
    tokenizer, special = learn(fresh, stream, decoder)
    if not stream.texts:
        raise UserError("no text to learn a tokenizer from", key="data", fix="data.files=... with text in it")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=fresh.max_positions,
        model_input_names=["input_ids", "attention_mask"],
        padding_side="right",
        clean_up_tokenization_spaces=False,
        **special,
    )


class _Counted:
    """Texts as they pass, counted."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._source = texts
        self.texts = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._source:
            self.texts += 1
            yield text[:_LONGEST_TEXT]


_BERT = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
_ROBERTA = {
    "bos_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "cls_token": "<s>",
    "sep_token": "</s>",
    "mask_token": "<mask>",
}
_GPT = {"eos_token": "<|endoftext|>", "pad_token": "<|padding|>"}
_SENTENCEPIECE = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def _frame(tokenizer: Tokenizer, first: str, last: str) -> None:
    from tokenizers.processors import TemplateProcessing

    special = [(t, tokenizer.token_to_id(t)) for t in (first, last)]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {last} $B {last}", special_tokens=special
    )


def _wordpiece(fresh: FreshConfig, texts: Iterable[str], decoder: bool) -> tuple[Tokenizer, dict[str, str]]:
    """BERT's. The alphabet is counted first, for which the texts are laid by on disk.

    `tokenizers` numbers the ``##x`` pieces in the order of a hash map, and frequency ties are broken by
    these numbers: each run would learn other pieces. Given the numbers, it learns the same.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    normalizer = normalizers.BertNormalizer(lowercase=fresh.lowercase)
    splitter = pre_tokenizers.BertPreTokenizer()
    special = list(_BERT.values())
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as kept:
        seen: Counter[str] = Counter()
        for text in texts:
            seen.update(text)
            kept.write(" ".join(text.split()) + "\n")
        counts: Counter[str] = Counter()
        for letter, n in seen.items():
            for c in normalizer.normalize_str(letter):
                if not c.isspace():
                    counts[c] += n
        alphabet = sorted(sorted(counts, key=lambda c: (-counts[c], c))[:_ALPHABET])
        inner = ["##" + c for c in alphabet if len(splitter.pre_tokenize_str("a" + c)) == 1]
        learner = Tokenizer(models.BPE())
        learner.normalizer, learner.pre_tokenizer = normalizer, splitter
        trainer = trainers.BpeTrainer(
            vocab_size=fresh.vocab_size,
            min_frequency=2,
            special_tokens=special + inner,
            initial_alphabet=alphabet,
            limit_alphabet=max(1, len(alphabet)),
            continuing_subword_prefix="##",
            show_progress=False,
        )
        learner.train_from_iterator(_lines(kept), trainer)
    order = sorted(learner.get_vocab().items(), key=lambda item: item[1])
    vocabulary = {piece: i for i, (piece, _) in enumerate(order)}
    # The normaliser and the splitter again: the learner holds the ##x pieces as special tokens.
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=fresh.lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(special)
    _frame(tokenizer, "[CLS]", "[SEP]")
    return tokenizer, _BERT


def _lines(kept: IO[str]) -> Iterator[str]:
    kept.seek(0)
    for line in kept:
        yield line.rstrip("\n")


def _bpe(fresh: FreshConfig, texts: Iterable[str], decoder: bool) -> tuple[Tokenizer, dict[str, str]]:
    """Byte-level, as GPT-2's and RoBERTa's."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    special = _GPT if decoder else _ROBERTA
    tokenizer = Tokenizer(models.BPE())
    if fresh.lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=fresh.vocab_size,
        min_frequency=2,
        special_tokens=list(dict.fromkeys(special.values())),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if not decoder:
        _frame(tokenizer, "<s>", "</s>")
    return tokenizer, special


def _unigram(fresh: FreshConfig, texts: Iterable[str], decoder: bool) -> tuple[Tokenizer, dict[str, str]]:
    """SentencePiece's unigram model."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    def pipeline(tokenizer: Tokenizer) -> Tokenizer:
        steps: list[Any] = [normalizers.NFKC()]
        if fresh.lowercase:
            steps.append(normalizers.Lowercase())
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        tokenizer.normalizer = normalizers.Sequence(steps)
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        return tokenizer

    special = _SENTENCEPIECE if decoder else _ROBERTA
    names = list(dict.fromkeys(special.values()))
    learner = pipeline(Tokenizer(models.Unigram()))
    trainer = trainers.UnigramTrainer(
        vocab_size=fresh.vocab_size, special_tokens=names, unk_token="<unk>", show_progress=False
    )
    learner.train_from_iterator(texts, trainer)
    learned = cast("list[tuple[str, float]]", json.loads(learner.to_str())["model"]["vocab"])
    pieces = _settled([(piece, score) for piece, score in learned if piece not in names])
    tokenizer = pipeline(
        Tokenizer(
            models.Unigram(
                [(n, 0.0) for n in names] + pieces, unk_id=names.index("<unk>"), byte_fallback=False
            )
        )
    )
    tokenizer.add_special_tokens(names)
    if not decoder:
        _frame(tokenizer, "<s>", "</s>")
    return tokenizer, special


def _settled(learned: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Pieces and scores without what the trainer's hash maps leave to chance.

    Expectation-maximisation adds up in their order, which moves the last digits; and the characters that it
    drops come back in their order, each 0.0001 from the last, around the lowest score: these all get that
    score.
    """
    floor = min((score for piece, score in learned if len(piece) > 1), default=0.0)
    band = floor + 1e-4 * sum(len(piece) == 1 for piece, _ in learned)
    pieces = [(p, round(floor if len(p) == 1 and score <= band else score, 5)) for p, score in learned]
    return sorted(pieces, key=lambda item: (-item[1], item[0]))
