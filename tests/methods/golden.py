"""Five losses of every method on tiny random models: what `tests/golden_losses.json` holds, and how it was made.

Everything goes through the command line, and everything it needs (models, tokenizers, texts) is made here from
fixed numbers of numpy's frozen generator: the file says the same whatever the package looks like inside. Written once
with the code of 3e130d8 (`python tests/methods/golden.py` prints it); a change of a loss is a change of a method.
"""

from __future__ import annotations

import csv
import json
import string
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pytest

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "house",
    "river",
    "runs",
    "sees",
    "likes",
    "red",
    "old",
    "small",
    "happy",
    "fast",
    "of",
    "in",
    "on",
    "with",
    "bird",
    "tree",
]
GOLDEN = Path(__file__).parents[1] / "golden_losses.json"
STEPS = 5
_BERT_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

BASICS = (
    "backbone=local", "trainer=cpu", f"trainer.max_steps={STEPS}", "trainer.log_every_n_steps=1",
    "callbacks.progress=none", "optimizer.lr=3e-4", "data.batch_size=8", "data.max_length=16",
    "data.report=false", "data.processes=1", "evaluation.final=[]", "evaluation.before=false",
)  # fmt: skip
_TWIN = ("pooling=cls", "method.tower2={other}", "method.n_ca=1")
_DECODER = ("backbone.path={decoder}", "adapter=lora", "adapter.r=4")
METHODS: dict[str, tuple[str, ...]] = {
    "simcse": ("method=simcse", "pooling=cls"),
    "simcse_supervised": ("method=simcse", "method.mlp=none", "pooling=cls_mlp", "data=nli", "data.files={nli}"),
    # The same loss as supervised SimCSE's, whose values it has.
    "supervised": ("method=supervised", "pooling=cls_mlp", "data=nli", "data.files={nli}"),
    "promptbert": ("method=promptbert", "pooling=mask", "template=promptbert_bert"),
    "bepa": ("method=bepa", "pooling=cls", "data=parallel", "data.files={parallel}"),
    "jtcse": ("method=jtcse", *_TWIN),
    "tncse": ("method=tncse", *_TWIN),
    "distil": ("method=distil", "pooling=cls", "method.teacher={twin}"),
    "rankcse": ("method=rankcse", "pooling=cls", "method.teacher={other}", "method.teacher2={bert}",
                "method.teacher_pooling=mean"),
    "rankcse_listnet": ("method=rankcse", "method.ranking=listnet", "pooling=cls", "method.teacher={other}",
                        "method.teacher_pooling=mean"),
    "esimcse": ("method=esimcse", "pooling=cls"),
    "mixcse": ("method=mixcse", "pooling=cls"),
    "whitenedcse": ("method=whitenedcse", "pooling=cls", "method.groups=16", "method.eps=1e-2"),
    "diffcse": ("method=diffcse", "pooling=cls", "method.lam=0.5"),
    "infocse": ("method=infocse", "pooling=cls", "method.weight=0.1"),
    "pcl": ("method=pcl", "pooling=cls"),
    "sncse": ("method=sncse", "pooling=mask", "template=promptbert_bert_2", "method.lam=0.5", "data=parallel",
              "data.files={parallel}"),
    "masked_lm": ("method=masked_lm", "pooling=mean", "data.pack=32", "data.max_length=null",
                  "data.batch_size=3"),
    "causal_lm": ("method=causal_lm", "pooling=mean", "data.pack=32", "data.max_length=null",
                  "data.batch_size=3", "backbone.path={decoder}"),
    "mntp": ("method=mntp", "pooling=mean", "data.pack=32", "data.max_length=null", "data.batch_size=3",
             "backbone.path={decoder}", "backbone.bidirectional=true"),
    "csesfp": ("method=csesfp", "pooling=rep2", "template=eol_sum", *_DECODER),
    "prompteol": ("method=prompteol", "pooling=last", "template=eol", *_DECODER),
}  # fmt: skip
"""What each method's run says beyond `BASICS`. A name in braces is a file or folder of `Inputs`."""


class Inputs:
    """The models and texts of the runs, in a folder that must be empty; made as they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self, argument: str) -> str:
        """``method.tower2={other}`` with the path of what the braces name."""
        names = [name for _, name, _, _ in string.Formatter().parse(argument) if name]
        return argument.format(**{name: self.path(name) for name in names})

    def path(self, name: str) -> Path:
        """The file or folder called `name`."""
        endings = {"text": ".txt", "nli": ".csv", "parallel": ".tsv"}
        path = self.folder / f"{name}{endings.get(name, '')}"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            make: dict[str, Callable[[Path], object]] = {
                "bert": tiny_bert,
                "other": partial(tiny_bert, seed=1),
                "deep": partial(tiny_bert, layers=4),
                "decoder": tiny_decoder,
                "twin": lambda folder: train(self, folder, "jtcse", "unpad=false"),  # as it was trained then
            }
            if name in make:
                make[name](path)
            else:
                path.write_text(_texts(name), encoding="utf-8")
        return path


def train(inputs: Inputs, run: Path, method: str, *more: str) -> list[float]:
    """Train `method` in the folder `run` by the command line, and return the loss of every step.

    Raises:
        RuntimeError: the command ends with another status than 0.
    """
    line = [*BASICS, "backbone.path={bert}", "data.files={text}", *METHODS[method], *more]
    given: dict[str, str] = {}
    for argument in map(inputs.fill, line):
        given[argument.partition("=")[0]] = argument  # the last one of a key counts
    command("train", *given.values(), f"hydra.run.dir={run}")
    return losses(run)


def losses(run: Path) -> list[float]:
    """The column of losses in a run's metrics.csv, to the last digit."""
    with (run / "metrics.csv").open(newline="") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


def command(*arguments: str) -> None:
    """Run one ``embedlab`` command in this process; RuntimeError where it does not end well."""
    from embedlab.cli.main import main

    if status := main(list(arguments)):
        raise RuntimeError(f"embedlab {' '.join(arguments)} ended with status {status}")


def golden_losses(method: str, tmp_path: Path) -> list[float]:
    """The five losses of `method` (a key of `METHODS`) with the code that is there, one process, eager steps.

    Set EMBEDLAB_CACHE to a folder of the test's own before; `expected` has what they must be.
    """
    return train(Inputs(tmp_path / "inputs"), tmp_path / "run", method, "step=eager", "unpad=false")


def check_golden(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that the five losses of `method` are those of before."""
    import pytest  # here: `tools/golden.py` runs this file without it

    monkeypatch.setenv("EMBEDLAB_CACHE", str(tmp_path / "cache"))
    assert golden_losses(method, tmp_path) == pytest.approx(expected(method), rel=1e-5)


def expected(method: str) -> list[float]:
    """The losses that the code of 3e130d8 gave."""
    return list(json.loads(GOLDEN.read_text(encoding="utf-8"))["losses"][method])


def sentences(n: int, seed: int = 0) -> list[str]:
    """`n` distinct sentences of 4 to 12 common words."""
    draw, texts = np.random.RandomState(seed), dict[str, None]()
    while len(texts) < n:
        texts[" ".join(WORDS[i] for i in draw.randint(len(WORDS), size=draw.randint(4, 13)))] = None
    return list(texts)


def translated(text: str, mark: str = "o") -> str:
    """The same words, each in a spelling of its own: a language that has to be learned."""
    return " ".join(word[::-1] + mark for word in text.split())


def _texts(name: str) -> str:
    if name == "text":
        rows = sentences(64)
    elif name == "parallel":
        rows = ["en\tox", *(f"{text}\t{translated(text)}" for text in sentences(64, seed=1))]
    elif name == "nli":
        draws = [sentences(64, seed) for seed in (2, 3, 4)]
        rows = ["sent0,sent1,hard_neg", *(",".join(row) for row in zip(*draws, strict=True))]
    else:
        raise KeyError(name)
    return "\n".join(rows) + "\n"


def tiny_bert(folder: Path, seed: int = 0, layers: int = 2, width: int = 32) -> Path:
    """A random BERT with a WordPiece tokenizer of the letters and of `WORDS`, as a Hugging Face folder."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    letters = [chr(c) for c in range(33, 127) if not chr(c).isupper()]
    rows = [*_BERT_TOKENS, *letters, *("##" + c for c in letters), *(w for w in WORDS if w not in letters)]
    inner = Tokenizer(models.WordPiece({token: i for i, token in enumerate(rows)}, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    ends = [(token, rows.index(token)) for token in ("[CLS]", "[SEP]")]
    inner.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, model_max_length=64, model_input_names=["input_ids", "attention_mask"],
        padding_side="right", **dict(zip(names, _BERT_TOKENS, strict=True)),
    )  # fmt: skip
    config = BertConfig(
        vocab_size=len(rows), num_hidden_layers=layers, hidden_size=width, num_attention_heads=4,
        intermediate_size=2 * width, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    return _write(BertForMaskedLM(config), tokenizer, folder, seed)


def tiny_decoder(folder: Path, seed: int = 0, layers: int = 2, width: int = 32) -> Path:
    """A random LLaMA that reads bytes, as a Hugging Face folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>"]
    rows = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(rows)}, [], unk_token="<unk>"))
    inner.add_special_tokens([AddedToken(token, special=True) for token in special])
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, model_max_length=256, model_input_names=["input_ids", "attention_mask"],
        padding_side="right", unk_token="<unk>", bos_token="<s>", eos_token="</s>",
    )  # fmt: skip
    config = LlamaConfig(
        vocab_size=len(rows), num_hidden_layers=layers, hidden_size=width, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=2 * width, max_position_embeddings=256,
        pad_token_id=None, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return _write(LlamaForCausalLM(config), tokenizer, folder, seed)


def _write(model, tokenizer, folder: Path, seed: int) -> Path:  # type: ignore[no-untyped-def]
    """Fill a model from numpy's frozen generator, whatever its library would have drawn, and write it."""
    import torch

    draw = np.random.RandomState(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            values = draw.standard_normal(tuple(p.shape)) * (0.08 if p.dim() >= 2 else 0.1)
            scale = p.dim() == 1 and name.endswith("weight")
            p.copy_(torch.from_numpy(values + scale))
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    """Print `tests/golden_losses.json` as the code that is there makes it."""
    import contextlib

    with contextlib.redirect_stdout(sys.stderr):
        values = {}
        for method in METHODS:
            with tempfile.TemporaryDirectory() as folder:
                values[method] = golden_losses(method, Path(folder))
    note = (
        "Five losses of each method on tiny random models (tests/methods/golden.py), by the code of 3e130d8."
    )
    print(json.dumps({"note": note, "losses": values}, indent=2))


if __name__ == "__main__":
    main()
