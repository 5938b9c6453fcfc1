"""A decoder's training step with LoRA, with padding and without: CSE-SFP and PromptEOL on SmolLM2-135M's shape.

    python -m benchmarks.decoder_step [--layers 30] [--batch 256] [--steps 24] [--arms NAME,...] [--before CHECKOUT]
        [--json OUT]

Weights, words and the tokenizer are random: nothing is fetched. Sentences of up to 32 tokens stand in prompts of up to
48, and about a fifth of the cells is padding. The arms run in turn on one device:

    before          CSE-SFP, padded, PEFT's layers one by one
    packed          CSE-SFP without padding, PEFT's layers one by one
    joined          CSE-SFP without padding, layers of one input as one (`embedlab.backbones.joined_lora`)
    fused           CSE-SFP without padding, blocks written out (`embedlab.kernels.decoder.fused_decoder`)
    fused-all       as `fused`, the last block computed for all tokens
    two-passes      PromptEOL, the same prompt twice, as `fused`: CSE-SFP's share of its time is ideally
                    L2 / (2 L1) = .5
    joined-two      PromptEOL as `joined`
    before-two      PromptEOL as `before`
    older, older-two  CSE-SFP and PromptEOL by an older checkout's captured step, in a process of its own (`--before`)

True tokens a second count no padding. The share of the peak is that of the products that true tokens need: 4 for each
frozen weight and 6 for each trained one, and causal attention three times its forward pass. It counts all tokens in
all blocks: `fused` and `two-passes` leave out 2.6 % of the products (what follows attention in the last block, but for
the tokens that are read), `fused-all` none. On the CPU steps are eager.
With ``--attention`` the packed kernel is timed against torch's `varlen_attn`.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import platform
import random
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.fit import Older
from benchmarks.training_step import matrix_peak, project_settings, sync, this_project
from embedlab.kernels.capture import capturing

WIDTH, INNER, HEADS, SHARED, RANK, TEXT = 576, 1536, 9, 3, 16, 32
ARMS: dict[str, tuple[str, str, str]] = {
    "before": ("csesfp", "false", "joined_lora=0"),
    "packed": ("csesfp", "auto", "joined_lora=0,fused_decoder=0"),
    "joined": ("csesfp", "auto", "fused_decoder=0"),
    "fused": ("csesfp", "auto", ""),
    "fused-all": ("csesfp", "auto", "last_block=0"),
    "two-passes": ("prompteol", "auto", ""),
    "joined-two": ("prompteol", "auto", "fused_decoder=0"),
    "before-two": ("prompteol", "false", "joined_lora=0"),
}
"""Method, ``unpad``, and ``EMBEDLAB_KERNELS``."""
OLDER = {"older": "csesfp", "older-two": "prompteol"}
PROMPT = "This sentence : means in one word , it can be summarized as"


def architecture(layers: int, words: list[str]) -> Path:
    """SmolLM2-135M's shape with random weights, and a byte-level tokenizer with a token for each word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    made.train_from_iterator([PROMPT, *(f"{w} {w}" for w in words)], trainer)
    end = "<|endoftext|>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end, pad_token=end)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=SHARED, max_position_embeddings=2048, rms_norm_eps=1e-5,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    out = Path(tempfile.mkdtemp())
    LlamaModel(config).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def sentences(n: int) -> tuple[list[str], list[str]]:
    """Words, and sentences of 4 to 45 of them."""
    draw = random.Random(0)
    words = ["".join(draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(4)) for _ in range(1500)]
    return words, [
        " ".join(draw.choices(words, k=min(45, max(4, round(draw.lognormvariate(3.0, 0.5))))))
        for _ in range(n)
    ]


def operations(layers: int, length: float) -> float:
    """Of one true token in a training step."""
    shared = WIDTH * SHARED // HEADS
    shapes = [(WIDTH, WIDTH)] * 2 + [(WIDTH, shared)] * 2 + [(WIDTH, INNER)] * 3
    frozen, trained = sum(a * b for a, b in shapes), RANK * sum(a + b for a, b in shapes)
    return layers * (4 * frozen + 6 * trained + 3 * 2 * 2 * WIDTH * length / 2)


def lengths_of(folder: Path, texts: list[str]) -> list[int]:
    """Tokens of the sentences in CSE-SFP's prompt."""
    from transformers import AutoTokenizer

    from embedlab.cli.compose import compose
    from embedlab.config.template import Template
    from embedlab.encoders.tokenization import Tokenization

    template = Template(**compose("train", ["template=eol_sum", "method=csesfp"])["template"])
    tokenization = Tokenization(AutoTokenizer.from_pretrained(folder), template, TEXT)
    return [len(ids) for ids in tokenization.ids(texts)]


def step_of(
    arm: str, folder: Path, texts: list[str], options: argparse.Namespace, older: Older | None
) -> dict[str, float]:
    method, unpad, switches = ARMS.get(arm) or (OLDER[arm], "auto", "")
    os.environ["EMBEDLAB_KERNELS"] = switches
    more = (
        f"method={method}", "pooling=rep2", "template=eol_sum", "adapter=lora", f"adapter.r={RANK}",
        f"data.max_length={TEXT}", f"unpad={unpad}", "data.shuffle=false", "optimizer.lr=1e-4",
        "evaluation.before=false",
    )  # fmt: skip
    step = "graph" if torch.cuda.is_available() else "eager"
    # The same batches twice: each shape has its graph when the clock starts.
    steps = options.steps
    began = time.perf_counter()
    log: dict[str, float] = {}
    if arm in OLDER:
        if older is None:
            raise SystemExit(f"{arm}: of which checkout? --before FOLDER")
        with tempfile.TemporaryDirectory() as out:
            more = (f"data.batch_size={options.batch}", *more)
            settings = project_settings(folder, texts, Path(out), 2 * steps, step, more)
            seconds = older.fit(settings, 2 * steps)["seconds"]
    else:
        seconds, log = this_project(folder, texts, options.batch, 2 * steps, step, more, steps)
    return {
        "ms": 1e3 * seconds,
        "whole_s": time.perf_counter() - began,
        **({"loss": log["train/loss"]} if "train/loss" in log else {}),
    }


def attention(lengths: list[int]) -> None:
    """Forward and backward of one layer's attention: the packed kernel and torch's, in bf16."""
    from torch.nn.attention.varlen import varlen_attn

    from embedlab.kernels.varlen_attention import varlen_attention

    bounds = torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int().cuda()
    tokens, width, longest = int(bounds[-1]), WIDTH // HEADS, max(lengths)
    q, k, v = (
        torch.randn(tokens, h, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for h in (HEADS, SHARED, SHARED)
    )
    above = torch.randn_like(q)
    seed = torch.zeros(1, dtype=torch.long, device="cuda")

    def own() -> torch.Tensor:
        heads = (x.transpose(0, 1)[None] for x in (q, k, v))
        return varlen_attention(*heads, bounds, seed, 64, width**-0.5, 0.0, True)[0].transpose(0, 1)

    known = inspect.signature(varlen_attn).parameters  # of torch 2.10, 2.11 and 2.12 each its own
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}

    def torchs() -> torch.Tensor:
        return varlen_attn(q, k, v, bounds, bounds, longest, longest, **causal, **grouped)  # type: ignore[return-value]

    for name, run in (("packed kernel", own), ("varlen_attn", torchs)):
        try:
            both = captured(lambda run=run: torch.autograd.grad(run(), (q, k, v), above), 10)  # type: ignore[misc]
            times = []
            for _ in range(20):
                sync()
                began = time.perf_counter()
                both.replay()
                sync()
                times.append((time.perf_counter() - began) / 10)
            print(f"attention, {name}: {1e6 * sorted(times)[10]:.0f} us forward and backward", flush=True)
        except Exception as error:  # the steps are worth having
            print(f"attention, {name} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)


def captured(call: Callable[[], object], times: int) -> torch.cuda.CUDAGraph:
    """A graph of so many calls: launched one by one they take as long as the host does."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    with capturing(graph, stream=stream):
        for _ in range(times):
            call()
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=24, help="batches, each of which every arm sees twice")
    parser.add_argument("--arms", help="by commas; all that can run")
    parser.add_argument("--before", type=Path, help="an older checkout of this project, to compare with")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no arm after so long")
    parser.add_argument("--attention", action="store_true", help="also time attention by itself (CUDA)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    started, cuda = time.perf_counter(), torch.cuda.is_available()
    words, texts = sentences(options.batch * options.steps)
    folder = architecture(options.layers, words)
    lengths = lengths_of(folder, texts)
    mean, tokens = sum(lengths) / len(lengths), sum(lengths) / options.steps
    # Each token meets those of its own row.
    flops = tokens * operations(options.layers, sum(n * n for n in lengths) / sum(lengths))
    peak = matrix_peak() if cuda else None
    device = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    print(f"{device}, torch {torch.__version__}, batch {options.batch}, prompts of {mean:.1f} tokens, at most "
          f"{max(lengths)} ({100 * (1 - mean / max(lengths)):.0f} % padding)"
          + (f", measured bf16 peak {peak:.0f} TFLOP/s" if peak else ""), flush=True)  # fmt: skip
    if options.attention and cuda:
        attention(lengths[: options.batch])
    results: dict[str, Any] = {}
    failed: list[str] = []
    older = Older(options.before) if options.before else None
    for arm in options.arms.split(",") if options.arms else [*ARMS, *(OLDER if older else ())]:
        if time.perf_counter() - started > options.seconds:
            print(f"{arm:12} left out: the time is over", flush=True)
            continue
        try:
            row = step_of(arm, folder, texts, options, older)
        except Exception:  # the other arms are worth having
            failed.append(arm)
            traceback.print_exc()
            continue
        passes = 2 if "two" in arm else 1
        rate = passes * flops / row["ms"] / 1e9
        row |= {"true_tokens_per_second": passes * 1e3 * tokens / row["ms"], "tflops_true_tokens": rate}
        results[arm] = row
        share = f", {100 * rate / peak:.1f} % of the measured peak" if peak else ""
        print(f"{arm:12} {row['ms']:8.2f} ms a step  {row['true_tokens_per_second']:9,.0f} true tokens/s  "
              f"{rate:6.1f} TFLOP/s{share}  (loss {row.get('loss', math.nan):.4f}, {row['whole_s']:.0f} s in all)",
              flush=True)  # fmt: skip
        if options.json:
            facts = {"device": device, "torch": torch.__version__, "layers": options.layers, "batch": options.batch,
                     "mean_length": mean, "longest": max(lengths), "peak": peak,
                     "date": time.strftime("%Y-%m-%d"), "arms": results}  # fmt: skip
            options.json.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        if cuda:
            torch.cuda.empty_cache()
    if older is not None:
        older.close()
    compare(results)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def compare(results: dict[str, Any]) -> None:
    for faster, slower in (
        ("packed", "before"),
        ("joined", "before"),
        ("fused", "before"),
        ("fused", "joined"),
        ("fused", "older"),
        ("two-passes", "older-two"),
    ):
        if {faster, slower} <= results.keys():
            print(f"{faster} is {results[slower]['ms'] / results[faster]['ms']:.2f}x as fast as {slower}")
    for one, two in (("fused", "two-passes"), ("joined", "joined-two"), ("before", "before-two")):
        if {one, two} <= results.keys():
            print(
                f"one pass / two passes ({one}): {results[one]['ms'] / results[two]['ms']:.3f} (ideal 0.500)"
            )


if __name__ == "__main__":
    main()
