"""Parameters and latency of S2Sent and its controls beside plain mean pooling, in one run.

    python benchmarks/s2sent_cost.py [FOLDER] [--batch 64] [--length 32] [--n 3] [--m 4] [--r 12] [--rounds 30]

FOLDER is a Hugging Face checkpoint; without one, BERT-base's shape with random weights, which is as fast. On CUDA
both ways of running are timed: kernels started one by one (eager), and as one CUDA graph, which shows the device's
own time. Latencies are of backbone and pooling together; the ratio is to the plain pooling, which does not ask the
backbone for its inner states.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, BertConfig

from embedlab.backbones import Backbone, load_backbone
from embedlab.config.backbone import KNOWN, BackboneConfig
from embedlab.kernels.attention import register
from embedlab.pooling import build_pooling
from embedlab.report.pooling_cost import captured, compare, parameters

PRINTED = {1: (0.08, 0.07), 3: (0.17, 0.15), 6: (0.34, 0.30)}
"""Table 2: parameters added, per cent of BERT-base and RoBERTa-base."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--n", type=int, default=3)
    parser.add_argument("--m", type=int, default=4)
    parser.add_argument("--r", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast")
    settings = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backbone = load(settings.folder).to(device).eval()
    info = backbone.info
    print_parameters(info.width, settings.r)

    ids = torch.randint(10, 1000, (settings.batch, settings.length), device=device)
    # Lengths as in running text: from a third of the longest to the longest.
    lengths = torch.linspace(settings.length / 3, settings.length, settings.batch, device=device).round()
    mask = (torch.arange(settings.length, device=device) < lengths[:, None]).long()
    shape = {"n": min(settings.n, info.layers)}
    wanted: dict[str, dict[str, Any]] = {
        "mean": {"name": "mean"},
        f"last_n n={shape['n']}": {"name": "last_n", **shape},
        f"scalar_mix n={shape['n']}": {"name": "scalar_mix", **shape},
        f"s2sent n={shape['n']} m={settings.m} r={settings.r}": {
            "name": "s2sent", "m": settings.m, "r": settings.r, "bias": False, **shape,
        },
        "s2sent last1d": {"name": "s2sent", "mode": "last1d", "r": settings.r, "bias": False},
    }  # fmt: skip
    arms: dict[str, Any] = {}
    for name, config in wanted.items():
        pooling = build_pooling(config, info).to(device).eval()
        arms[name] = pooling, encoder(backbone, pooling, ids, mask, settings.dtype == "bf16")
    ways: dict[str, Callable[[Callable[[], Tensor]], Callable[[], Tensor]]] = {"eager": lambda f: f}
    if device.type == "cuda":
        ways["graph"] = captured
    for way, wrap in ways.items():
        wrapped = {name: (pooling, wrap(run)) for name, (pooling, run) in arms.items()}
        wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        costs = compare(wrapped, settings.rounds, settings.repeats, wait)
        print(
            f"\n{way}, {settings.dtype}, {settings.batch} x {settings.length} tokens, {device_name(device)}"
        )
        print(f"{'pooling':28}{'parameters':>12}{'of backbone':>13}{'ms':>9}{'ratio':>9}{'quartiles':>19}")
        total = parameters(backbone)
        for name, c in costs.items():
            print(
                f"{name:28}{c.parameters:12,}{c.parameters / total:13.3%}{1e3 * c.seconds:9.3f}{c.ratio:9.4f}"
                f"{c.spread[0]:10.4f}–{c.spread[1]:.4f}"
            )


def load(folder: str | None) -> Backbone:
    if folder is not None:
        return load_backbone(BackboneConfig(source="local", path=folder))[0]
    model = AutoModel.from_config(BertConfig(), attn_implementation=register(), add_pooling_layer=False)
    return Backbone(model, KNOWN["google-bert/bert-base-uncased"])


def print_parameters(width: int, r: int) -> None:
    """D k (1 + N) without biases, k + N D more with them; beside table 2 at the paper's width."""
    k = width // r
    print(f"parameters at width {width}, r={r} (k={k}): without biases, with biases")
    for n, (bert, roberta) in PRINTED.items():
        plain = width * k * (1 + n)
        line = f"  n={n}: {plain:,} {plain + k + n * width:,}"
        if width == 768:
            line += (
                f"  ({plain / 109_482_240:.4%} of BERT-base, {plain / 124_645_632:.4%} of RoBERTa-base; "
                f"printed: {bert} %, {roberta} %)"
            )
        print(line)


def encoder(backbone: Any, pooling: Any, ids: Tensor, mask: Tensor, half: bool) -> Callable[[], Tensor]:
    """One forward pass."""

    @torch.no_grad()
    def run() -> Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=half, cache_enabled=False):
            return pooling(backbone(ids, mask, all_layers=pooling.needs_all_layers), mask, {})

    return run


def device_name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    main()
