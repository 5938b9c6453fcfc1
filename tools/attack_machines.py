"""Attempts of `tools/attacks.py` at machines: their memory, their shared folders, their terminals."""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import os
import re
import resource
import shutil
import signal
import stat
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from attack_place import TEXTS, Place, change

OTHER = 12345
"""A user who is neither this one nor root."""
MIB = 1 << 20
_SECONDS = 300


class NotTried(Exception):
    """This machine or user cannot make the attempt."""


def within(mib: int, at: Place, *arguments: str | Path, status: int | None = None) -> None:
    """Run a command, as `Place.run`, in a child that may take so many MiB more than this process has."""
    child = os.fork()
    if not child:
        signal.alarm(_SECONDS)  # what waits for a pipe, or reads a device without end, is killed
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + mib * MIB
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        try:
            at.run(*arguments, status=status)
        except BaseException as error:
            print(f"        {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, f"{' '.join(map(str, arguments))[:200]}: status {code} in {mib} MiB"


def bombs_of_text(at: Place) -> None:
    """B.5 kB of xz with a line of 60 MB, and of parquet with a text of 20 MB a thousand times"""
    with lzma.open(at.folder / "line.txt.xz", "wb") as file:
        for _ in range(60):
            file.write(b"x" * MIB)
    words = pa.DictionaryArray.from_arrays(pa.array([0] * 1024, pa.int32()), pa.array(["x" * (20 * MIB)]))
    pq.write_table(pa.table({"text": words}), at.folder / "words.parquet")
    for name in ("line.txt.xz", "words.parquet"):
        source = at.folder / name
        within(600, at, "encode", source, at.folder / "out.npy", f"ckpt={at.folder / 'encoder'}", status=2)
        within(
            600, at, "search", "index", source, at.folder / "new", f"ckpt={at.folder / 'encoder'}", status=2
        )
        within(600, at, *at.train(f"data.files={source}", f"hydra.run.dir={at.folder / 'new'}"), status=2)
    assert not (at.folder / "out.npy").exists()
    assert not (at.folder / "new").exists()


def bombs_of_scores(at: Place) -> None:
    """B.5 a MB of gz that holds a GB, as a set of rated pairs to evaluate on"""
    (at.folder / "sts").mkdir()
    with gzip.open(at.folder / "sts" / "stsb_test.tsv.gz", "wb", compresslevel=9) as file:
        file.write(b"score\tsentence1\tsentence2\n")
        for _ in range(1024):
            file.write(b"1.0\ta cat\ta dog\n" * (MIB // 16))
    within(
        600,
        at,
        "evaluate",
        f"ckpt={at.folder / 'encoder'}",
        "suite=sts",
        "tasks=stsb",
        f"data_dir={at.folder}",
    )


def absurd_sizes(at: Place) -> None:
    """B.5 configurations of absurd sizes, alone and in files that say the same of their tensors"""
    absurd: tuple[dict[str, Any], ...] = (
        {"num_hidden_layers": 10**9}, {"hidden_size": 1 << 40}, {"vocab_size": 2_000_000_000},
        {"intermediate_size": 1 << 38}, {"max_position_embeddings": 1 << 39}, {"num_hidden_layers": 999},
        {"type_vocab_size": 1 << 40}, {"num_attention_heads": 0}, {"hidden_size": -8},
    )  # fmt: skip
    for i, values in enumerate(absurd):
        folder = Path(shutil.copytree(at.folder / "model", at.folder / f"absurd{i}"))
        change(folder / "config.json", values)
        within(600, at, "encode", at.folder / "texts.txt", at.folder / "out.npy", f"ckpt={folder}", status=2)
        within(600, at, *at.train(f"backbone.path={folder}", f"hydra.run.dir={at.folder / 'new'}"), status=2)


def absurd_files(at: Place) -> None:
    """B.5 files of a model that are pipes, devices or sparse; arrays and archives that promise gigabytes"""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        for kind in ("pipe", "device", "sparse"):
            folder = Path(shutil.copytree(at.folder / "model", at.folder / f"{kind}-{name}"))
            (folder / name).unlink()
            if kind == "pipe":
                os.mkfifo(folder / name)
            elif kind == "device":
                (folder / name).symlink_to("/dev/zero")
            else:
                with (folder / name).open("wb") as file:
                    file.truncate(300 * MIB)
            within(600, at, "encode", at.folder / "texts.txt", at.folder / "out.npy", f"ckpt={folder}")
    for name in ("vectors.npy", "offsets.npy"):
        with (at.folder / "index" / name).open("wb") as file:
            shape = {
                "descr": "<f4" if name == "vectors.npy" else "<i8",
                "fortran_order": False,
                "shape": (1 << 50,),
            }
            np.lib.format.write_array_header_1_0(file, shape)
        within(600, at, "search", "query", at.folder / "index", "a cat")
    packed = at.folder / "packed.ckpt"
    with (
        zipfile.ZipFile(at.folder / "run" / "last.ckpt") as whole,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file,
    ):
        for item in whole.infolist():
            with file.open(item.filename, "w", force_zip64=True) as target:
                target.write(whole.read(item))
                for _ in range(2048 if item.filename.endswith("/data.pkl") else 0):
                    target.write(bytes(MIB))
    within(600, at, "encode", at.folder / "texts.txt", at.folder / "out.npy", f"ckpt={packed}")
    within(
        600, at, *at.train(f"ckpt_path={packed}", f"hydra.run.dir={at.folder / 'new'}", "trainer.max_steps=2")
    )


def tensors_without_memory(at: Place) -> None:
    """B.5 a checkpoint of one number that stands for a matrix of terabytes"""
    content = torch.load(at.folder / "run" / "last.ckpt", weights_only=True)
    state = content["state_dict"]
    name = next(key for key in state if state[key].ndim == 2)
    state[name] = torch.zeros(1).expand(1 << 20, 1 << 20)
    torch.save(content, at.folder / "wide.ckpt")
    within(
        600, at, "encode", at.folder / "texts.txt", at.folder / "out.npy", f"ckpt={at.folder / 'wide.ckpt'}"
    )
    within(600, at, *at.train(f"ckpt_path={at.folder / 'wide.ckpt'}", f"hydra.run.dir={at.folder / 'new'}",
                              "trainer.max_steps=2"))  # fmt: skip


def shared_caches(at: Place) -> None:
    """B.4 in a cache of many users: another one's killed build and lock, a lock that is a link, another one's tokens"""
    if os.geteuid():
        raise NotTried("only root can make files of another user")
    os.environ["XDG_CACHE_HOME"] = str(at.folder / "home")
    (table,) = (p for p in (at.folder / "cache").iterdir() if p.is_dir())
    lock = table.with_name(f"{table.name}.lock")
    kept = Path(shutil.copytree(table, at.folder / "kept"))
    own = at.folder / "home" / "embedlab" / "tokens" / table.name

    def again(name: str) -> None:
        shutil.rmtree(at.folder / "home", ignore_errors=True)
        at.run(*at.train(f"hydra.run.dir={at.folder / name}"), status=0)
        assert own.is_dir(), "not built in the user's own cache"
        assert (own / "ids0.bin").read_bytes() == (kept / "ids0.bin").read_bytes()

    ids = np.fromfile(table / "ids0.bin", np.uint16)
    ids[::-1].tofile(table / "ids0.bin")
    for path in (table, *table.iterdir()):
        os.chown(path, OTHER, OTHER)
    again("tokens of another")
    shutil.rmtree(table)
    os.chown(lock, OTHER, OTHER)
    (table.with_name(f".{table.name}.elsewhere.1.abcdefgh.new")).mkdir()
    again("lock of another")
    lock.unlink()
    lock.symlink_to(at.folder / "victim")
    again("a link for a lock")
    assert not (at.folder / "victim").exists()


def links_in_the_way(at: Place) -> None:
    """G.6 links lie where outputs go, and lead to a file of the user's"""
    victim = at.folder / "victim"
    victim.write_text("mine")
    written = ("config.yaml", "metrics.csv", "last.ckpt", "scores.json", "scores_before.json", "data_report.json",
               "previous.ckpt", "train.log", ".lock", ".hydra/config.yaml", ".hydra/overrides.yaml",
               "export/embedlab.json", "export/model.safetensors")  # fmt: skip
    for i, name in enumerate(written):
        link = at.folder / f"run{i}" / name
        link.parent.mkdir(parents=True)
        link.symlink_to(victim)
        at.run(*at.train(f"hydra.run.dir={at.folder / f'run{i}'}"))
        assert victim.read_text() == "mine", f"{name} leads out of a run's folder"
    outputs = {
        "out.npy": ("encode", at.folder / "texts.txt"), "out.parquet": ("encode", at.folder / "texts.txt"),
        "new": ("search", "index", at.folder / "texts.txt"),
    }  # fmt: skip
    for name, command in outputs.items():
        (at.folder / name).symlink_to(victim)
        at.run(*command, at.folder / name, f"ckpt={at.folder / 'encoder'}")
        assert victim.read_text() == "mine", f"{name} was written through a link"
    (at.folder / "report").mkdir()
    for name in ("report.md", "report.html", "report.csv", "report.tex"):
        (at.folder / "report" / name).symlink_to(victim)
    content = json.loads((at.folder / "run" / "scores.json").read_text()) | {
        "scores": {"sts7/spearman": 70.0}
    }
    (at.folder / "run" / "scores.json").write_text(json.dumps(content))
    at.run("report", at.folder / "run", f"out={at.folder / 'report'}")
    assert victim.read_text() == "mine", "a report was written through a link"


def modes_by_the_umask(at: Place) -> None:
    """G.6 outputs that others may read, or may not, against the umask"""
    content = json.loads((at.folder / "run" / "scores.json").read_text()) | {
        "scores": {"sts7/spearman": 70.0}
    }
    (at.folder / "run" / "scores.json").write_text(json.dumps(content))
    before = os.umask(0)
    try:
        for umask in (0o022, 0o027, 0o077, 0o002):
            os.umask(umask)
            made = at.folder / f"{umask:o}"
            made.mkdir()
            ckpt = f"ckpt={at.folder / 'encoder'}"
            at.run("encode", at.folder / "texts.txt", made / "out.npy", ckpt, status=0)
            at.run("encode", at.folder / "texts.txt", made / "out.parquet", ckpt, status=0)
            at.run("search", "index", at.folder / "texts.txt", made / "index", ckpt, status=0)
            for target in ("hf", "sentence-transformers"):
                at.run("export", ckpt, f"to={target}", f"out={made / target}", status=0)
            at.run("report", at.folder / "run", f"out={made / 'report'}", status=0)
            at.run(*at.train(f"hydra.run.dir={made / 'run'}", f"data.cache_dir={made / 'cache'}"), status=0)
            odd = {
                f"{path.relative_to(made)}: {mode:o}"
                for path in made.rglob("*")
                if (mode := stat.S_IMODE(path.stat().st_mode)) != (0o777 if path.is_dir() else 0o666) & ~umask
            }
            assert not odd, f"under {umask:o}: {sorted(odd)}"
    finally:
        os.umask(before)


BAD = "\x1b]0;owned\x07\x9b31m\u202e\r"


def controls_in_names(at: Place) -> None:
    """G.7 escapes of a terminal in names of files, columns, labels, keys and architectures that are refused"""
    said = []
    odd = at.folder / f"a{BAD}b"
    odd.mkdir()
    ckpt = f"ckpt={at.folder / 'encoder'}"
    said.append(at.run("encode", odd / "none.txt", at.folder / "out.npy", ckpt, status=2))
    said.append(at.run("encode", at.folder / "texts.txt", at.folder / "out.npy", f"ckpt={odd}", status=2))
    said.append(at.run("report", odd, status=2))
    with (at.folder / "odd.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([[f"x{BAD}", f"y{BAD}"], *([t, t] for t in TEXTS)])
    said.append(at.run("encode", at.folder / "odd.csv", at.folder / "out.npy", ckpt, status=2))
    (at.folder / "odd.jsonl").write_text(json.dumps({f"x{BAD}": "a", "y": "b"}) + "\n")
    said.append(at.run("encode", at.folder / "odd.jsonl", at.folder / "out.npy", ckpt, status=2))
    said.append(
        at.run("encode", at.folder / "odd.jsonl", at.folder / "out.npy", ckpt, f"column=x{BAD.rstrip()}")
    )
    config, tokenizer = "config.json", "tokenizer_config.json"
    for name, values in ((config, {"model_type": BAD}), (config, {"architectures": [BAD]}),
                         (config, {BAD: BAD, "hidden_act": BAD}), (tokenizer, {"tokenizer_class": BAD})):  # fmt: skip
        folder = Path(shutil.copytree(at.folder / "model", at.folder / f"odd{len(said)}"))
        change(folder / name, values)
        said.append(at.run("encode", at.folder / "texts.txt", at.folder / "out.npy", f"ckpt={folder}"))
    folder = Path(shutil.copytree(at.folder / "encoder", at.folder / "odd-encoder"))
    change(folder / "embedlab.json", {"pooling": {"name": BAD}})
    said.append(at.run("encode", at.folder / "texts.txt", at.folder / "out.npy", f"ckpt={folder}", status=2))
    (at.folder / "sts").mkdir()
    with (at.folder / "sts" / "stsb_test.tsv").open("w", encoding="utf-8") as file:
        file.write(f"score\tsentence1\tsentence2\n{BAD.strip()}\ta\tb\n")
    said.append(at.run("evaluate", ckpt, "suite=sts", "tasks=stsb", f"data_dir={at.folder}", status=2))
    for key in ("scores", "training"):
        content = json.loads((at.folder / "run" / "scores.json").read_text())
        (at.folder / "scores.json").write_text(json.dumps(content | {key: {BAD: BAD}}))
        said.append(at.run("report", at.folder / "scores.json"))
    said.append(at.run(*at.train(f"+data.{'x'}={BAD.strip()}"), status=2))
    for text in said:
        assert not set(text) & set("\x1b\x07\x9b\u202e"), f"raw: {text[-200:]!r}"


def injection_in_cards(at: Place) -> None:
    """G.7 the card of a foreign encoder carries tags, front matter, links and fences into an export"""
    bad = [
        "</details><script>x</script>",
        "---\nlicense: mit\n---",
        "```\n# owned\n```",
        "[x](javascript:y)",
        BAD,
    ]
    folder = Path(shutil.copytree(at.folder / "encoder", at.folder / "theirs"))
    values = {text: text for text in bad}
    for text in bad:
        config = {"method": values, "data": {"name": text, "files": text}}
        card = {"training": values | {"seed": text}, "config": config,
                "scores": {text: 1.0, "sts7/spearman": 2.0}, "protocol": {text: values | {"name": text}},
                "licence": text, "hub": text, "source": text}  # fmt: skip
        change(folder / "embedlab.json", {"card": card})
        out = at.folder / "export"
        shutil.rmtree(out, ignore_errors=True)
        said = at.run("export", f"ckpt={folder}", "to=hf", f"out={out}")
        written = (out / "README.md").read_text() if out.exists() else ""
        _, _, body = written.removeprefix("---\n").partition("\n---")
        outside = re.sub(r"(?ms)^(`{3,})\w*\n.*?^\1$", "", body)
        broken = [
            raw
            for raw in (r"(?<!\\)<script", r"[^\\]\]\(javascript", r"\n# owned")
            if re.search(raw, outside)
        ]
        broken += [repr(c) for c in "\x1b\x07\x9b\u202e" if c in said + written]
        broken += ["front matter"] * ("\n---\n" in body)
        assert not broken, f"{broken} of {text!r}"


ON_MACHINES: tuple[Callable[[Place], None], ...] = (
    bombs_of_text, bombs_of_scores, absurd_sizes, absurd_files, tensors_without_memory, shared_caches, links_in_the_way,
    modes_by_the_umask, controls_in_names, injection_in_cards,
)  # fmt: skip
