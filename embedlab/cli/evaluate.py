"""``embedlab evaluate ckpt=… suite=…``: named scores with their protocol, as a table and as JSON."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from embedlab.cli.compose import compose
from embedlab.cli.encoders import Configured, check_encoding, load_encoder, named, placed
from embedlab.encoders.place import Place, is_shipped
from embedlab.errors import UserError, printable
from embedlab.evaluation.core.protocol import write_scores
from embedlab.evaluation.core.suite import SHARED_KEYS, Suite, check_keys, check_names, keys_named, suite
from embedlab.files import check_absent, check_writable, existing_folder
from embedlab.run.run_folder import owned, run_around

_TO_CHOOSE = ("tasks", "languages")
"""Keys that are given to choose from a suite; with several suites they are for those that read them."""
_OWN_KEYS = ("ckpt", "suite", "out", "overwrite", "compare", "cross_attention", "batch_size", "max_length",
             "pooling", "dim")  # fmt: skip
_SHARED = ("tasks", "languages", "limit", "sts_text", "mode", "finetune")
"""Keys that the configuration always has; a suite that does not read one is not given it."""
_LIST = re.compile(r"(\+{0,2}(?:suite|tasks|languages))=([^\[\]{}'\"]+,[^\[\]{}'\"]*)")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0."""
    config = compose("evaluate", [_as_list(argument) for argument in argv])
    names = _names(config["suite"])
    if config["data_dir"] is not None:
        existing_folder(config["data_dir"], "give the folder of the suites' data", "data_dir")
    check_names(names)
    config["ckpt"] = named(config["ckpt"])
    out = _out(config["out"], names)
    if out is not None:
        check_writable(out)
    check_encoding(config)
    places = {key: placed(config[key], key) for key in ("ckpt", "compare") if config[key] is not None}
    _check_sides(config, places)
    suites = {name: suite(name) for name in names}
    _check_keys(config, suites)
    paths = _paths(out, config, suites)
    with ExitStack() as stack:
        for run in sorted({run for path in paths.values() if (run := run_around(path)) is not None}):
            fix = "out=FOLDER, or wait for its end"
            stack.enter_context(owned(run, "ckpt" if config["out"] is None else "out", fix=fix))
        return _run(config, suites, out, paths, places)


def _run(
    config: Mapping[str, Any],
    suites: Mapping[str, Any],
    out: Path | None,
    paths: Mapping[str, Path],
    places: Mapping[str, Place | str],
) -> int:
    """Score on every suite, and against another encoder where one is named; returns 0."""
    folder = config["data_dir"]
    # What is missing must not show after hours.
    settings = {name: _settings(config, one.folder(folder), one.keys) for name, one in suites.items()}
    data = {}
    for name, one in suites.items():
        with _hub_named(one):
            data[name] = one.local(settings[name])
    pairs = None
    if config["compare"] is not None and folder is not None:
        pairs = _comparison(config)[0].load(_comparison(config)[1])

    loaded = load_encoder(places["ckpt"], config["max_length"], config.get("pooling"), config["dim"])
    if config["cross_attention"] is not None:
        loaded = _crossed(loaded, config["cross_attention"])
    _check_fits(loaded, suites)
    encoder = Configured.of(loaded, config)
    other = None
    if config["compare"] is not None:  # loaded now: a wrong name must not show after hours
        other = Configured.of(_compared(places["compare"], config), config)
    for i, (name, one) in enumerate(suites.items(), start=1):
        if len(suites) > 1:
            print(f"embedlab: suite {name} ({i} of {len(suites)})", file=sys.stderr)
        _score(one, encoder, settings[name], data.pop(name), paths[name], str(config["ckpt"]))
    if other is not None:
        _compare(encoder, other, pairs, config, out)
    return 0


def _check_fits(encoder: Any, suites: Mapping[str, Suite]) -> None:
    """Raises UserError where a suite cannot score this encoder, before any other does."""
    towers = encoder.towers
    for name, one in suites.items():
        why = one.fits(towers[0].backbone.info, len(towers))
        if why is not None:
            raise UserError(
                f"{name} is not for this encoder: {why}", key="suite", value=name, fix=f"leave {name} out"
            )


def _score(one: Any, encoder: Any, settings: Mapping[str, Any], data: Any, path: Path, name: str) -> None:
    """Score the encoder on one suite; write and print the scores."""
    from embedlab.cli.meter import told

    kept = path.with_suffix(".unfinished")
    with _hub_named(one), told(encoder, f"scoring {one.name}") as telling:
        given = {**settings, "device": str(encoder.encoder.device), "kept": kept}
        scores, protocol = one.run(telling, given, data)
    _put(path, scores, protocol, one.tables(name, scores, protocol))
    kept.unlink(missing_ok=True)


def _put(path: Path, scores: Mapping[str, float], protocol: Mapping[str, Any], tables: Sequence[Any]) -> None:
    """Write the scores, and print their tables and warnings."""
    write_scores(path, scores, protocol)
    for table in tables:
        table.print()
    for warning in protocol["warnings"]:
        print(f"embedlab: warning: {printable(warning)}", file=sys.stderr)
    print(f"Scores: {path}")


def _crossed(encoder: Any, layers: Any) -> Any:
    """A twin with its towers' attention exchanged in `layers` layers."""
    from embedlab.encoders.cross_attention import CrossedTwin
    from embedlab.encoders.twin import TwinEncoder

    what: dict[str, Any] = {"key": "cross_attention", "value": layers}
    if not isinstance(encoder, TwinEncoder):
        raise UserError("this encoder has one tower", **what, fix="leave it out, or the checkpoint of a twin")
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise UserError("not a number of layers", **what, fix="a whole number that divides the depth")
    return CrossedTwin(encoder, layers)


def _check_sides(config: Mapping[str, Any], places: Mapping[str, Place | str]) -> None:
    """UserError for an encoder beside itself; a twin with cross-attention is another one than the twin."""
    if "compare" not in places or config["cross_attention"] is not None:
        return
    one, other = (
        place.path.resolve() if isinstance(place, Place) else place
        for place in (places["ckpt"], places["compare"])
    )
    if one == other:
        raise UserError(
            "this is the encoder that ckpt names", key="compare", value=config["compare"],
            fix="another encoder, or leave compare out",
        )  # fmt: skip


def _compared(place: Place | str, config: Mapping[str, Any]) -> Any:
    """The encoder that ``compare`` names. A reading that is asked for is for both, the rest is each one's own."""
    try:
        return load_encoder(place, config["max_length"], config.get("pooling"), config["dim"])
    except UserError as error:
        error.file = error.file or str(config["compare"])
        error.key = "compare" if error.key == "ckpt" else error.key
        raise


def _comparison(config: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The comparison that ``compare`` asks for, and its settings."""
    from embedlab.evaluation.sts.compare import Comparison

    sts = suite("sts")
    return Comparison(), _settings(config, sts.folder(config["data_dir"]), (*sts.keys, *Comparison.keys))


def _compare(encoder: Any, other: Any, pairs: Any, config: Mapping[str, Any], out: Path | None) -> None:
    """The encoder against the `other` that ``compare`` names, on the same STS pairs."""
    from embedlab.cli.meter import told

    comparison, settings = _comparison(config)
    print(
        f"embedlab: comparing with {printable(str(config['compare']))}, on resampled pairs", file=sys.stderr
    )
    pairs = comparison.load(settings) if pairs is None else pairs
    with told(other, "comparing") as theirs, told(encoder, "comparing") as ours:
        changes, protocol = comparison.score(theirs, ours, pairs, settings)
    path = _compared_path(out, config)
    names = (str(config["ckpt"]), str(config["compare"]))
    _put(path, changes, protocol, [comparison.table(names, changes, protocol["notes"][0])])


def _compared_path(out: Path | None, config: Mapping[str, Any]) -> Path:
    """The file of a comparison; by the other encoder's name in it, it replaces no scores and no other comparison."""
    name = "compare-" + re.sub(r"[^\w.-]+", "-", str(config["compare"])).strip("-")[-100:]
    path = _path(out, str(config["ckpt"]), name, _reading(config))
    return path.with_name(f"{path.stem}-{name}.json") if path == out else path


def _check_keys(config: Mapping[str, Any], suites: Mapping[str, Any]) -> None:
    """See that somebody reads what is given: keys beside those of the configuration, and those that choose."""
    from embedlab.evaluation.sts.compare import Comparison

    for name, one in suites.items():
        if config["limit"] is not None and "limit" not in one.keys:
            raise UserError(
                f"suite {name} is scored whole", key="limit", value=config["limit"], fix="leave limit out"
            )
    for key in _TO_CHOOSE:
        if config[key] is not None and not any(key in one.keys for one in suites.values()):
            raise UserError(
                f"suite {', '.join(suites)} has no {key} to choose from", key=key, value=config[key],
                fix=f"leave {key} out",
            )  # fmt: skip
    if config["cross_attention"] is not None and config["out"] is None:
        raise UserError(
            "these scores would replace those of the twin as it is", key="cross_attention",
            value=config["cross_attention"], fix="out=FILE.json, or out=FOLDER for several suites",
        )  # fmt: skip
    also = Comparison.keys if config["compare"] is not None else ()
    check_keys(list(suites.values()), config, (*_OWN_KEYS, *_SHARED, *also))


def _hub_named(one: Suite) -> AbstractContextManager[None]:
    return keys_named({}, "leave data_dir out to use the hub" if one.hub else None)


def _variant(config: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Prompts and store for the name of a score file, of a suite that reads them."""
    given = [config.get(key) for key in ("query_prompt", "corpus_prompt", "store") if key in keys]
    return re.sub(r"[^\w.-]+", "_", "".join(f"-{prompt.strip()}" for prompt in map(str, filter(None, given))))


def _as_list(argument: str) -> str:
    # Hydra reads a comma outside brackets as a sweep.
    match = _LIST.fullmatch(argument)
    return f"{match[1]}=[{match[2]}]" if match else argument


def _names(suite: Any) -> list[str]:
    names = list(suite) if isinstance(suite, list) else [] if suite is None else [suite]
    if not names:
        raise UserError("no suite is named", key="suite", value=suite, fix="suite=sts")
    return list(dict.fromkeys(map(str, names)))


def _settings(config: Mapping[str, Any], folder: str | None, keys: Sequence[str]) -> dict[str, Any]:
    """What a suite gets: its own keys, data_dir being its folder."""
    settings = {key: value for key, value in config.items() if key in (*keys, *SHARED_KEYS)}
    if isinstance(settings.get("tasks"), str):
        settings["tasks"] = [settings["tasks"]]
    return settings | {"data_dir": folder}


def _paths(out: Path | None, config: Mapping[str, Any], suites: Mapping[str, Any]) -> dict[str, Path]:
    """The file of each suite's scores, which can be written; what stands under a name that was given is kept."""
    reading = _reading(config)
    paths = {}
    for name, one in suites.items():
        path = _path(out, str(config["ckpt"]), name, reading + _variant(config, one.keys))
        if path.is_dir():
            raise UserError("is a folder", file=path, key="out", fix="name a file that ends in .json")
        check_writable(path)
        paths[name] = path
    given = list(paths.values()) if out is not None else []
    given += [_compared_path(out, config)] if out is not None and config["compare"] is not None else []
    given += [Path(str(config[key])) for one in suites.values() for key in one.pictures if config.get(key)]
    for path in given:
        check_absent(path, config["overwrite"])
    return paths


def _out(out: Any, suites: Sequence[str]) -> Path | None:
    if out is None:
        return None
    path = Path(str(out))
    if path.suffix == ".json" and len(suites) > 1:
        raise UserError(f"one file for {len(suites)} suites", key="out", value=out, fix="out=FOLDER")
    if path.suffix != ".json" and path.is_file():
        fix = "out=FOLDER, or a file's name that ends in .json"
        raise UserError("is a file", key="out", value=out, fix=fix)
    return path


def _reading(config: Mapping[str, Any]) -> str:
    """What tells these scores from those of the checkpoint as it is, for the name of their file."""
    pooling, length = config.get("pooling"), config["max_length"]
    parts = [pooling]
    dim = f"dim{config['dim']}" if config["dim"] is not None else None
    if isinstance(pooling, Mapping):
        parts = [pooling["name"], *(f"{k}{v}" for k, v in pooling.items() if k != "name" and v is not None)]
    return re.sub(r"[^\w.-]+", "_", "".join(f"-{part}" for part in (*parts, length, dim) if part is not None))


def _path(out: Path | None, ckpt: str, suite: str, reading: str = "") -> Path:
    """Where the scores of `suite` go: `out`, else scores/ beside the checkpoint, else the working folder.

    Not beside what is shipped with the package or lies in the hub's cache, nor in a folder that is read-only.
    """
    if out is not None:
        return out if out.suffix == ".json" else out / f"{suite}.json"
    suite += reading
    place = Path(ckpt)
    if place.exists() and not is_shipped(place):
        folder = place if place.is_dir() else place.parent
        scores = folder / "scores"
        if os.access(scores if scores.is_dir() else folder, os.W_OK):
            return scores / f"{suite}.json"
    name = re.sub(r"[^\w.-]+", "-", place.name if place.exists() else ckpt).strip("-") or "encoder"
    return Path(f"scores-{name}-{suite}.json")
