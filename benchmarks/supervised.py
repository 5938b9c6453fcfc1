"""Supervised training beside sentence-transformers' trainer: the same loss, rows, steps, rate and start.

    python -m benchmarks.supervised --model FOLDER --data FOLDER --losses in_batch cosent angle matryoshka \
        --seeds 0 1 2 --json OUT

Each arm trains and is then scored by ``embedlab evaluate suite=sts`` on `--tasks`. ``in_batch`` reads
nli/nli_triples_en.tsv.gz of the folder, the others sts/stsb_train.tsv.gz; ``angle`` is sentence-transformers' (the
angle alone), ``matryoshka`` is CoSENT of all columns, a half and a quarter of them, scored at the quarter too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from embedlab.cli.main import main as command
from embedlab.data.kinds import data_config, data_kind
from embedlab.data.rows import read_rows
from embedlab.evaluation.sts.sts import SEVEN

KINDS = {"in_batch": ("nli", "nli/nli_triples_en.tsv.gz", None)}
_SCORED = ("scored", "sts/stsb_train.tsv.gz", [0, 5])
LENGTH = 64


def main() -> None:
    """Train every arm, print and write what each scored and took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--losses", nargs="+", default=["in_batch", "cosent", "angle", "matryoshka"])
    parser.add_argument("--arms", nargs="+", default=["embedlab", "sentence-transformers"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--tasks", nargs="+", default=list(SEVEN))
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for loss in options.losses:
        for seed in options.seeds:
            for arm in options.arms:
                with tempfile.TemporaryDirectory() as place:
                    train = embedlab if arm == "embedlab" else sentence_transformers
                    began = time.perf_counter()
                    export, seconds = train(options, loss, seed, Path(place))
                    total = time.perf_counter() - began
                    found = {"loss": loss, "arm": arm, "seed": seed, "seconds": seconds, "with_start": total}
                    found |= scored(export, options, None)
                    if loss == "matryoshka":
                        found["quarter"] = scored(export, options, width(options.model) // 4)
                results.append(found)
                print(json.dumps(found), flush=True)
                if options.json:
                    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
                    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
                    text = json.dumps({"settings": settings, "device": device, "runs": results}, indent=1)
                    options.json.write_text(text + "\n", encoding="utf-8")


def width(model: Path) -> int:
    """Features of the model's hidden states."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return int(config.get("hidden_size") or config["dim"])


def embedlab(options: argparse.Namespace, loss: str, seed: int, place: Path) -> tuple[Path, float]:
    """Train by the command line in a process of its own; the export, and the seconds of the fit."""
    kind, file, limits = KINDS.get(loss, _SCORED)
    objective = {"in_batch": "in_batch", "angle": "angle"}.get(loss, "cosent")
    settings = [
        "method=supervised", f"method.objective={objective}", f"data={kind}", f"data.files={options.data / file}",
        "backbone=local", f"backbone.path={options.model}", "pooling=mean", f"data.max_length={LENGTH}",
        f"data.batch_size={options.batch}", f"optimizer.lr={options.lr}", "optimizer.schedule=linear",
        "optimizer.weight_decay=0", "optimizer.clip=1.0", f"trainer.max_epochs={options.epochs}",
        f"trainer.max_steps={options.steps}", f"seed={seed}", "evaluation.final=[]", "evaluation.before=false",
        f"hydra.run.dir={place / 'run'}",
    ]  # fmt: skip
    if not torch.cuda.is_available():
        settings.append("trainer=cpu")
    if limits is None:
        settings.append("method.mask_duplicates=false")  # as the peer
    else:
        settings.append(f"data.score_range={limits}".replace(" ", ""))
    if loss == "angle":
        settings += ["method.in_batch_weight=0", "method.angle_weight=1"]
    if loss == "matryoshka":
        dims = ",".join(str(width(options.model) // n) for n in (1, 2, 4))
        settings.append(f"method.matryoshka.dims=[{dims}]")
    subprocess.run([sys.executable, "-m", "embedlab", "train", *settings], check=True)
    content = json.loads((place / "run" / "scores.json").read_text(encoding="utf-8"))
    return place / "run" / "export", float(content["training"]["seconds"])


def sentence_transformers(
    options: argparse.Namespace, loss: str, seed: int, place: Path
) -> tuple[Path, float]:
    """Train by sentence-transformers' trainer; the saved model, and the seconds of its `train`."""
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses, models
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments

    transformer = models.Transformer(str(options.model), max_seq_length=LENGTH)
    pooling = models.Pooling(width(options.model), pooling_mode="mean")
    model = SentenceTransformer(modules=[transformer, pooling])
    objective: Any = {
        "in_batch": lambda: losses.MultipleNegativesRankingLoss(model),
        "angle": lambda: losses.AnglELoss(model),
    }.get(loss, lambda: losses.CoSENTLoss(model))()
    if loss == "matryoshka":
        objective = losses.MatryoshkaLoss(model, objective, [width(options.model) // n for n in (1, 2, 4)])
    arguments = Arguments(
        output_dir=str(place / "trainer"), per_device_train_batch_size=options.batch, learning_rate=options.lr,
        num_train_epochs=options.epochs, max_steps=options.steps, weight_decay=0.0, max_grad_norm=1.0, seed=seed,
        lr_scheduler_type="linear", bf16=torch.cuda.is_available(), report_to=[], save_strategy="no",
        logging_strategy="no", dataloader_drop_last=True, disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=rows(options.data, loss), loss=objective
    )
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    model.save(str(place / "model"))
    return place / "model", seconds


def rows(data: Path, loss: str) -> Any:
    """The same rows as a table of `datasets`."""
    kind, file, limits = KINDS.get(loss, _SCORED)
    config = data_config({"name": kind, "files": str(data / file), "score_range": limits})
    names = [*data_kind(kind).roles, *data_kind(kind).numbers]
    columns = zip(*(values for _, _, values, _ in read_rows(config)), strict=True)
    return Dataset.from_dict(dict(zip(names, map(list, columns), strict=True)))


def scored(export: Path, options: argparse.Namespace, dim: int | None) -> dict[str, float]:
    """Spearman x 100 on the test sets of the tasks, and the mean of all seven."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "scores.json"
        more = [] if dim is None else [f"dim={dim}"]
        tasks = f"tasks=[{','.join(options.tasks)}]"
        if command(
            [
                "evaluate",
                f"ckpt={export}",
                "suite=sts",
                f"data_dir={options.data / 'sts'}",
                f"out={out}",
                tasks,
                *more,
            ]
        ):
            raise RuntimeError("the encoder cannot be scored")
        found = json.loads(out.read_text(encoding="utf-8"))["scores"]
    wanted = [*options.tasks, *(["sts7"] if {*SEVEN} <= {*options.tasks} else [])]
    return {task: found[f"{task}/spearman"] for task in wanted}


if __name__ == "__main__":
    main()
