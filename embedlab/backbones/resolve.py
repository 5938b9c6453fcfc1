"""Where a backbone's files are, and what its configuration says; no weights are read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from embedlab import console
from embedlab.backbones.architecture import (
    check_config,
    check_sizes,
    describe,
    effective_dropout,
    kind_of,
    look_both_ways,
    set_dropout,
)
from embedlab.backbones.hub import TEXT, snapshot
from embedlab.backbones.weight_files import PACKED, corruption, packed
from embedlab.config.backbone import BackboneConfig, BackboneInfo, known
from embedlab.config.read import read_values
from embedlab.errors import UserError, nearest, one_line
from embedlab.files import assets_dir, like, shipped_encoders

if TYPE_CHECKING:
    from transformers import PretrainedConfig


MOST_BYTES = 1 << 28
"""Of a tokenizer's file; the largest that are known have 40 MB."""


class Source(NamedTuple):
    """A folder, the GGUF file in it, and the commit that it is on a hub."""

    location: str
    gguf: str | None = None
    commit: str | None = None


def resolve(config: BackboneConfig, weights: bool = True) -> Source:
    """Find a backbone that is not ``fresh``; one on the hub is downloaded, without its weights if they are not needed.

    Raises:
        UserError: it is not there.
    """
    if config.source == "shipped":
        folder = assets_dir() / config.name
        if not (folder / "config.json").is_file():
            near = nearest(config.name, shipped_encoders())
            names = " or ".join(shipped_encoders()) or "reinstall the package"
            fix = f"did you mean {near[0]}?" if near else f"{names}; or backbone=local backbone.path=DIR"
            problem = f"this installation ships no encoder {config.name}"
            raise UserError(problem, key="backbone.name", value=config.name, fix=fix)
        return Source(str(folder))
    if config.source == "hub":
        code = config.trust_remote_code
        folder = snapshot(config.name, config.revision, key=config.key, weights=weights, code=code)
        return Source(str(_model_folder(folder, config)), commit=folder.name)
    path = Path(str(config.path)).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return Source(str(path.parent), path.name)
    if not path.exists():
        raise UserError(
            "no such folder",
            file=path,
            key="backbone.path",
            value=config.path,
            fix=_meant(str(config.path)),
        )
    if not path.is_dir():
        raise UserError(
            "is neither a folder nor a GGUF file",
            file=path,
            key="backbone.path",
            value=config.path,
            fix="a Hugging Face folder, or a .gguf file",
        )
    return Source(str(_model_folder(path, config)))


def _meant(given: str) -> str:
    """The fix where no folder is at ``backbone.path``: an encoder in the box goes by ``backbone.name``."""
    if given in shipped_encoders():
        return f"backbone=mini backbone.name={given}, which is in the box"
    return like(Path(given).expanduser(), only=_may_be_model) or "the path of a model folder"


def _may_be_model(path: Path) -> bool:
    return path.is_dir() or path.suffix == ".gguf"


def _model_folder(path: Path, config: BackboneConfig) -> Path:
    """The folder, if it holds a model by itself."""
    if (path / "adapter_config.json").is_file():
        problem = "holds an adapter, whose base model is elsewhere"
        fix = "merge it into its base (peft: merge_and_unload), and give that folder"
    elif not (path / "config.json").is_file():
        problem = "has no config.json, so it is no Hugging Face folder"
        fix = "the folder that save_pretrained wrote"
        if (path / "export" / "config.json").is_file():
            problem, fix = "the folder of a run, not of a model", f"{config.key}={path / 'export'}"
    else:
        _check_files(path)
        return path
    raise UserError(problem, file=path, key=config.key, value=config.label, fix=fix)


def _check_files(folder: Path) -> None:
    """Refuse what would be read whole and is larger than any tokenizer's file, and weights that are larger inside."""
    for file in folder.iterdir():
        if file.suffix == ".bin" and packed(file):
            raise UserError(PACKED, file=file, fix="another copy of the model")
        if file.suffix in TEXT and file.is_file() and file.stat().st_size > MOST_BYTES:
            raise UserError(
                f"is larger than {MOST_BYTES >> 20} MiB", file=file, fix="another copy of the model"
            )


def donor_config(name: str) -> BackboneConfig:
    """Where ``backbone.fresh.init_from`` points: a folder, or a shipped encoder.

    Raises:
        UserError: neither is there.
    """
    if (Path(name).expanduser() / "config.json").is_file():
        return BackboneConfig(source="local", name=name, path=name, new_head=True)
    if (assets_dir() / name / "config.json").is_file():
        return BackboneConfig(source="shipped", name=name, new_head=True)
    raise UserError(
        "no such model folder or shipped encoder",
        key="backbone.fresh.init_from",
        value=name,
        fix="mini, the path of a model folder, or null for random weights",
    )


def pretrained_options(config: BackboneConfig, source: Source) -> dict[str, Any]:
    """Arguments that every `from_pretrained` of a backbone takes."""
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if source.gguf is not None:
        options["gguf_file"] = source.gguf
    return options


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without its progress bars and load reports, and what it imports without its hints: what matters in
    them is checked here."""
    from transformers.utils import logging as theirs

    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity(logging.CRITICAL)
    theirs.disable_progress_bar()
    try:
        with console.quiet(console.KERNEL_HINTS):
            yield
    finally:
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()


@contextmanager
def reading(config: BackboneConfig) -> Iterator[None]:
    """Turns what transformers raises about a backbone's files into one clear line."""
    try:
        with quiet():
            yield
    except (UserError, KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:
        _explain(config, error)


@contextmanager
def naming(config: BackboneConfig) -> Iterator[None]:
    """Puts the file and the key into an error about a backbone that names neither."""
    try:
        yield
    except UserError as error:
        if error.key is not None:
            raise
        file = error.file or (None if config.source == "hub" else config.path or config.name)
        key, value = config.key, config.label
        raise UserError(
            error.message, file=file, row=error.row, key=key, value=value, fix=error.fix
        ) from None


def _explain(config: BackboneConfig, error: Exception) -> NoReturn:
    text = one_line(str(error))
    where: dict[str, Any] = {"key": config.key, "value": config.label}
    if "trust_remote_code" in text:
        raise UserError(
            "the checkpoint brings its own code, which is not run unasked",
            **where,
            fix="backbone.trust_remote_code=true, if you trust it",
        ) from error
    if isinstance(error, ImportError):
        fix = "pip install 'embedlab[gguf]'" if "gguf" in text.lower() else "install what it names"
        raise UserError(f"a package is missing: {text}", **where, fix=fix) from error
    file = None if config.source == "hub" else config.path or config.name
    raise UserError(
        f"the model's files cannot be read: {corruption(error) or f'{type(error).__name__}: {text[:300]}'}",
        file=file,
        **where,
        fix="another copy of the model",
    ) from error


def read_config(config: BackboneConfig, source: Source) -> PretrainedConfig:
    """The Hugging Face configuration, with `config.dropout` put into it.

    Raises:
        UserError: no such model, or one that this project has no use for.
    """
    from transformers import AutoConfig

    with reading(config), naming(config):
        if source.gguf is None:
            file = Path(source.location, "config.json")
            values = read_values(file, "another copy of the model")
            check_sizes(values)
            if isinstance(values, dict) and values.get("quantization_config"):
                fix = "the model that it was made of, with adapter=qlora to quantise it here"
                raise UserError(
                    "its weights are stored quantised, and read as they are nowhere here", fix=fix
                )
        found = AutoConfig.from_pretrained(source.location, **pretrained_options(config, source))
        check_config(found)
    if not config.trust_remote_code:  # it would be saved with the weights, for others to run
        vars(found).pop("auto_map", None)
    if config.bidirectional:
        look_both_ways(found, config.attention)
    return set_dropout(found, config.dropout)


def probe(config: BackboneConfig) -> BackboneInfo:
    """Facts of a backbone from its configuration and tokenizer files; no weights.

    The published checkpoints that `conf/backbone` names are known without a hub.

    Raises:
        UserError: a wrong name or path, in one line.
    """
    if config.source == "fresh":
        from embedlab.backbones.scratch import FreshConfig, fresh_config

        fresh = FreshConfig.from_dict(config.fresh or {})
        found = set_dropout(fresh_config(fresh), config.dropout)
        if config.bidirectional:
            look_both_ways(found, config.attention)
        if fresh.init_from is not None:  # said before the run's text is tokenised
            from embedlab.backbones.warm_start import check_donor

            donor = donor_config(fresh.init_from)
            check_donor(found, read_config(donor, resolve(donor)), fresh.init_from)
        info = describe(found, kind_of(found) == "encoder")
        return BackboneInfo(**{**vars(info), "has_mlm_head": info.kind == "encoder"})
    if config.source == "hub" and config.revision is None and (facts := known(config.name)) is not None:
        if config.dropout is None and not config.bidirectional:
            return facts
        from transformers import AutoConfig

        found = AutoConfig.for_model(facts.model_type)
        if config.bidirectional:
            look_both_ways(found, config.attention)
            facts = replace(facts, kind="encoder")
        if config.dropout is None:
            return facts
        return replace(facts, dropout=effective_dropout(set_dropout(found, config.dropout)))
    source = resolve(config, weights=False)
    found = read_config(config, source)
    return describe(found, has_mask_token(config, source))


def has_mask_token(config: BackboneConfig, source: Source) -> bool:
    """Whether the tokenizer has a mask token; its small files are asked first."""
    if source.gguf is None:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            file = Path(source.location, name)
            if file.is_file():
                with reading(config):
                    if read_values(file, "another copy of the model", any_value=True).get("mask_token"):
                        return True
    return read_tokenizer(config, source).mask_token is not None


def read_tokenizer(config: BackboneConfig, source: Source) -> Any:
    """The Hugging Face tokenizer as it is stored.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    with reading(config):
        tokenizer = AutoTokenizer.from_pretrained(source.location, **pretrained_options(config, source))
        empty = len(tokenizer) <= len(set(tokenizer.all_special_ids))
    if empty:
        # transformers makes up an empty vocabulary where the files are missing.
        raise UserError(
            "there is no tokenizer with the model",
            key=config.key,
            value=config.label,
            fix="add its files (tokenizer.json, tokenizer_config.json) to the folder",
        )
    if not config.trust_remote_code:
        tokenizer.init_kwargs.pop("auto_map", None)
    return tokenizer
