"""What one pass saves: CSE-SFP against two-pass training, on the same sentences, backbone, batch and loss.

    python benchmarks/csesfp_cost.py [--batch N,N,...] [--steps K] [--out FILE] [key=value ...]

``key=value`` changes ``experiment=csesfp_cost``: ``backbone=...``, ``adapter=...``, ``trainer=cpu``, ``step=...``,
``data.files=...``. Arms (specification, section 2.4):

    A       one pass of the two-stage template, Rep2 against Rep1
    B       two dropout passes of the same template, Rep2 only: half the tokens are A's, exactly
    C, C2   two passes of PromptEOL, of PromptSUM
    D       two passes of PromptSTH, the shortest prompt
    floor   one forward pass of the EOL prompt, without a loss

The prediction for A over an arm is L2 / (2 L1), by the padded lengths of its prompt (L2) and the arm's (L1); fixed
costs make the measured ratio larger. Times are medians of interleaved steps (forward, backward, clipping and
update) after warm-up. Memory is the peak over what weights, gradients and optimiser states take.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from embedlab.backbones import load_backbone
from embedlab.backbones.adapters import adapt, rank_device
from embedlab.cli.compose import compose
from embedlab.config.run import RunConfig
from embedlab.config.template import Template
from embedlab.data.rows import iter_texts
from embedlab.distributed.devices import on_cuda, precision_of
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.engine.module import Method
from embedlab.engine.optimizer import build_optimizer
from embedlab.engine.precision import ComputeCopy, copyable
from embedlab.kernels.capture import capturing
from embedlab.methods import method_class, method_config
from embedlab.pooling import build_pooling
from embedlab.run.check import check_run, resolved_step
from embedlab.run.parse import parse_run

WARM_UPS = 5


@dataclass(frozen=True)
class Arm:
    """One way to train on a batch; ``passes`` is None for the floor."""

    name: str
    method: str
    template: str
    pooling: str
    passes: int | None


ARMS = (
    Arm("A", "csesfp", "eol_sum", "rep2", 1),
    Arm("B", "prompteol", "eol_sum", "rep2", 2),
    Arm("C", "prompteol", "eol", "last", 2),
    Arm("C2", "prompteol", "sum", "last", 2),
    Arm("D", "prompteol", "sth", "last", 2),
    Arm("floor", "prompteol", "eol", "last", None),
)


@dataclass
class Cost:
    """Of one step."""

    arm: Arm
    rows: int
    length: int
    flops: float = 0.0
    saved_bytes: float = 0.0
    peak_bytes: float = 0.0
    seconds: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Bench:
    """All arms on one set of weights and one optimiser.

    Args:
        config: of the run; its template and method are each arm's own.
        two_stage: name of the template of arms A and B.
    """

    def __init__(self, config: RunConfig, two_stage: str) -> None:
        self.config = config
        self.cuda = on_cuda(config.trainer)
        self.device = rank_device(self.cuda)
        torch.manual_seed(config.seed)
        self.backbone, self.tokenizer = load_backbone(config.backbone)
        adapt(self.backbone, config.adapter, config.backbone, self.device)
        self.backbone.to(self.device)
        self.arms = [replace(a, template=two_stage) if a.template == "eol_sum" else a for a in ARMS]
        self.methods = {arm.name: self._method(arm) for arm in self.arms}
        parameters = [p for p in self.backbone.parameters() if p.requires_grad]
        self.optimizer, _ = build_optimizer(config.optimizer, parameters, 10_000, self.device)
        self.parameters = parameters
        precision = precision_of(config.trainer)
        self.dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
        self.step_mode = resolved_step(config)
        self.captures = False
        self.pool: Any = None
        self.copy: ComputeCopy | None = None
        """The weights in the compute type, which a captured training step has."""

    def _method(self, arm: Arm) -> Method:
        values = compose(
            "train", [f"method={arm.method}", f"template={arm.template}", f"pooling={arm.pooling}"]
        )
        template = Template(**values["template"])
        pooling = build_pooling(values["pooling"], self.backbone.info)
        tokenization = Tokenization(self.tokenizer, template, self.config.data.max_length)
        encoder = SentenceEncoder(self.backbone, pooling, tokenization)
        method = method_class(arm.method)(encoder, method_config(values["method"]), self.config.optimizer)
        return method.to(self.device).train()

    def batch(self, arm: Arm, texts: list[str]) -> dict[str, Any]:
        tokenization = self.methods[arm.name].encoder.tokenization
        padded = tokenization.pad(tokenization.ids(texts), self.config.data.pad_to_multiple)
        return {"sentence": {k: v.to(self.device) for k, v in padded.items()}}

    def prepare(self) -> None:
        """Compile, and get ready for capture, as a run of this step mode does."""
        if self.step_mode in ("compile", "graph") and not self.backbone.compiled:
            self.backbone.compile_blocks(dynamic=False)
        if self.step_mode == "graph" and not self.captures:
            self.captures = True
            if self.dtype is not None and copyable(self.backbone):
                self.copy = ComputeCopy(self.backbone, self.dtype)
            for group in self.optimizer.param_groups:
                group["capturable"] = True
                group["lr"] = torch.tensor(float(group["lr"]), device=self.device)

    def work(self, arm: Arm, batch: dict[str, Any]) -> None:
        """Forward and backward of one batch (the floor: forward)."""
        method = self.methods[arm.name]
        autocast: Any = nullcontext()
        if self.dtype is not None:
            autocast = torch.autocast(self.device.type, dtype=self.dtype, cache_enabled=not self.captures)
        with ExitStack() as stack:
            if self.copy is not None:
                self.copy.refresh()
                stack.enter_context(self.copy.swapped())
            if self.captures:
                stack.enter_context(self.backbone.computing(low_precision_weights=self.copy is not None))
            if arm.passes is None:
                with torch.no_grad(), autocast:
                    method.encoder(**batch["sentence"])
                return
            with autocast:
                losses = method.losses(batch).losses
            torch.stack(list(losses.values())).sum().backward()
        if self.copy is not None:
            self.copy.hand_over(add=False)

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, self.config.optimizer.clip or float("inf"), foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()

    # what a step takes

    def count(self, arm: Arm, batch: dict[str, Any]) -> tuple[float, float]:
        """Floating-point operations, and bytes kept for the backward pass (weights not counted)."""
        own = {p.untyped_storage().data_ptr() for p in self.backbone.parameters()}
        kept: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return x

        counter = FlopCounterMode(display=False)
        watch = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
        # What is compiled is not seen by the counter.
        with torch.compiler.set_stance("force_eager"), counter, watch:
            self.work(arm, batch)
        self.optimizer.zero_grad()
        return float(counter.get_total_flops()), float(sum(kept.values()))

    def runner(self, arm: Arm, batches: list[dict[str, Any]]) -> Callable[[], None]:
        """One call is one step on the next of ``batches``."""
        turn = itertools.cycle(range(len(batches)))
        if self.step_mode == "graph":
            return self._captured(arm, batches, turn)

        def step() -> None:
            self.work(arm, batches[next(turn)])
            if arm.passes is not None:
                self.update()

        return step

    def _captured(self, arm: Arm, batches: list[dict[str, Any]], turn: Any) -> Callable[[], None]:
        static = {k: v.clone() for k, v in batches[0]["sentence"].items()}

        def body() -> None:
            self.work(arm, {"sentence": static})
            if arm.passes is not None:
                self.update()

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                body()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        # One pool for all arms: each replay is over before the next begins, and five pools do not fit a card.
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        with capturing(graph, pool=self.pool):
            body()

        def step() -> None:
            for key, value in batches[next(turn)]["sentence"].items():
                static[key].copy_(value)
            graph.replay()

        return step

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def timed(self, step: Callable[[], None]) -> float:
        if not self.cuda:
            started = time.perf_counter()
            step()
            return time.perf_counter() - started
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3


def measure(bench: Bench, texts: list[str], batch_size: int, steps: int) -> list[Cost]:
    """The costs of all arms on the same sentences."""
    groups = [texts[i : i + batch_size] for i in range(0, len(texts) - batch_size + 1, batch_size)]
    costs, runners = [], []
    counted: list[tuple[Arm, list[dict[str, Any]]]] = []
    for arm in bench.arms:
        batches = [bench.batch(arm, group) for group in groups]
        length = max(b["sentence"]["input_ids"].shape[1] for b in batches)
        batches = [b for b in batches if b["sentence"]["input_ids"].shape[1] == length]
        cost = Cost(arm, batch_size * (arm.passes or 1), length)
        cost.flops, cost.saved_bytes = bench.count(arm, batches[0])
        costs.append(cost)
        counted.append((arm, batches))
    bench.prepare()
    for (arm, batches), cost in zip(counted, costs, strict=True):
        if bench.cuda:
            bench.synchronize()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        step = bench.runner(arm, batches)
        for _ in range(WARM_UPS):
            step()
        bench.synchronize()
        if bench.cuda:
            cost.peak_bytes = torch.cuda.max_memory_allocated() - before
        runners.append(step)
    for _ in range(steps):
        for cost, step in zip(costs, runners, strict=True):
            cost.seconds.append(bench.timed(step))
    return costs


def largest_batch(bench: Bench, arm: Arm, texts: list[str], start: int) -> tuple[int, float]:
    """The largest power-of-two multiple of ``start`` that fits the card, and its sentences a second."""
    best = (0, 0.0)
    size = start
    while size <= len(texts):
        try:
            step = bench.runner(arm, [bench.batch(arm, texts[:size])])
            for _ in range(2):
                step()
            seconds = statistics.median(bench.timed(step) for _ in range(5))
        except torch.OutOfMemoryError:
            break
        finally:
            bench.optimizer.zero_grad()
            torch.cuda.empty_cache()
        best = (size, size / seconds)
        size *= 2
    return best


def table(costs: list[Cost], title: str) -> tuple[Table, list[dict[str, Any]]]:
    """Costs and A's ratio to each arm, predicted and measured."""
    ours = costs[0]
    out = Table(title=title, title_justify="left")
    for name in ("arm", "rows x length", "tokens", "GFLOP", "saved MiB", "peak MiB", "ms", "sentences/s"):
        out.add_column(name, justify="left" if name == "arm" else "right")
    for name in ("A/arm: L2/(2 L1)", "FLOP", "saved", "peak", "time"):
        out.add_column(name, justify="right")
    rows = []
    for cost in costs:
        arm = cost.arm
        sentences = cost.rows / (arm.passes or 1)
        low, high = _spread(cost.seconds)
        row: dict[str, Any] = {
            "arm": arm.name,
            "method": arm.method,
            "template": arm.template,
            "rows": cost.rows,
            "length": cost.length,
            "tokens": cost.tokens,
            "flops": cost.flops,
            "saved_bytes": cost.saved_bytes,
            "peak_bytes": cost.peak_bytes,
            "seconds_median": cost.median,
            "seconds_10": low,
            "seconds_90": high,
            "sentences_per_second": sentences / cost.median,
            "tokens_per_second": cost.tokens / cost.median,
        }
        if arm.passes is not None and arm is not ours.arm:
            row |= {
                "predicted": ours.tokens / cost.tokens,
                "ratio_flops": ours.flops / cost.flops,
                "ratio_saved": ours.saved_bytes / cost.saved_bytes,
                "ratio_peak": ours.peak_bytes / cost.peak_bytes if cost.peak_bytes else None,
                "ratio_time": ours.median / cost.median,
            }
        ratios = [row.get(k) for k in ("predicted", "ratio_flops", "ratio_saved", "ratio_peak", "ratio_time")]
        out.add_row(
            f"{arm.name}: {arm.method if arm.passes else 'forward'}, {arm.template}",
            f"{cost.rows} x {cost.length}",
            f"{cost.tokens:,}",
            f"{cost.flops / 1e9:,.1f}",
            f"{cost.saved_bytes / 2**20:,.0f}",
            f"{cost.peak_bytes / 2**20:,.0f}" if cost.peak_bytes else "",
            f"{1e3 * cost.median:,.1f}",
            f"{sentences / cost.median:,.0f}",
            *("" if r is None else f"{r:.3f}" for r in ratios),
        )
        rows.append(row)
    return out, rows


def _spread(seconds: list[float]) -> tuple[float, float]:
    ordered = sorted(seconds)
    return ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--batch", default="256", help="sentences a step, one or several with commas (default: 256)"
    )
    parser.add_argument("--steps", type=int, default=50, help="timed steps of each arm (default: 50)")
    parser.add_argument("--texts", type=int, default=8, help="batches of different sentences (default: 8)")
    parser.add_argument("--fit", action="store_true", help="also look for the largest batch that fits (CUDA)")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    parser.add_argument("overrides", nargs="*", help="key=value of the run")
    options = parser.parse_args(argv)
    values = compose("train", ["experiment=csesfp_cost", *options.overrides])
    named = [o.removeprefix("template=") for o in options.overrides if o.startswith("template=")]
    config = parse_run(values)
    check_run(config)
    bench = Bench(config, named[-1] if named else "eol_sum")
    sizes = [int(size) for size in options.batch.split(",")]
    wanted = max(sizes) * (64 if options.fit else options.texts)
    texts = [t for t in itertools.islice(iter_texts(config.data), wanted * 2) if t.strip()][:wanted]
    device = torch.cuda.get_device_name() if bench.cuda else f"CPU {platform.machine()}"
    results: dict[str, Any] = {
        "device": device,
        "step": bench.step_mode,
        "steps": options.steps,
        "config": values,
    }
    results["torch"] = torch.__version__
    for size in sizes:
        costs = measure(bench, texts[: size * options.texts], size, options.steps)
        title = f"{config.backbone.label}, {config.adapter.name}, N={size}, step={bench.step_mode}, {device}"
        shown, rows = table(costs, title)
        Console(width=200).print(shown)
        results[f"batch_{size}"] = rows
    if options.fit and bench.cuda:
        for arm in bench.arms:
            if arm.passes is not None:
                size, speed = largest_batch(bench, arm, texts, min(sizes))
                results[f"largest_{arm.name}"] = {"batch": size, "sentences_per_second": speed}
                print(f"{arm.name}: largest batch {size}, {speed:,.0f} sentences/s")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
