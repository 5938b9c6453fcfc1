"""Tiny random models with real tokenizers, built on the fly: what the tests train, encode and export.

Everything here is deterministic: the same arguments give the same bytes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SENTENCES: tuple[str, ...] = (
    "A man is playing a guitar on the stage.",
    "The girl reads a book in the quiet library.",
    "Two dogs run across the green field after a ball.",
    "The stock market fell sharply on Monday morning.",
    "She is cooking rice and vegetables for dinner.",
    "A plane is taking off from the runway.",
    "The committee will vote on the new law tomorrow.",
    "He repaired the old bicycle with his own hands.",
    "Children are swimming in the lake near the mountains.",
    "The scientist explained how stars are born.",
    'This sentence of "the cat sat on the mat" means nothing.',
    'This sentence : "it rains" means in one word, it can also be summarized as weather:',
    "The train to the city leaves at seven; buy a ticket (or two)!",
    "Is the museum open? Yes, from 9 to 5, every day.",
    "An old fisherman waited for the tide's return.",
    "Zebras, foxes and jackals quietly watched the vexing wizard.",
)
"""A handful of sentences: enough text for a tiny vocabulary and for a batch."""

ENCODERS: tuple[str, ...] = ("bert", "distilbert", "roberta", "xlm-roberta", "modernbert")
DECODERS: tuple[str, ...] = ("gpt2", "opt", "llama", "qwen2", "gpt_neox", "mistral")
MODEL_TYPES: tuple[str, ...] = ENCODERS + DECODERS

_SPECIALS: dict[str, dict[str, str]] = {
    "bert": {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    },
    "roberta": {
        "bos_token": "<s>",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "cls_token": "<s>",
        "sep_token": "</s>",
        "mask_token": "<mask>",
    },
    "gpt2": {"eos_token": "<|endoftext|>"},
    "qwen2": {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    "opt": {"bos_token": "</s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"},
    "llama": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
}
_LIKE = {
    "distilbert": "bert",
    "modernbert": "bert",
    "xlm-roberta": "roberta",
    "gpt_neox": "gpt2",
    "mistral": "llama",
}
_WHOLE_MODEL = {
    "bert": ("BertConfig", "BertForMaskedLM"),
    "distilbert": ("DistilBertConfig", "DistilBertForMaskedLM"),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM"),
    "xlm-roberta": ("XLMRobertaConfig", "XLMRobertaForMaskedLM"),
    "modernbert": ("ModernBertConfig", "ModernBertForMaskedLM"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "opt": ("OPTConfig", "OPTForCausalLM"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
}


_SHAPE = {"layers": 2, "width": 32, "heads": 4, "ffn": 64}
_FRAME = {"bert": ("[CLS]", "[SEP]"), "roberta": ("<s>", "</s>"), "opt": ("</s>", ""), "llama": ("<s>", "")}


def tiny_tokenizer(
    model_type: str, texts: Iterable[str] = SENTENCES, vocab_size: int = 400, max_length: int = 64
) -> PreTrainedTokenizerFast:
    """A tokenizer of the architecture's kind (WordPiece, Unigram or BPE), learned from `texts`."""
    kind = _LIKE.get(model_type, model_type)
    special = _SPECIALS[kind]
    tokens = list(dict.fromkeys(special.values()))
    texts = list(texts)
    # WordPiece and Unigram vocabularies are counted here: `tokenizers` trains them in hash order.
    if kind == "bert":
        letters = [chr(c) for c in range(33, 127) if not chr(c).isupper()]
        rows = [*tokens, *letters, *("##" + c for c in letters)]
        rows += [w for w in _pieces(" ".join(texts).lower()) if w not in letters]
        tok = Tokenizer(models.WordPiece({w: i for i, w in enumerate(rows[:vocab_size])}, unk_token="[UNK]"))
        tok.normalizer = normalizers.BertNormalizer(lowercase=True)
        tok.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tok.decoder = decoders.WordPiece()
    elif model_type == "xlm-roberta":
        letters = ["▁", *(chr(c) for c in range(33, 127))]
        rows = [*tokens, *letters, *("▁" + w for w in _pieces(" ".join(texts)))]
        scored = [(w, 0.0 if i < len(tokens) else -4.0 - i / 100) for i, w in enumerate(rows[:vocab_size])]
        tok = Tokenizer(models.Unigram(scored, unk_id=tokens.index("<unk>"), byte_fallback=False))
        tok.normalizer = normalizers.NFKC()
        tok.pre_tokenizer = pre_tokenizers.Metaspace()
        tok.decoder = decoders.Metaspace()
    elif kind == "llama":
        tok = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        # Learned word by word with punctuation apart, used on whole texts: as SentencePiece does.
        tok.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Punctuation("isolated")]
        )
        tok.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        tokens += [f"<0x{b:02X}>" for b in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size + 256, special_tokens=tokens, max_token_length=12, show_progress=False
        )
        tok.train_from_iterator(texts, trainer)
        tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tok = Tokenizer(models.BPE())
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tok.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=tokens,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tok.train_from_iterator(texts, trainer)
    first, last = _FRAME.get(kind, ("", ""))
    if first:
        parts = [first, "$A", last] if last else [first, "$A"]
        used = [t for t in (first, last) if t]
        tok.post_processor = processors.TemplateProcessing(
            single=" ".join(parts), special_tokens=[(t, tok.token_to_id(t)) for t in dict.fromkeys(used)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tok,
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
        padding_side="right",
        **special,
    )


def _pieces(text: str) -> list[str]:
    """Words and halves of long words, most frequent first (ties by spelling)."""
    counts: Counter[str] = Counter()
    for word in re.findall(r"\w+|[^\w\s]", text):
        counts[word] += 1
        counts[word[: (len(word) + 1) // 2]] += 1
    return sorted(counts, key=lambda w: (-counts[w], w))


def _arch(model_type: str, tokenizer: PreTrainedTokenizerFast, **arch: Any) -> dict[str, Any]:
    layers, width, heads, ffn = (arch.pop(k, d) for k, d in _SHAPE.items())
    positions = arch.pop("max_positions", 64)
    ids = {
        k: getattr(tokenizer, k)
        for k in ("pad_token_id", "bos_token_id", "eos_token_id")
        if getattr(tokenizer, k) is not None
    }
    ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, **ids}
    common = dict(vocab_size=len(tokenizer), **ids)
    if model_type == "distilbert":
        keys = {
            "n_layers": layers,
            "dim": width,
            "n_heads": heads,
            "hidden_dim": ffn,
            "max_position_embeddings": positions,
        }
    elif model_type == "gpt2":
        keys = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_inner": ffn, "n_positions": positions}
    elif model_type == "opt":
        keys = {
            "num_hidden_layers": layers,
            "hidden_size": width,
            "num_attention_heads": heads,
            "ffn_dim": ffn,
            "word_embed_proj_dim": width,
            "max_position_embeddings": positions,
        }
    else:
        # RoBERTa's position ids start at padding_idx + 1
        offset = 2 if model_type in ("roberta", "xlm-roberta") else 0
        keys = {
            "num_hidden_layers": layers,
            "hidden_size": width,
            "num_attention_heads": heads,
            "intermediate_size": ffn,
            "max_position_embeddings": positions + offset,
        }
    if model_type in ("llama", "qwen2", "mistral"):
        keys["num_key_value_heads"] = max(1, heads // 2)
    if model_type == "modernbert":
        keys |= {"cls_token_id": tokenizer.cls_token_id, "sep_token_id": tokenizer.sep_token_id}
    return {**common, **keys, **arch}


def tiny_backbone(
    model_type: str, folder: str | Path, *, head: bool = True, seed: int = 0, **arch: Any
) -> Path:
    """Write a Hugging Face folder with random weights and its tokenizer; returns `folder`.

    model_type: one of MODEL_TYPES. arch: layers=2, width=32, heads=4, ffn=64, max_positions=64, vocab_size
    (at most 400 by default), or any key of the architecture's own configuration. head=False leaves out the
    MLM / LM head.
    """
    folder = Path(folder)
    config_name, model_name = _WHOLE_MODEL[model_type]
    tokenizer = tiny_tokenizer(
        model_type, vocab_size=arch.pop("vocab_size", 400), max_length=arch.get("max_positions", 64)
    )
    config = getattr(transformers, config_name)(**_arch(model_type, tokenizer, **arch))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_name)(config)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.dim() >= 2:  # the library's 0.02 leaves a narrow model nearly constant
                    p.mul_(4.0)
                elif name.endswith("bias"):
                    p.normal_(0, 0.1)
    (model if head else model.base_model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
