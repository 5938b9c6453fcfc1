"""Throughput on 1, 2 and 4 devices, and the gradient of W ranks against that of one.

    python -m benchmarks.scaling [--worlds 1,2,4] [--only simcse-64,...] [--json OUT] [--markdown OUT]

For each number of devices W, W processes start once (`CUDA_VISIBLE_DEVICES` names the first W devices; gloo on the
CPU) and run every workload in turn under Lightning's trainer, strategy ddp, with this project's methods and loaders:
unsupervised SimCSE on BERT-base's shape at a global batch of 64, 512 and 4096 sentences (4096 with cached gradients,
512 sentences, that is 1,024 rows, a chunk), CSE-SFP with LoRA on SmolLM2-135M's shape at 1024.
Weights are random, the text is made of the shipped tokenizer's words, 29 tokens a sentence on average, at most 32.
The global batch is the same for every W, so the speed-up is a strong-scaling one: speed on W / (W x speed on one).
Steps run eagerly, as under step=eager: compiled ones would measure the compiler, at a shape for each W.

The gradient error is in fp32 on four-layer models without dropout: the largest difference of any gradient, as a share
of the largest gradient, and that of the loss, for SimCSE with hard negatives, JTCSE, CSE-SFP and BEPA.
`--tiny` shrinks all of it for a test on a CPU.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

GRADIENTS = ("simcse", "jtcse", "csesfp", "bepa")
ROWS = 32  # of the gradients' batch


@dataclass(frozen=True)
class Workload:
    name: str
    method: str
    batch: int
    steps: int
    warm: int
    chunk: int | None = None


WORKLOADS = (
    Workload("simcse-64", "simcse", 64, 60, 15),
    Workload("simcse-512", "simcse", 512, 25, 6),
    Workload("simcse-4096", "simcse", 4096, 8, 2, chunk=1024),
    Workload("csesfp-1024", "csesfp", 1024, 10, 3),
)


# ---- models and text -------------------------------------------------------------------------------------------------


def shape(folder: Path, method: str, tiny: bool) -> Path:
    """A folder with random weights of BERT-base's (or SmolLM2-135M's) shape and the shipped encoder's tokenizer."""
    from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, LlamaConfig, LlamaModel

    from embedlab.files import assets_dir

    tokenizer = AutoTokenizer.from_pretrained(assets_dir() / "mini")
    torch.manual_seed(0)
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
            "num_hidden_layers": 4,
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
    found: dict[str, Any] = {"world": world, "throughput": {}, "gradients": {}}
    for load in WORKLOADS:
        if options.only is None or load.name in options.only:
            found["throughput"][load.name] = throughput(load, work, world, options.tiny)
    for name in GRADIENTS:
        if options.only is None or f"gradient-{name}" in options.only:
            found["gradients"][name] = gradient(name, work, world, rank)
    if rank == 0:
        (work / f"world{world}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def throughput(load: Workload, work: Path, world: int, tiny: bool) -> dict[str, float]:
    """Sentences a second over all devices, milliseconds a step, peak memory of one device."""
    from lightning.pytorch import Callback, Trainer

    from embedlab.backbones import load_backbone
    from embedlab.backbones.adapters import adapt
    from embedlab.config.adapter import AdapterConfig
    from embedlab.config.backbone import BackboneConfig
    from embedlab.config.data import DataConfig
    from embedlab.config.optimizer import OptimizerConfig
    from embedlab.config.template import Template
    from embedlab.data.module import SentenceDataModule
    from embedlab.encoders.encoder import SentenceEncoder
    from embedlab.encoders.tokenization import Tokenization
    from embedlab.methods.csesfp import CSESFP, CSESFPConfig
    from embedlab.methods.simcse import SimCSE, SimCSEConfig
    from embedlab.pooling import build_pooling
    from embedlab.run.callbacks.randomness import Randomness

    cuda = torch.cuda.is_available()
    batch, steps, warm = (load.batch, load.steps, load.warm) if not tiny else (16, 4, 1)
    base = BackboneConfig(source="local", path=str(work / load.method))
    backbone, tokenizer = load_backbone(base)
    template = None
    optimizer = OptimizerConfig(chunk=load.chunk and (4 if tiny else load.chunk))
    torch.manual_seed(0)
    method: Any
    if load.method == "csesfp":
        template = Template('It : "{sentence}" means a word{rep1}, so it is{rep2}', "text")
        adapt(backbone, AdapterConfig("lora", r=16), base, torch.device("cuda" if cuda else "cpu"))
        encoder = SentenceEncoder(
            backbone, build_pooling("rep2", backbone.info), Tokenization(tokenizer, template)
        )
        method = CSESFP(encoder, CSESFPConfig(), optimizer)
    else:
        encoder = SentenceEncoder(backbone, build_pooling("cls", backbone.info), Tokenization(tokenizer))
        method = SimCSE(encoder, SimCSEConfig(), optimizer)
    tokens = Tokenization(tokenizer, template, 32)
    config = DataConfig(
        files=str(work / "text.txt"), batch_size=batch // world, limit=batch * (steps + 1), report=False,
        cache_dir=str(work / "cache"), processes=1 if tiny else None,
    )  # fmt: skip
    emit = "rows" if cuda else "tokens"
    data = SentenceDataModule(config, {"sentence": ("sentence", tokens)}, 0, emit=emit)

    class Clock(Callback):
        began = seconds = 0.0

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step in (warm, steps):
                if cuda:
                    torch.cuda.synchronize()
                    dist.barrier()
                self.began, self.seconds = time.perf_counter(), time.perf_counter() - self.began

    clock = Clock()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(
        accelerator="cuda" if cuda else "cpu", devices=world, strategy="ddp" if world > 1 else "auto",
        precision="bf16-mixed" if cuda else "32-true", max_steps=steps, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, num_sanity_val_steps=0, limit_val_batches=0,
        callbacks=[Randomness(0), clock],
    )  # fmt: skip
    trainer.fit(method, datamodule=data)
    a_step = clock.seconds / (steps - warm)
    memory = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    del trainer, method, encoder, backbone, data
    if cuda:
        torch.cuda.empty_cache()
    return {"sentences_per_second": batch / a_step, "step_ms": 1e3 * a_step, "memory_gib": memory}


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

        def still(backbone: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
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
    """Throughput with efficiency, and gradient errors, as Markdown."""
    worlds = sorted(found)
    lines = ["| workload | " + " | ".join(f"{w} device{'s' * (w > 1)}" for w in worlds) + " |"]
    lines += ["|---" * (1 + len(worlds)) + "|"]
    for load in found[worlds[0]]["throughput"]:
        alone = found[worlds[0]]["throughput"][load]["sentences_per_second"] / worlds[0]
        cells = []
        for world in worlds:
            one = found[world]["throughput"][load]
            speed = one["sentences_per_second"]
            cells.append(
                f"{speed:,.0f}/s ({100 * speed / (world * alone):.0f} %), {one['memory_gib']:.1f} GiB"
            )
        lines.append(f"| {load} | " + " | ".join(cells) + " |")
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
    parser.add_argument("--only", help="workloads and gradient-NAME, by commas")
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
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for folder in ("simcse", "csesfp", "small", "small-decoder"):
            shape(work / folder, folder, options.tiny)
        longest = max(w.batch * (w.steps + 1) for w in WORKLOADS)
        (work / "text.txt").write_text("\n".join(sentences(120 if options.tiny else longest)) + "\n")
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
    text = f"{device}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}, n=1\n\n{tables(found)}"
    print(text)
    if options.json:
        options.json.write_text(
            json.dumps({"device": device, "torch": torch.__version__, "worlds": found}, indent=1)
        )
    if options.markdown:
        options.markdown.write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
