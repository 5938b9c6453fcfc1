"""``embedlab encode IN… OUT ckpt=…``: files of sentences become a file of vectors, or a folder of them in parts."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedlab.cli.compose import compose
from embedlab.cli.encoders import Configured, check_encoding, load_encoder, named, placed, reference
from embedlab.cli.exits import going_on
from embedlab.cli.texts import open_texts
from embedlab.data.sources import find_files
from embedlab.distributed.devices import global_rank, launched, local_rank, world_size
from embedlab.encoders.place import Place
from embedlab.errors import UserError, blamed_on, one_of
from embedlab.files import check_absent, check_writable, is_ours, writing
from embedlab.locks import WorkFolder
from embedlab.run.processes import STARTER, end_with_starter, start_ranks

if TYPE_CHECKING:
    from embedlab.corpus.inputs import Texts
    from embedlab.corpus.parts import Counts, Manifest, Parts
    from embedlab.encoders.codes import Codes

EMPTY = ("error", "zero", "skip")
_PART_ROWS = 1_000_000
_KEPT = 1 << 15  # rows of a part of a single file, which a kill costs at most
_TOLD = {"zero": "vectors of zeros", "skip": "left out"}


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, or 1 where parts are missing."""
    config = compose("encode", argv, positional=("input", "output"), several="input")
    job = _job(config)
    if config["check"]:
        return _check(job)
    config["ckpt"] = named(config["ckpt"])
    check_encoding(config)
    codes = _codes(config)
    place = placed(config["ckpt"])
    if job.single:
        with _work_folder(job):
            parts = _encode(job, config, place, codes)
            total = parts.total()
            if total.vectors == 0:
                raise job.texts.readers[0][0].error("no row with text", fix="give a file with sentences")
            from embedlab.corpus.encode import join_parts

            join_parts(parts, job.out)
        print(f"{total.vectors:,} vectors: {job.out}" + _said(total, config["empty"]))
        return 0
    if job.processes > 1 and not launched():
        status = start_ranks(["embedlab", "encode", *argv], job.processes, again="the same command")
        if status == 0:
            _report(job, config)
        return status
    of_ours = STARTER in os.environ
    end_with_starter()
    _encode(job, config, place, codes)
    if not of_ours and global_rank() == 0:
        _report(job, config)
    return 0


# what is asked for


@dataclass(frozen=True)
class Job:
    """A command's input and output.

    Attributes:
        texts: the input.
        out: a file, or a folder of parts.
        folder: of the parts; of a single file hidden beside it, until all are there.
        suffix: of files of vectors.
        part_rows: rows of a part.
        shard, shards: this one of so many.
        processes: that share this shard on this machine.
    """

    texts: Texts
    out: Path
    folder: Path
    suffix: str
    part_rows: int
    shard: int = 0
    shards: int = 1
    processes: int = 1

    @property
    def single(self) -> bool:
        """Whether the output is one file."""
        return self.folder != self.out

    @property
    def work(self) -> WorkFolder:
        """The hidden folder of a single file's parts."""
        from embedlab.corpus.parts import MANIFEST, NAMES

        return WorkFolder(self.folder, MANIFEST, NAMES, kept="part-*.json", lock=".lock")


def _job(config: dict[str, Any]) -> Job:
    for key, choices in (
        ("empty", EMPTY),
        ("input_hash", ("sha256", "stat")),
        ("format", ("parquet", "npy")),
    ):
        if config[key] not in choices:
            raise UserError("no such choice", key=key, value=config[key], fix=one_of(config[key], choices))
    from embedlab.corpus.inputs import Texts

    out = Path(str(config["output"]))
    sources = sorted(find_files(config["input"], key="input"))
    texts = Texts([open_texts(source, config) for source in sources])
    shard, shards = _shard(config["shard"])
    processes = _processes(config["devices"])
    if max(processes, world_size()) > 1 and config["device"] not in (None, "auto", "cpu", "cuda"):
        fix = "device=cuda or device=cpu"
        raise UserError("each process has its own", key="device", value=config["device"], fix=fix)
    parts = (
        config["part_rows"] is not None or config["shard"] is not None or str(config["output"]).endswith("/")
    )
    if parts:
        from embedlab.corpus.parts import check_folder

        _check_name(out, str(config["output"]))
        check_folder(out, config["overwrite"])
        check_writable(out, key="output")
        suffix, rows = f".{config['format']}", config["part_rows"] or _PART_ROWS
        job = Job(texts, out, out, suffix, rows, shard, shards, processes)
    else:
        work = out.with_name(f".{out.name}.parts")
        rows = config["chunk"] * max(1, _KEPT // config["chunk"])
        job = Job(texts, out, work, out.suffix.lower(), rows, processes=processes)
        _check_file(job, sources, config["overwrite"])
    if config["empty"] == "skip" and job.suffix == ".npy":
        problem = "rows of a .npy file have no numbers, so skipping would shift them"
        fix = "write to a .parquet file, or use empty=zero"
        raise UserError(problem, key="empty", value="skip", fix=fix)
    return job


def _check_name(folder: Path, given: str) -> None:
    """UserError for a folder of parts with a file's name, which nobody means."""
    if folder.suffix.lower() in (".npy", ".parquet") and not given.endswith("/") and not folder.is_dir():
        fix = f"{given}/ for a folder, or leave part_rows and shard out"
        raise UserError("parts make a folder, and this is a file's name", key="output", value=given, fix=fix)


def _as_folder(out: Path) -> str:
    return f"output={out.with_suffix('')}/ for a folder of parts"


def _check_file(job: Job, sources: Sequence[Path], overwrite: bool) -> None:
    """UserError where a single file cannot be the output."""
    from embedlab.corpus.parts import DONE
    from embedlab.corpus.vector_files import check_place, vector_file

    out, folder = job.out, _as_folder(job.out)
    if out.is_dir():
        raise UserError("is a folder", file=out, key="output", fix=f"name a file, or {folder}")
    vector_file(out)
    if len(sources) > 1:
        raise UserError("several files become a folder of parts", file=out, key="output", fix=folder)
    if job.processes > 1 or (launched() and world_size() > 1):
        raise UserError("several processes write a folder of parts", file=out, key="output", fix=folder)
    if out.exists() and any(source.samefile(out) for source in sources):
        raise UserError("input and output are the same file", file=out, fix="write to another file")
    begun = (job.folder / job.work.mark).exists()
    unfinished = any(job.folder.glob(job.work.kept)) and not (job.folder / DONE).exists()
    if unfinished or not begun:  # else it is this command's own: a kill came while its work was removed
        check_absent(out, overwrite)
    check_place(out)


def _shard(given: Any) -> tuple[int, int]:
    if given is None:
        return 0, 1
    found = re.fullmatch(r"(\d+)/([1-9]\d*)", str(given))
    if not found:
        raise UserError("no shard of so many", key="shard", value=given, fix="shard=0/16")
    number, of = int(found[1]), int(found[2])
    if number >= of:
        raise UserError(f"0 to {of - 1}", key="shard", value=given, fix=f"shard=0/{of} is the first")
    return number, of


def _processes(given: Any) -> int:
    if given == "auto":
        import torch

        return max(1, torch.cuda.device_count())
    if type(given) is not int or given < 1:
        raise UserError(
            "must be a positive whole number", key="devices", value=given, fix="devices=4, or auto"
        )
    return given


# the work


def _encode(job: Job, config: dict[str, Any], place: Place | str, codes: Codes) -> Parts:
    """Write what is this process's share of the parts, and is not there."""
    encoder = load_encoder(place, config["max_length"], config.get("pooling"), config["dim"])
    # These load torch, which takes seconds.
    from embedlab.cli.meter import Meter, metered
    from embedlab.corpus.encode import Chunks, encode_parts
    from embedlab.corpus.parts import Parts

    rank, ranks = (global_rank(), world_size()) if launched() else (0, 1)
    configured = Configured.of(encoder, config | {"device": _device(config["device"], ranks)})
    codes = replace(codes, dim=configured.dim)
    manifest = _manifest(job, config, configured, codes)
    if job.single:
        _clear(job, manifest, config["overwrite"])
    parts = Parts.begin(job.folder, manifest, codes)
    number = attrgetter("line" if job.single else "row")
    chunks = Chunks(config["chunk"], config["window"] << 20, config["empty"], number)
    worker, workers = job.shard * ranks + rank, job.shards * ranks
    told = f" (process {rank} of {ranks})" if ranks > 1 else ""
    meter = Meter(job.texts, parts, worker, workers)
    try:
        with going_on(), metered(configured, meter, told) as telling:
            encode_parts(job.texts, parts, telling, chunks, worker, workers)
    except (
        UserError
    ):  # of a text: the input or the settings have to change, and with them the parts of a single file
        if job.single:
            job.work.clear()
        raise
    parts.finish(job.texts.count())
    return parts


def _device(given: str | None, ranks: int) -> str | None:
    if ranks == 1:
        return given
    import torch

    return f"cuda:{local_rank()}" if given != "cpu" and torch.cuda.is_available() else "cpu"


def _codes(config: dict[str, Any]) -> Codes:
    """How vectors are stored; of their width only what ``calibration`` says."""
    from embedlab.corpus.quantize import calibration
    from embedlab.encoders.codes import Codes

    given = config["calibration"]
    ranges = None if given is None else calibration(Path(str(given)))
    return Codes(config["store"], 1 if ranges is None else ranges.shape[1], ranges)


def _manifest(job: Job, config: dict[str, Any], configured: Configured, codes: Codes) -> Manifest:
    import hashlib

    from embedlab.corpus.parts import Manifest

    encoder = configured.encoder
    tower = encoder.towers[0]
    return Manifest(
        encoder=reference(encoder, str(config["ckpt"])),
        revision=tower.backbone.commit,
        dim=codes.dim,
        prompt=encoder.usage.text(config["prompt"], config["prompt_name"]),
        max_length=encoder.tokenization.max_length,
        pooling=asdict(tower.pooling.config),
        dtype=config["dtype"],
        normalize=config["normalize"],
        store=codes.store,
        ranges=None if codes.ranges is None else hashlib.sha256(codes.ranges.tobytes()).hexdigest(),
        suffix=job.suffix,
        empty=config["empty"],
        batch_size=config["batch_size"],
        chunk=config["chunk"],
        window=config["window"],
        part_rows=job.part_rows,
        files=job.texts.identities(config["input_hash"]),
        fingerprint=encoder.fingerprint(),
    )


# a single file


@contextmanager
def _work_folder(job: Job) -> Iterator[None]:
    """The hidden folder of a single file's parts: another process does not use it meanwhile, and it is gone at the end.

    It stays where a kill, Ctrl-C, a full disk or the device ended the work and a part is whole: the next run goes on.
    """
    from embedlab.corpus.parts import MANIFEST, Manifest

    folder, work = job.folder, job.work
    if folder.is_symlink() or (folder.exists() and not is_ours(folder.stat())):
        raise UserError("belongs to another user", file=folder, fix="remove it, or write elsewhere")
    if (folder / MANIFEST).exists():
        with blamed_on("output", job.out, fix=f"move {folder} away, or write elsewhere"):
            Manifest.read(folder)
    try:
        with writing(job.out, folder), work.held(job.out, "output"):
            yield
    except KeyboardInterrupt:
        if any(folder.glob(work.kept)):
            print("embedlab: what is done is kept, the same command goes on", file=sys.stderr)
        raise


def _clear(job: Job, manifest: Manifest, overwrite: bool) -> None:
    """Empty the hidden folder of a single file, unless its parts are of this manifest."""
    from embedlab.corpus.parts import MANIFEST, Manifest

    try:
        manifest.check(Manifest.read(job.folder), job.folder / MANIFEST)
    except UserError:
        check_absent(job.out, overwrite)
        job.work.empty()


# what is said


def _said(total: Counts, empty: str) -> str:
    if total.cut:
        line = f"{total.cut:,} texts were cut, being longer than the encoder reads"
        print(f"embedlab: warning: {line}", file=sys.stderr)
    return f" ({total.empty:,} empty rows: {_TOLD[empty]})" if total.empty else ""


def _report(job: Job, config: dict[str, Any]) -> None:
    from embedlab.corpus.parts import DONE, Parts

    parts = Parts.read(job.folder)
    total = parts.total()
    more = "" if (job.folder / DONE).is_file() else "; others are missing, check=true lists them"
    said = f"{total.vectors:,} vectors in {len(parts.whole()):,} parts: {job.out}"
    print(said + _said(total, config["empty"]) + more)


def _check(job: Job) -> int:
    from embedlab.corpus.parts import DONE, MANIFEST, Parts

    if job.single:
        raise UserError("is about a folder of parts", file=job.out, key="check", fix=_as_folder(job.out))
    parts = Parts.read(job.folder)
    by = "stat" if any("modified" in file for file in parts.manifest.files) else "sha256"
    ours = replace(parts.manifest, files=job.texts.identities(by))
    ours.check(parts.manifest, job.folder / MANIFEST)
    rows, sound = job.texts.count(), True
    for number, what in parts.faults(rows):
        print(f"{parts.path(number).name}: {what}")
        sound = False
    if not sound:
        (job.folder / DONE).unlink(missing_ok=True)
        return 1
    parts.finish(rows)
    _report(job, {"empty": parts.manifest.empty})
    return 0
