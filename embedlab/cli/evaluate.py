"""``embedlab evaluate ckpt=… suite=…``: named scores with their protocol, as a table and as JSON."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embedlab.cli.compose import compose
from embedlab.errors import UserError
from embedlab.files import check_writable

# Suites of fixed sets: a part of one is another test, so that `limit` is not for them.
_WHOLE = frozenset(
    ("sts", "transfer", "retrieval", "robustness", "geometry", "lee", "mteb", "cls_energy", "emoji")
)
# The suites that read a key. Given with several suites, it is for those that do.
_READS = {
    "tasks": frozenset(
        ("sts", "transfer", "retrieval", "robustness", "mteb", "bitext", "xretrieval", "qa", "glue")
    ),
    "languages": frozenset(
        ("mteb", "bitext", "languages", "sts_multilingual", "xretrieval", "pawsx", "xnli", "qa")
    ),
}
_OWN_KEYS = ("ckpt", "suite", "out", "compare", "cross_attention", "batch_size", "max_length", "pooling")
_LIST = re.compile(r"(\+{0,2}(?:suite|tasks|languages))=([^\[\]{}'\"]+,[^\[\]{}'\"]*)")


def main(argv: list[str]) -> int:
    """Runs the command; returns 0."""
    config = compose("evaluate", [_as_list(argument) for argument in argv])
    from embedlab.evaluation import SUITES

    suites = _names(config["suite"])
    folder = config["data_dir"]
    if folder is not None and not Path(str(folder)).is_dir():
        fix = "give the folder of the suites' data"
        raise UserError("no such folder", key="data_dir", value=folder, fix=fix)
    runners = {name: SUITES[name] for name in suites}
    for suite in suites:
        if config["limit"] is not None and suite in _WHOLE:
            raise UserError(
                f"suite {suite} is scored whole", key="limit", value=config["limit"], fix="leave limit out"
            )
    for key, readers in _READS.items():
        if config[key] is not None and not readers & set(suites):
            raise UserError(
                f"suite {', '.join(suites)} has no {key} to choose from", key=key, value=config[key],
                fix=f"leave {key} out",
            )  # fmt: skip
    if config["cross_attention"] is not None and config["out"] is None:
        raise UserError(
            "these scores would replace those of the twin as it is", key="cross_attention",
            value=config["cross_attention"], fix="out=FILE.json, or out=FOLDER for several suites",
        )  # fmt: skip
    out = _out(config["out"], suites)
    reading = _reading(config)
    paths = {suite: _path(out, str(config["ckpt"]), suite, reading) for suite in suites}
    for path in paths.values():
        if path.is_dir():
            raise UserError("is a folder", file=path, key="out", fix="name a file that ends in .json")
        check_writable(path)

    if len(suites) > 1:  # one says it soon enough by itself
        from embedlab.evaluation.core.preflight import check_data

        for suite in suites:
            check_data(suite, _settings(config, suite))
    if config["compare"] is not None:
        from embedlab.evaluation.core.preflight import check_comparison

        check_comparison(_settings(config, "sts"))

    from embedlab.cli.encoders import Configured, load_encoder
    from embedlab.evaluation.core.protocol import write_scores
    from embedlab.evaluation.core.table import suite_tables

    loaded = load_encoder(config["ckpt"], config["max_length"], config.get("pooling"))
    if config["cross_attention"] is not None:
        loaded = _crossed(loaded, config["cross_attention"])
    encoder = Configured.of(loaded, config, sys.stderr.isatty())
    other = None
    if config["compare"] is not None:  # loaded now: a wrong name must not show after hours
        other = Configured.of(_compared(config), config, sys.stderr.isatty())
    for i, (suite, runner) in enumerate(runners.items(), start=1):
        if len(runners) > 1:
            print(f"embedlab: suite {suite} ({i} of {len(runners)})", file=sys.stderr)
        path = paths[suite]
        kept = path.with_suffix(".unfinished")
        settings = _settings(config, suite) | {"device": str(encoder.encoder.device), "kept": kept}
        scores, protocol = runner(encoder, settings)
        write_scores(path, scores, protocol)
        kept.unlink(missing_ok=True)
        for table in suite_tables(suite, str(config["ckpt"]), scores, protocol):
            table.print()
        for warning in protocol["warnings"]:
            print(f"embedlab: warning: {warning}", file=sys.stderr)
        print(f"Scores: {path}")
    if other is not None:
        _compare(encoder, other, config, out)
    return 0


def _crossed(encoder: Any, layers: Any) -> Any:
    """A twin with its towers' attention exchanged in `layers` layers."""
    from embedlab.encoders.twin import TwinEncoder

    what: dict[str, Any] = {"key": "cross_attention", "value": layers}
    if not isinstance(encoder, TwinEncoder):
        raise UserError("this encoder has one tower", **what, fix="leave it out, or the checkpoint of a twin")
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise UserError("not a number of layers", **what, fix="a whole number that divides the depth")
    return encoder.crossed(layers)


def _compared(config: Mapping[str, Any]) -> Any:
    """The encoder that ``compare`` names. A reading that is asked for is for both, the rest is each one's own."""
    from embedlab.cli.encoders import load_encoder

    try:
        return load_encoder(config["compare"], config["max_length"], config.get("pooling"))
    except UserError as error:
        error.file = error.file or str(config["compare"])
        raise


def _compare(encoder: Any, other: Any, config: Mapping[str, Any], out: Path | None) -> None:
    """The encoder against the `other` that ``compare`` names, on the same STS pairs."""
    from embedlab.evaluation.core.protocol import write_scores
    from embedlab.evaluation.core.table import Table
    from embedlab.evaluation.sts import compare

    changes, protocol = compare.run(other, encoder, _settings(config, "sts"))
    folder = out if out is None or out.suffix != ".json" else out.parent
    path = _path(folder, str(config["ckpt"]), "compare", _reading(config))
    write_scores(path, changes, protocol)
    rows = tuple(
        (task, f"{changes[f'{task}/change']:+.2f}",
         f"[{changes[f'{task}/change_low']:+.2f}, {changes[f'{task}/change_high']:+.2f}]")
        for task in dict.fromkeys(key.split("/")[0] for key in changes)
    )  # fmt: skip
    title = f"{config['ckpt']} minus {config['compare']}, Spearman x100"
    Table(title, ("task", "change", "95 % over pairs"), rows, protocol["notes"][0]).print()
    print(f"Scores: {path}")


def _as_list(argument: str) -> str:
    # Hydra reads a comma outside brackets as a sweep.
    match = _LIST.fullmatch(argument)
    return f"{match[1]}=[{match[2]}]" if match else argument


def _names(suite: Any) -> list[str]:
    names = list(suite) if isinstance(suite, list) else [] if suite is None else [suite]
    if not names:
        raise UserError("no suite is named", key="suite", value=suite, fix="suite=sts")
    return list(dict.fromkeys(map(str, names)))


def _settings(config: Mapping[str, Any], suite: str) -> dict[str, Any]:
    """What a suite gets: every key that is not this command's own, data_dir being the suite's folder."""
    settings = {key: value for key, value in config.items() if key not in _OWN_KEYS}
    if isinstance(settings["tasks"], str):
        settings["tasks"] = [settings["tasks"]]
    if config["data_dir"] is not None:
        from embedlab.evaluation.core.preflight import folder_for

        settings["data_dir"] = folder_for(str(config["data_dir"]), suite)
    return settings


def _out(out: Any, suites: Sequence[str]) -> Path | None:
    if out is None:
        return None
    path = Path(str(out))
    if path.suffix == ".json" and len(suites) > 1:
        raise UserError(f"one file for {len(suites)} suites", key="out", value=out, fix="out=FOLDER")
    return path


def _reading(config: Mapping[str, Any]) -> str:
    """What tells these scores from those of the checkpoint as it is, for the name of their file."""
    pooling, length = config.get("pooling"), config["max_length"]
    parts = [pooling]
    if isinstance(pooling, Mapping):
        parts = [pooling["name"], *(f"{k}{v}" for k, v in pooling.items() if k != "name" and v is not None)]
    return re.sub(r"[^\w.-]+", "_", "".join(f"-{part}" for part in (*parts, length) if part is not None))


def _path(out: Path | None, ckpt: str, suite: str, reading: str = "") -> Path:
    """Where the scores of `suite` go: `out`, else scores/ beside the checkpoint, else the working folder.

    Not beside what is shipped with the package or lies in the hub's cache, nor in a folder that is read-only.
    """
    if out is not None:
        return out if out.suffix == ".json" else out / f"{suite}.json"
    suite += reading
    place = Path(ckpt)
    if place.exists():
        folder = place if place.is_dir() else place.parent
        scores = folder / "scores"
        if os.access(scores if scores.is_dir() else folder, os.W_OK):
            return scores / f"{suite}.json"
    name = re.sub(r"[^\w.-]+", "-", place.name if place.exists() else ckpt).strip("-") or "encoder"
    return Path(f"scores-{name}-{suite}.json")
