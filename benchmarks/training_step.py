"""Unsupervised SimCSE, one optimiser step: this project against sentence-transformers and plain loops.

    python benchmarks/training_step.py --backbone FOLDER --sentences FILE [--batch 64] [--layers 12] [--json OUT]

Every arm trains the same architecture (random weights, the folder's tokenizer) on the same sentences, views cut to
32 tokens, in turn on one device: ``st`` and ``st4`` are sentence-transformers' trainer at its defaults and with four
loader workers, ``loop`` a plain PyTorch loop on tokenised batches, ``reduce-overhead`` the same under
``torch.compile(mode="reduce-overhead")`` at a fixed shape, ``embedlab``, ``embedlab-padded`` (captured, with padding)
and ``embedlab-eager`` this project's method under Lightning's trainer. On the CPU only ``st``, ``loop``,
``embedlab-eager`` (without padding there) and ``embedlab-eager-padded`` run. Sentences a second are those of the data
(each is two rows of the batch); TFLOP/s count true tokens only.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy, normalize

LENGTH, TAU = 32, 0.05


def architecture(folder: Path, layers: int) -> Path:
    """BERT-base's shape with random weights and the folder's tokenizer."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    out = Path(tempfile.mkdtemp())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(tokenizer), num_hidden_layers=layers)).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def read(path: Path, n: int) -> list[str]:
    import gzip
    import lzma

    opener: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "rt", encoding="utf-8") as file:
        return [line.strip() for _, line in zip(range(n), file, strict=False) if line.strip()]


def sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def loop(folder: Path, texts: list[str], batch: int, steps: int, mode: str | None) -> float:
    """Seconds a step of a plain loop: one padded forward of both views, autocast, fused AdamW, clipping."""
    from transformers import AutoModel, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModel.from_pretrained(folder).to(device).train(),
    )
    head = torch.nn.Sequential(torch.nn.Linear(768, 768), torch.nn.Tanh()).to(device)
    forward = torch.compile(model, mode=mode) if mode else model
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-5, weight_decay=0.0, fused=device == "cuda")
    pad: Any = "max_length" if mode else True
    batches = [
        tokenizer(texts[i : i + batch], padding=pad, truncation=True, max_length=LENGTH, return_tensors="pt")
        for i in range(0, batch * steps, batch)
    ]
    warm = max(3, steps // 4)
    for i, tokens in enumerate(batches):
        if i == warm:
            sync()
            began = time.perf_counter()
        ids = tokens["input_ids"].to(device, non_blocking=True).repeat(2, 1)
        mask = tokens["attention_mask"].to(device, non_blocking=True).repeat(2, 1)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            hidden = forward(input_ids=ids, attention_mask=mask).last_hidden_state
            a, b = normalize(head(hidden[:, 0]).float(), dim=-1).chunk(2)
        loss = cross_entropy(a @ b.T / TAU, torch.arange(len(a), device=device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    sync()
    return (time.perf_counter() - began) / (len(batches) - warm)


def sentence_transformers(folder: Path, texts: list[str], batch: int, steps: int, workers: int) -> float:
    """Seconds a step of sentence-transformers' trainer with its in-batch negatives loss on (s, s)."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses, models
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from transformers import TrainerCallback

    transformer = models.Transformer(str(folder), max_seq_length=LENGTH)
    model = SentenceTransformer(modules=[transformer, models.Pooling(768, pooling_mode="cls")])
    data = Dataset.from_dict({"anchor": texts[: batch * steps], "positive": texts[: batch * steps]})
    clock: dict[str, float] = {}
    warm = max(3, steps // 4)

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            if state.global_step == warm:
                sync()
                clock["began"] = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            if state.global_step == steps:
                sync()
                clock["ended"] = time.perf_counter()

    arguments = Arguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=batch, max_steps=steps, learning_rate=3e-5,
        bf16=torch.cuda.is_available(), report_to=[], save_strategy="no", logging_strategy="no",
        dataloader_num_workers=workers, disable_tqdm=True,
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=data, loss=losses.MultipleNegativesRankingLoss(model),
        callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    return (clock["ended"] - clock["began"]) / (steps - warm)


def project_settings(
    folder: Path, texts: list[str], out: Path, steps: int, step: str, more: tuple[str, ...]
) -> list[str]:
    """Of a run of so many steps; its text, of as many rows as it reads, goes to the folder `out`."""
    (out / "text.txt").write_text("\n".join(texts), encoding="utf-8")
    device = "auto" if torch.cuda.is_available() else "cpu"
    return [
        "backbone=local", f"backbone.path={folder}", f"data.files={out / 'text.txt'}",
        f"data.cache_dir={out / 'cache'}", f"trainer={device}", f"trainer.max_steps={steps}", f"step={step}",
        "trainer.log_every_n_steps=50", "callbacks.progress=none", "callbacks.checkpoint.at_end=false",
        "data.report=false", "data.processes=1", "evaluation.final=[]", "trainer.max_epochs=100", *more,
    ]  # fmt: skip


def this_project(
    folder: Path,
    texts: list[str],
    batch: int,
    steps: int,
    step: str,
    more: tuple[str, ...] = (),
    warm: int | None = None,
) -> tuple[float, dict[str, float]]:
    """Seconds a step of ``method=simcse`` under Lightning's trainer, and what it logged.

    ``more`` changes its configuration; the first ``warm`` steps (a quarter) do not count.
    """
    from lightning.pytorch import Callback

    from embedlab.cli.compose import compose
    from embedlab.run.dev import load_dev
    from embedlab.run.finish import FinalEvaluation
    from embedlab.run.parse import parse_run
    from embedlab.run.run import build, build_trainer

    out = Path(tempfile.mkdtemp())
    more = (f"data.batch_size={batch}", *more)
    config = parse_run(
        compose("train", project_settings(folder, texts[: batch * steps], out, steps, step, more))
    )
    method, data = build(config, out)
    clock: dict[str, float] = {}
    warm = max(3, steps // 4) if warm is None else warm

    class Clock(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == warm:
                sync()
                clock["began"] = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == steps:  # before the export at the end of the run
                sync()
                clock["ended"] = time.perf_counter()

    finale = FinalEvaluation(config, out, method.encoder, data, load_dev(config.evaluation))
    trainer, _ = build_trainer(config, out, [], finale)
    trainer.callbacks.append(Clock())
    trainer.fit(method, datamodule=data)
    seconds = (clock["ended"] - clock["began"]) / (steps - warm)
    log = next(c.latest for c in trainer.callbacks if hasattr(c, "latest"))
    return seconds, log


def matrix_peak() -> float:
    """Measured bf16 matrix rate of the device, TFLOP/s, on random data."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    sync()
    began = time.perf_counter()
    for _ in range(20):
        a @ b
    sync()
    return 20 * 2 * 8192**3 / (time.perf_counter() - began) / 1e12


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", type=Path, required=True, help="folder whose tokenizer is used")
    parser.add_argument("--sentences", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--arms", default="st,st4,loop,reduce-overhead,embedlab-eager,embedlab-padded,embedlab"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    folder = architecture(options.backbone, options.layers)
    texts = read(options.sentences, options.batch * options.steps)
    from transformers import AutoTokenizer

    lengths = [
        len(i)
        for i in AutoTokenizer.from_pretrained(folder)(texts, truncation=True, max_length=LENGTH)["input_ids"]
    ]
    mean = sum(lengths) / len(lengths)
    weights = options.layers * (12 * 768 * 768)
    flops = 2 * options.batch * mean * (6 * weights + 12 * options.layers * 768 * mean)
    peak = matrix_peak() if cuda else None
    device = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    print(f"{device}, torch {torch.__version__}, batch {options.batch}, mean length {mean:.1f}"
          + (f", measured bf16 peak {peak:.0f} TFLOP/s" if peak else ""), flush=True)  # fmt: skip
    results: dict[str, Any] = {}
    failed: list[str] = []
    for arm in options.arms.split(","):
        steps = (
            min(options.steps, 60)
            if arm.startswith("st") or arm == "loop" or "eager" in arm
            else options.steps
        )
        if not cuda and arm in ("st4", "reduce-overhead", "embedlab", "embedlab-padded"):
            continue
        extra: dict[str, float] = {}
        try:
            if arm.startswith("st"):
                seconds = sentence_transformers(folder, texts, options.batch, steps, 4 if arm == "st4" else 0)
            elif arm in ("loop", "reduce-overhead"):
                seconds = loop(folder, texts, options.batch, steps, None if arm == "loop" else arm)
            else:
                more: tuple[str, ...] = (f"unpad={'false' if arm.endswith('padded') else 'auto'}",)
                count, warm, step = steps, None, "eager"
                if "eager" not in arm:
                    # The same batches twice: each shape has its graph when the clock starts.
                    more = ("data.shuffle=false", *more)
                    count, warm, step = 2 * steps, steps, "graph"
                seconds, extra = this_project(folder, texts, options.batch, count, step, more, warm)
        except Exception as error:  # the other arms are worth having
            failed.append(arm)
            print(f"{arm:16} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        results[arm] = {"ms": 1e3 * seconds, "sentences_per_second": options.batch / seconds,
                        "tflops_true_tokens": flops / seconds / 1e12, **extra}  # fmt: skip
        share = f", {100 * flops / seconds / 1e12 / peak:.1f} % of the measured peak" if peak else ""
        print(f"{arm:16} {1e3 * seconds:8.2f} ms  {options.batch / seconds:8.0f} sentences/s  "
              f"{flops / seconds / 1e12:6.1f} TFLOP/s{share}", flush=True)  # fmt: skip
        if cuda:
            torch.cuda.empty_cache()
    own = "embedlab" if "embedlab" in results else "embedlab-eager"
    if own in results:
        for arm, row in results.items():
            if arm != own:
                print(f"{own} / {arm}: {row['ms'] / results[own]['ms']:.2f}x")
    if options.json:
        facts = {"device": device, "torch": torch.__version__, "batch": options.batch, "mean_length": mean,
                 "peak": peak,
                 "date": time.strftime("%Y-%m-%d"), "arms": results}  # fmt: skip
        options.json.write_text(json.dumps(facts, indent=2))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
