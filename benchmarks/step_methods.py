"""Every method's captured step with padding computed and without: time, sentences, tokens, share of the card's peak.

    python -m benchmarks.step_methods [--only jtcse,bepa] [--before CHECKOUT] [--steps 40] [--seconds 190] [--json OUT]

BERT-base's shape (ModernBERT-base's in one case) with random weights, each method at its paper's batch and lengths,
sentences of made-up text whose lengths are spread as Wikipedia's. Both arms of a case, ``unpad=auto`` and
``unpad=false``, run in one process over the same eight batches again and again: each shape has its graph when the clock
starts, after half of the updates (``start``: seconds until then). A third arm, ``before``, is an older checkout's step
by its own defaults, in a process of its own. Without a card steps are eager ones, on shapes of the tests (`--tiny`).

Tokens a second and the share of the peak count true tokens only, each as often as it passes through an encoder, and of
a whole model: blocks, their attention, and the head over the vocabulary where there is one.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.fit import Older, fit
from benchmarks.training_step import matrix_peak

BATCHES = 8


@dataclass(frozen=True)
class Case:
    settings: tuple[str, ...]
    batch: int
    model: str = "bert"


_TWIN = ("pooling=cls", "data.max_length=64", "method.tower2={other}", "optimizer.clip=null")
CASES = {
    "jtcse n=3": Case(("method=jtcse", "method.n_ca=3", *_TWIN), 64),
    "bepa": Case(
        ("method=bepa", "pooling=cls", "data=parallel", "data.files={pairs}", "data.max_length=128",
         "optimizer.accumulate=4"), 16,
    ),
    "masked lm": Case(("method=masked_lm", "pooling=mean", "data.pack=128", "data.max_length=null"), 256),
    "modernbert 32": Case(("method=simcse", "pooling=mean", "backbone.dropout=0.1"), 64, "modernbert"),
    "modernbert 64": Case(
        ("method=simcse", "pooling=mean", "backbone.dropout=0.1", "data.max_length=64"), 64, "modernbert"
    ),
    "simcse": Case(("method=simcse", "pooling=cls"), 64),
    "promptbert": Case(
        ("method=promptbert", "pooling=mask", "template=promptbert_bert", "method.second_template.join=ids",
         "method.second_template.text='This sentence : \"{{sentence}}\" means {{mask}}.'"), 256,
    ),
    "tncse": Case(("method=tncse", *_TWIN), 64),
    "jtcse n=6": Case(("method=jtcse", "method.n_ca=6", *_TWIN), 64),
    "bepa bi": Case(
        ("method=bepa", "pooling=cls", "data=parallel", "data.files={pairs}", "data.max_length=128",
         "optimizer.accumulate=4", "method.mlm_pack=bi"), 16,
    ),
    "masked lm 512": Case(("method=masked_lm", "pooling=mean", "data.pack=512", "data.max_length=null"), 64),
}  # fmt: skip


class Inputs:
    """Models and texts in a folder, made as they are asked for."""

    def __init__(self, folder: Path, tiny: bool, layers: int = 12) -> None:
        self.folder, self.tiny, self.layers = folder, tiny, layers

    def model(self, kind: str, seed: int = 0) -> Path:
        """Random weights of a base model's shape, and the shipped encoder's tokenizer."""
        from transformers import (
            AutoTokenizer,
            BertConfig,
            BertForMaskedLM,
            ModernBertConfig,
            ModernBertForMaskedLM,
            RobertaConfig,
            RobertaForMaskedLM,
        )

        from embedlab.files import assets_dir

        path = self.folder / f"{kind}{seed}"
        if path.exists():
            return path
        tokenizer = AutoTokenizer.from_pretrained(assets_dir() / "mini")
        shape: dict[str, Any] = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        if self.tiny:
            shape |= {
                "num_hidden_layers": 6,
                "hidden_size": 32,
                "num_attention_heads": 2,
                "intermediate_size": 64,
            }
        torch.manual_seed(seed)
        model: Any
        if kind == "modernbert":
            marks = {"cls_token_id": tokenizer.cls_token_id, "sep_token_id": tokenizer.sep_token_id}
            model = ModernBertForMaskedLM(
                ModernBertConfig(**shape, **marks, bos_token_id=None, eos_token_id=None)
            )
        elif kind == "roberta":  # whose positions begin behind that of padding
            shape |= {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
            shape |= {} if self.tiny else {"vocab_size": 50265}
            model = RobertaForMaskedLM(RobertaConfig(**{"num_hidden_layers": self.layers} | shape))
        else:
            model = BertForMaskedLM(BertConfig(**{"num_hidden_layers": self.layers} | shape))
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        return path

    def text(self, rows: int, times: int, pairs: bool) -> Path:
        """So many distinct sentences, all of them several times: whole words, 27 on average, a tenth more than 45."""
        from transformers import AutoTokenizer

        from embedlab.files import assets_dir

        path = self.folder / f"{rows} {times}.{'tsv' if pairs else 'txt'}"
        if path.exists():
            return path
        vocabulary = AutoTokenizer.from_pretrained(assets_dir() / "mini").get_vocab()
        words = sorted(w for w in vocabulary if w.isalpha() and w.isascii() and len(w) > 3)
        draw = random.Random(0)

        def sentence() -> str:
            return " ".join(draw.choices(words, k=max(3, round(draw.lognormvariate(3.2, 0.45)))))

        lines = [f"{sentence()}\t{sentence()}" if pairs else sentence() for _ in range(rows)]
        path.write_text("\n".join([*(["en\tox"] if pairs else []), *lines * times]) + "\n", encoding="utf-8")
        return path


def settings_of(case: Case, inputs: Inputs, unpad: str, steps: int) -> tuple[list[str], int]:
    """Of a run of twice as many updates, and its batches."""
    cuda = torch.cuda.is_available()
    batch = 8 if inputs.tiny else case.batch
    accumulate = int(next((x.rpartition("=")[2] for x in case.settings if x.startswith("optimizer.acc")), 1))
    pairs = "data=parallel" in case.settings
    pack = int(next((x.rpartition("=")[2] for x in case.settings if x.startswith("data.pack")), 0))
    total = 2 * steps * accumulate
    # Packed rows hold sentences of 28 tokens on average, and all of them have one shape.
    rows, times = (batch * BATCHES * pack // 20, 1) if pack else (batch * BATCHES, -(-total // BATCHES))
    names = {"other": inputs.model(case.model, 1), "pairs": inputs.text(rows, times, pairs)}
    return [
        "backbone=local", f"backbone.path={inputs.model(case.model)}", f"trainer={'gpu' if cuda else 'cpu'}",
        f"step={'graph' if cuda else 'eager'}", f"unpad={unpad}", f"data.batch_size={batch}", "data.shuffle=false",
        f"data.cache_dir={inputs.folder / 'cache'}", "data.report=false", "data.processes=1", "data.duplicates=keep",
        *([] if pairs else [f"data.files={names['pairs']}"]), f"trainer.max_steps={2 * steps}",
        "trainer.max_epochs=10000", f"trainer.log_every_n_steps={4 * steps}", "callbacks.progress=none",
        "callbacks.checkpoint.at_end=false", "evaluation.final=[]", "evaluation.before=false",
        "evaluation.select=last", "optimizer.lr=1e-6", *(s.format(**names) for s in case.settings),
    ], total  # fmt: skip


def measure(case: Case, inputs: Inputs, unpad: str, steps: int) -> dict[str, Any]:
    """The time of a batch in seconds, and what it computed."""
    from embedlab.engine.cuda_graph import CapturedStep
    from embedlab.kernels import fused_block

    settings, total = settings_of(case, inputs, unpad, steps)
    embed = fused_block._Embed
    with mock.patch.object(embed, "apply", side_effect=embed.apply) as fused:
        method, data, times = fit(settings, Path(tempfile.mkdtemp(dir=inputs.folder)), total)
    runner = method.runner
    graphs = runner.work._graphs if isinstance(runner, CapturedStep) and torch.cuda.is_available() else ()
    return {
        **times,
        "computed_tokens": runner.packed_tokens,
        "tier": "fused" if fused.called else "packed" if runner.packed_tokens else "padded",
        "graphs": len(graphs),
        **work(method, data, 8 if inputs.tiny else case.batch),
    }


def work(method: Any, data: Any, batch: int) -> dict[str, float]:
    """True tokens of an average batch through an encoder, sentences, and the operations of its training step."""
    table = data.table
    lengths = torch.cat(
        [torch.from_numpy(table.lengths(f)[: batch * BATCHES]).double() for f in table.fields]
    )
    passes = method.forward_passes
    backbone = method.encoder.towers[0].backbone
    products = sum(p.numel() for block in backbone.blocks for p in block.parameters() if p.dim() == 2)
    width, layers = backbone.info.inner_width, backbone.info.layers
    per_batch = len(lengths) / (batch * BATCHES) * batch
    tokens = float(lengths.mean()) * per_batch * passes
    flops = 2 * products * tokens + 4 * width * layers * float((lengths**2).mean()) * per_batch * passes
    if hasattr(method, "prediction"):
        head = width * width + width * method.prediction.vocab_size
        flops += 2 * head * method.prediction.probability * tokens / passes
    return {"tokens": tokens, "sentences": per_batch, "flops": 3 * flops}


class Table:
    """The rows that were measured, in a file as they come.

    Args:
        options: of the command line.
        inputs: of the cases.
    """

    def __init__(self, options: argparse.Namespace, inputs: Inputs) -> None:
        self.options, self.inputs = options, inputs
        self.began = time.perf_counter()
        self.found: dict[str, dict[str, Any]] = {}
        cuda = torch.cuda.is_available()
        self.peak = matrix_peak() if cuda else None
        self.device = torch.cuda.get_device_name() if cuda else "CPU"
        self.older = Older(options.before) if options.before else None
        peak = f", measured bf16 peak {self.peak:.0f} TFLOP/s" if self.peak else ""
        print(f"{self.device}, torch {torch.__version__}{peak}")
        print(f"{'method':18} {'batch':>5} {'arm':7} {'ms':>8} {'sentences/s':>11} {'tokens/s':>9} {'of peak':>7} "
              f"{'gain':>5}  tier, graphs, memory, start")  # fmt: skip

    def measure(self, name: str, arm: str) -> None:
        if time.perf_counter() - self.began > self.options.seconds:
            print(f"{name:18} {CASES[name].batch:5} {arm:7} left out: no time", flush=True)
            return
        try:
            row = self._row(name, arm)
        except Exception as error:  # the other cases are worth having
            print(f"{name:18} {CASES[name].batch:5} {arm:7} failed: {type(error).__name__}: "
                  f"{' '.join(str(error).split())[:300]}", flush=True)  # fmt: skip
            return
        finally:
            torch._dynamo.reset()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        self.found.setdefault(name, {"batch": CASES[name].batch})[arm] = row
        self._report(name, arm)
        if self.options.json:
            facts = {"device": self.device, "torch": torch.__version__, "peak": self.peak,
                     "date": time.strftime("%Y-%m-%d"), "seconds": time.perf_counter() - self.began,
                     "methods": self.found}  # fmt: skip
            self.options.json.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    def _row(self, name: str, arm: str) -> dict[str, Any]:
        case, steps = CASES[name], self.options.steps
        if arm != "before":
            return measure(case, self.inputs, arm, steps)
        assert self.older is not None
        now = self.found[name]["auto"]  # the same texts: the same work
        times = self.older.fit(*settings_of(case, self.inputs, "auto", steps))
        return {
            **times,
            "tier": "before",
            "graphs": 0,
            **{k: now[k] for k in ("tokens", "sentences", "flops")},
        }

    def _report(self, name: str, arm: str) -> None:
        rows = self.found[name]
        row, seconds = rows[arm], rows[arm]["seconds"]
        share = f"{100 * row['flops'] / seconds / 1e12 / self.peak:6.1f}%" if self.peak else "      -"
        gain = f"{seconds / rows['auto']['seconds']:5.2f}" if arm != "auto" and "auto" in rows else "    -"
        print(f"{name:18} {rows['batch']:5} {arm:7} {1e3 * seconds:8.2f} {row['sentences'] / seconds:11.0f} "
              f"{row['tokens'] / seconds:9.0f} {share} {gain}  {row['tier']}, {row['graphs']}, "
              f"{row['memory_gib']:.1f} GiB, {row['start']:.0f} s", flush=True)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="cases, by commas")
    parser.add_argument("--before", type=Path, help="an older checkout of this project, to compare with")
    parser.add_argument("--arms", help="by commas: auto,before,false (before with --before)")
    parser.add_argument("--steps", type=int, default=40, help="updates before the clock starts, and after")
    parser.add_argument("--seconds", type=float, default=190.0, help="after which no case begins")
    parser.add_argument("--tiny", action="store_true", help="shapes of the tests")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    arms = (options.arms or ("auto,before,false" if options.before else "auto,false")).split(",")
    chosen = options.only.split(",") if options.only else list(CASES)
    with tempfile.TemporaryDirectory() as folder:
        table = Table(options, Inputs(Path(folder), options.tiny))
        # The arms that compile nothing first: where time runs out, each method has one.
        for arm, name in itertools.product(arms, chosen):
            table.measure(name, arm)
        if table.older is not None:
            table.older.close()
    return 0 if all(len(table.found.get(name, {})) == 1 + len(arms) for name in chosen) else 1


if __name__ == "__main__":
    raise SystemExit(main())
