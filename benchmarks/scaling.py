"""Training on 1, 2 and more devices: throughput by captured, compiled and eager steps, and exactness of the gradient.

    python -m benchmarks.scaling [--worlds 1,2] [--steps graph,compile,eager] [--only simcse-512-each,...] [--seconds N]
        [--profile] [--one JSON] [--json OUT] [--markdown OUT]

For each number of devices W, W processes start once (`CUDA_VISIBLE_DEVICES` names the first W devices; gloo on the
CPU) and run every workload in turn, as `embedlab train` composes it but for scoring, checkpoints and the export.
``each``: so many rows on each device (weak scaling); ``all``: so many on all together (strong scaling). Weights are
random, in the shapes of BERT-base and SmolLM2-135M; the text is made of the shipped tokenizer's words, 29 tokens a
sentence on average, at most 32. After a warm-up that meets every shape, three windows of steps are timed: mean and
standard deviation of the three. `--seconds` begins no further workload after so many seconds of a world. `--profile`
adds where five more steps spend their time on the first device. `--one` takes what another call found on one device.

The gradient error is in fp32 on four-layer models without dropout: the largest difference of any gradient, as a share
of the largest gradient, and that of the loss, for SimCSE with hard negatives, JTCSE, CSE-SFP and BEPA.
`--tiny` shrinks all of it for a test on a CPU, where captured steps are eager ones.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn

from benchmarks.training_step import sync

GRADIENTS = ("simcse", "jtcse", "csesfp", "bepa")
ROWS = 32  # of the gradients' batch


WINDOWS = 3


@dataclass(frozen=True)
class Workload:
    """What is trained: rows ``each`` device has, or ``all`` together; steps of a window; more overrides."""

    name: str
    rows: int
    steps: int
    line: tuple[str, ...]
    each: bool = True


SIMCSE = ("method=simcse", "pooling=cls", "backbone.path={simcse}")
WORKLOADS = (
    Workload("simcse-512-each", 512, 20, SIMCSE),
    Workload("simcse-512-all", 512, 20, SIMCSE, each=False),
    Workload("simcse-64-all", 64, 60, SIMCSE, each=False),
    Workload("simcse-128-all", 128, 40, SIMCSE, each=False),
    Workload(
        "csesfp-256-each", 256, 20,
        ("method=csesfp", "pooling=rep2", "template=eol_sum", "adapter=lora", "adapter.r=16", "backbone.path={csesfp}"),
    ),
    Workload(
        "jtcse-64-each", 64, 20,
        ("method=jtcse", "pooling=cls", "method.tower2={other}", "backbone.path={simcse}"),
    ),
    Workload(
        "masked_lm-256-each", 256, 10,
        ("method=masked_lm", "pooling=mean", "data.pack=128", "data.max_length=null", "backbone.path={simcse}"),
    ),
    Workload("simcse-4096-all", 4096, 3, (*SIMCSE, "optimizer.chunk=1024"), each=False),
)  # fmt: skip
KINDS = ("graph", "compile", "eager")


# ---- models and text -------------------------------------------------------------------------------------------------


def shape(folder: Path, method: str, tiny: bool) -> Path:
    """A folder with random weights of BERT-base's (or SmolLM2-135M's) shape and the shipped encoder's tokenizer."""
    from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, LlamaConfig, LlamaModel

    from embedlab.files import assets_dir

    tokenizer = AutoTokenizer.from_pretrained(assets_dir() / "mini")
    torch.manual_seed(int(method == "other"))
    model: Any
    if method in ("csesfp", "small-decoder"):
        size = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                "num_key_value_heads": 3}  # fmt: skip
        if tiny or method == "small-decoder":
            size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
                    "num_key_value_heads": 2}  # fmt: skip
        model = LlamaModel(
            LlamaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **size)
        )
    else:
        small = {
            "num_hidden_layers": 4 if method == "small" else 3,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "intermediate_size": 128,
        }
        config = BertConfig(vocab_size=len(tokenizer), **(small if tiny or method == "small" else {}))
        model = BertForMaskedLM(config)
    if method.startswith(
        "small"
    ):  # the library's 0.02 leaves a narrow model nearly constant, and gradients noise
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(4.0 if p.dim() > 1 else 1.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def sentences(n: int, seed: int = 0) -> list[str]:
    """Distinct sentences of whole words of the shipped vocabulary: each word is one token."""
    from transformers import AutoTokenizer

    from embedlab.files import assets_dir

    vocabulary = AutoTokenizer.from_pretrained(assets_dir() / "mini").get_vocab()
    words = sorted(w for w in vocabulary if w.isalpha() and w.isascii() and len(w) > 3)
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=draw.randint(24, 30))) for _ in range(n)]


# ---- one rank --------------------------------------------------------------------------------------------------------


def rank_main(options: argparse.Namespace) -> None:
    """Run every workload and every gradient in this rank; rank 0 of each world writes what it found."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    cuda = torch.cuda.is_available()
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    work = Path(options.work)
    found: dict[str, Any] = {"world": world, "throughput": {}, "gradients": {}, "failed": []}
    began = time.perf_counter()
    for kind in options.steps.split(","):
        for load in WORKLOADS:
            name = f"{load.name} {kind}"
            if options.only is not None and load.name not in options.only:
                continue
            if not agreed(time.perf_counter() - began < options.seconds):
                break
            try:
                found["throughput"][name] = throughput(load, kind, work, world, options.tiny, options.profile)
            except Exception as error:  # the other workloads are still worth their time
                print(f"{name} on {world}: {type(error).__name__}: {error}", file=sys.stderr)
                found["failed"].append(name)
                if world > 1:
                    raise
            if rank == 0:
                print(name, world, json.dumps(found["throughput"].get(name)), file=sys.stderr, flush=True)
                (work / f"world{world}.json").write_text(json.dumps(found))
    for name in GRADIENTS:
        if options.only is None or f"gradient-{name}" in options.only:
            found["gradients"][name] = gradient(name, work, world, rank)
    if rank == 0:
        (work / f"world{world}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def agreed(wanted: bool) -> bool:
    """What the first rank wants."""
    answer = torch.tensor(float(wanted), device="cuda" if torch.cuda.is_available() else "cpu")
    dist.broadcast(answer, 0)
    return bool(answer)


class Profile(Callback):
    """Where the steps after the timed ones spend their time on the first device, in ms a step.

    Kernels of NCCL run beside those of the backward pass: ``sums alone`` is when nothing else runs, ``idle`` when
    nothing at all does, and ``others`` is the sum of all other kernels' times, which grows where they share the card.
    """

    STEPS = 5

    def __init__(self, first: int, rank: int) -> None:
        self.first, self.found = first, {}  # type: ignore[var-annotated]
        self._profile = torch.profiler.profile() if rank == 0 else None

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if self._profile is None:
            return
        if trainer.global_step == self.first:
            sync()
            self._profile.start()
        if trainer.global_step == self.first + self.STEPS:
            sync()
            self._profile.stop()
            self.found = self._read()

    def _read(self) -> dict[str, Any]:
        assert self._profile is not None
        kernels = [
            (e.time_range.start, e.time_range.end, e.name)
            for e in self._profile.events()
            if e.device_type == torch.autograd.DeviceType.CUDA
            and e.time_range.end > e.time_range.start
            and not getattr(e, "is_user_annotation", False)
        ]
        if not kernels:
            return {}
        sums = union([(a, b) for a, b, name in kernels if "nccl" in name.lower()])
        others = union([(a, b) for a, b, name in kernels if "nccl" not in name.lower()])
        both = union([*sums, *others])
        span = max(b for _, b, _ in kernels) - min(a for a, _, _ in kernels)
        whole = {
            "step": span,
            "sums": length(sums),
            "sums alone": length(both) - length(others),
            "idle": span - length(both),
            "others": sum(b - a for a, b, name in kernels if "nccl" not in name.lower()),
        }
        longest: dict[str, list[float]] = {}
        for a, b, name in kernels:
            longest.setdefault(name[:90], []).append(b - a)
        most = sorted(longest.items(), key=lambda item: -sum(item[1]))[:14]
        return {name: us / 1e3 / self.STEPS for name, us in whole.items()} | {
            "kernels": {name: [sum(us) / 1e3 / self.STEPS, len(us) / self.STEPS] for name, us in most}
        }


def union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The times that any of the intervals covers."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def length(intervals: list[tuple[float, float]]) -> float:
    """Of all intervals together."""
    return sum(end - begin for begin, end in intervals)


def throughput(
    load: Workload, kind: str, work: Path, world: int, tiny: bool, profiled: bool = False
) -> dict[str, Any]:
    """Sentences a second over all devices (mean, SD, each window), milliseconds a step, peak memory of a device."""
    from embedlab.cli.compose import compose
    from embedlab.run.parse import parse_run
    from embedlab.run.run import Run

    cuda = torch.cuda.is_available()
    rows, steps = (4, 1) if tiny else (load.rows if load.each else load.rows // world, load.steps)
    warm = 1 if tiny else max(8, steps // 2)
    total = warm + WINDOWS * steps
    profile = Profile(total, rank=dist.get_rank()) if profiled else None

    class Clock(Callback):
        def __init__(self) -> None:
            self.began, self.seconds = 0.0, []  # type: ignore[var-annotated]

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            done = trainer.global_step - warm
            if 0 <= done <= WINDOWS * steps and done % steps == 0:
                sync()
                dist.barrier()
                now = time.perf_counter()
                if done:
                    self.seconds.append((now - self.began) / steps)
                self.began = time.perf_counter()

    names = {name: str(work / name) for name in ("simcse", "csesfp", "other")}
    batches = 2 if load.name.startswith("masked_lm") else total  # packed rows: passes over few of them
    line = [
        "backbone=local", *(part.format(**names) for part in load.line), f"data.batch_size={rows}",
        f"data.files={work / 'text.txt'}", f"data.cache_dir={work / 'cache'}", "data.report=false",
        f"data.limit={rows * world * batches * (4 if batches == 2 else 1)}",
        f"step={kind if cuda or kind != 'graph' else 'eager'}",
        f"trainer={'gpu' if cuda else 'cpu'}", f"trainer.devices={world}",
        f"trainer.strategy={'ddp' if world > 1 else 'auto'}", "trainer.max_epochs=999",
        f"trainer.max_steps={total + (2 * Profile.STEPS if profiled else 0)}",
        "trainer.log_every_n_steps=1000", "callbacks.progress=none", "callbacks.checkpoint.every_minutes=null",
        "callbacks.checkpoint.at_end=false", "evaluation.final=[]", "evaluation.before=false",
    ]  # fmt: skip
    given = {part.partition("=")[0]: part for part in line}
    if not load.name.startswith("masked_lm"):
        given.setdefault("data.max_length", "data.max_length=32")
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock = Clock()
    extra = {"callbacks": [clock, profile] if profile is not None else [clock]}
    run = Run(parse_run(compose("train", list(given.values()))), work / "run", extra=extra)
    try:
        run.trainer.fit(run.method, datamodule=run.data)
    finally:
        run.method.runner.close()
    memory = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    speeds = [rows * world / seconds for seconds in clock.seconds]
    return {
        "rows_each": rows,
        "sentences_per_second": statistics.mean(speeds),
        "sd": statistics.stdev(speeds),
        "windows": [round(s, 1) for s in speeds],
        "step_ms": 1e3 * statistics.mean(clock.seconds),
        "memory_gib": memory,
    } | ({"profile": profile.found} if profile is not None else {})


class Step(nn.Module):
    """What Lightning wraps: one forward of DDP is one training step."""

    def __init__(self, method: Any) -> None:
        super().__init__()
        self.method = method

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.method.total(batch)[0]


def gradient(name: str, work: Path, world: int, rank: int) -> dict[str, float]:
    """The loss, and with more than one rank the errors against what one rank left in the folder."""
    cuda = torch.cuda.is_available()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    method, views = made(name, work)
    method.to(device).train()
    texts = sentences(ROWS * len(views), seed=1)
    texts[len(views) :: ROWS] = texts[
        : len(texts[len(views) :: ROWS])
    ]  # some texts come again on other ranks
    own = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    tokens, batch = method.encoder.tokenization, {}
    for i, view in enumerate(views):
        mine = texts[i * ROWS : (i + 1) * ROWS]
        content = tokens.pad(tokens.ids(mine), 8) | {"hash": torch.tensor([texts.index(t) for t in mine])}
        batch[view] = {k: v[own].to(device) for k, v in content.items()}
    model: nn.Module = Step(method)
    if world > 1:
        model = nn.parallel.DistributedDataParallel(model, device_ids=[device.index] if cuda else None)
    loss = model(batch)
    loss.backward()
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(loss)
        loss /= world
    grads = {n: p.grad.float().cpu() for n, p in method.named_parameters() if p.grad is not None}
    kept = work / f"gradient-{name}.pt"
    if world == 1:
        torch.save({"loss": loss.cpu(), "grads": grads}, kept)
        return {"loss": float(loss)}
    one = torch.load(kept, weights_only=True)
    assert one["grads"].keys() == grads.keys()
    largest = max(float(g.abs().max()) for g in one["grads"].values())
    worst = max(float((g - one["grads"][n]).abs().max()) for n, g in grads.items())
    square = sum(float((g - one["grads"][n]).square().sum()) for n, g in grads.items())
    norm = sum(float(g.square().sum()) for g in one["grads"].values())
    return {
        "loss": float(loss),
        "loss_error": abs(float(loss) - float(one["loss"])) / abs(float(one["loss"])),
        "gradient_error": worst / largest,
        "gradient_error_norm": (square / norm) ** 0.5,
    }


def made(name: str, work: Path) -> tuple[Any, tuple[str, ...]]:
    """A small method without dropout, and the names of its views."""
    from embedlab.backbones import load_backbone
    from embedlab.config.backbone import BackboneConfig
    from embedlab.config.optimizer import OptimizerConfig
    from embedlab.config.template import Template
    from embedlab.encoders.encoder import SentenceEncoder
    from embedlab.encoders.tokenization import Tokenization
    from embedlab.encoders.twin import TwinEncoder
    from embedlab.methods.bepa import BEPA, BEPAConfig
    from embedlab.methods.csesfp import CSESFP, CSESFPConfig
    from embedlab.methods.jtcse import JTCSE, JTCSEConfig
    from embedlab.methods.simcse import SimCSE, SimCSEConfig
    from embedlab.methods.towers import tower_pooler
    from embedlab.pooling import build_pooling

    def encoder(folder: str, pooling: str = "cls", template: Template | None = None, head: Any = None) -> Any:
        source = BackboneConfig(source="local", path=str(work / folder), dropout=0.0)
        backbone, tokenizer = load_backbone(source, head=head)
        return SentenceEncoder(
            backbone, build_pooling(pooling, backbone.info), Tokenization(tokenizer, template)
        )

    plain = OptimizerConfig()
    torch.manual_seed(0)
    if name == "simcse":
        return SimCSE(encoder("small"), SimCSEConfig(), plain), ("anchor", "positive", "negative")
    if name == "csesfp":
        template = Template('It : "{sentence}" means a word{rep1}, so it is{rep2}', "text")
        return CSESFP(encoder("small-decoder", "rep2", template), CSESFPConfig(), plain), ("sentence",)
    if name == "bepa":
        method = BEPA(encoder("small", head="masked_lm"), BEPAConfig(lam=2.0), plain)

        def still(backbone: Any, ids: Tensor, mask: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
            """Masks are drawn by each rank anew: in their place a mean over rows through body and head."""
            logits = backbone.head(backbone(ids, mask)[-1][:, 0])
            return logits.logsumexp(-1).mean(), logits.new_zeros(())

        method.prediction.forward = still  # type: ignore[method-assign]
        return method, ("source", "target")
    first, second = encoder("small"), encoder("small")
    with torch.no_grad():
        for p in second.parameters():
            p.add_(0.01 * torch.randn_like(p))
    twin = TwinEncoder([first, second])
    poolers = tower_pooler([], twin.dim, 10), tower_pooler([], twin.dim, 11)
    config = JTCSEConfig(n_ca=2, icnce="symmetric", tower1="a", tower2="b")
    return JTCSE(twin, config, plain, poolers), ("sentence",)


# ---- the whole -------------------------------------------------------------------------------------------------------


def tables(found: dict[int, dict[str, Any]]) -> str:
    """Throughput with its multiple of the first world's, and gradient errors, as Markdown."""
    worlds = sorted(found)
    lines = ["| workload | step | " + " | ".join(f"{w} device{'s' * (w > 1)}" for w in worlds) + " |"]
    lines += ["|---" * (2 + len(worlds)) + "|"]
    first = found[worlds[0]]["throughput"]
    for name in dict.fromkeys(n for w in worlds for n in found[w]["throughput"]):
        cells = []
        for world in worlds:
            one = found[world]["throughput"].get(name)
            if one is None:
                cells.append("-")
                continue
            speed = one["sentences_per_second"]
            times = f" ({speed / first[name]['sentences_per_second']:.2f}x)" if name in first else ""
            cells.append(f"{speed:,.0f} ± {one['sd']:,.0f}/s{times}, {one['memory_gib']:.1f} GiB")
        lines.append(f"| {' | '.join([*name.split(), *cells])} |")
    lines += [
        "",
        "| gradient | W | loss error | largest error | error of the norm |",
        "|---|---|---|---|---|",
    ]
    for world in worlds[1:]:
        for name, one in found[world]["gradients"].items():
            lines.append(
                f"| {name} | {world} | {one['loss_error']:.1e} | {one['gradient_error']:.1e} | "
                f"{one['gradient_error_norm']:.1e} |"
            )
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", default="1,2,4", help="numbers of devices; the first is the reference")
    parser.add_argument("--steps", default=",".join(KINDS), help="kinds of step, in their order")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="of a world, after which no workload begins"
    )
    parser.add_argument("--only", help="workloads and gradient-NAME, by commas")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument(
        "--one", type=Path, help="the JSON of another call, whose first world is the reference"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.only = options.only.split(",") if options.only else None
    if options.work is not None:
        rank_main(options)
        return
    from embedlab.run.processes import start_ranks

    worlds = [int(w) for w in options.worlds.split(",")]
    found, began = {}, time.perf_counter()
    if options.one is not None:
        found = {int(w): one for w, one in json.loads(options.one.read_text())["worlds"].items()}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for folder in ("simcse", "other", "csesfp", "small", "small-decoder"):
            shape(work / folder, folder, options.tiny)
        longest = max(w.rows * max(worlds) * (9 + (WINDOWS + 1) * w.steps) for w in WORKLOADS if w.each)
        (work / "text.txt").write_text("\n".join(sentences(400 if options.tiny else longest)) + "\n")
        for world in worlds:
            if torch.cuda.is_available():
                visible = os.environ.get("EMBEDLAB_DEVICES", ",".join(map(str, range(max(worlds))))).split(
                    ","
                )
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[:world])
            arguments = [*argv, "--work", str(work)]
            if start_ranks(["benchmarks.scaling", *arguments], world):
                raise SystemExit(f"the run on {world} devices failed")
            found[world] = json.loads((work / f"world{world}.json").read_text())
            print(f"{world}: {time.perf_counter() - began:.0f} s so far", file=sys.stderr)
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    made = f"{device}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, three windows of one run each"
    text = f"{made}\n\n{tables(found)}"
    print(text)
    if options.json:
        options.json.write_text(
            json.dumps({"device": device, "torch": torch.__version__, "worlds": found}, indent=1)
        )
    if options.markdown:
        options.markdown.write_text(text + "\n")
    if failed := [name for one in found.values() for name in one.get("failed", ())]:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
