"""``embedlab export ckpt=… to=… out=DIR``: an encoder in another format, kept only if its vectors agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedlab.cli.compose import compose
from embedlab.cli.encoders import load_encoder, named, placed
from embedlab.encoders.place import Place
from embedlab.errors import UserError, one_of
from embedlab.files import check_replaceable, check_writable, size_of, whole_folder
from embedlab.locks import sole_writer

if TYPE_CHECKING:
    from embedlab.encoders.base import Encoder

# What overwrite=true may replace: a folder with one of these.
_EXPORTED = ("embedlab.json", "modules.json", "config.json", "model.onnx")
PRECISIONS = ("float32", "int8")
_LEAST_COSINE = 0.95
Encode = Callable[[Sequence[str]], Any]


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0.

    Raises RuntimeError (exit status 1) when the exported encoder gives other vectors; nothing is kept then.
    """
    config = compose("export", argv)
    target, out = str(config["to"]), Path(str(config["out"]))
    if config["out"] in (None, ""):
        raise UserError("no folder is named", key="out", value=config["out"], fix="out=FOLDER")
    if target not in FORMATS:
        raise UserError("no such format", key="to", value=target, fix=one_of(target, FORMATS))
    precision = str(config["precision"])
    if precision not in PRECISIONS or (precision == "int8" and target != "onnx"):
        fix = "float32; or to=onnx precision=int8"
        raise UserError(f"no such precision of to={target}", key="precision", value=precision, fix=fix)
    if config["push_revision"] is not None and not config["push"]:
        key, value = "push_revision", config["push_revision"]
        raise UserError("nothing is pushed", key=key, value=value, fix="push=ORG/NAME too")
    check_replaceable(out, _EXPORTED, "an encoder", config["overwrite"])
    check_writable(out)
    place = placed(named(config["ckpt"]))
    with sole_writer(out, "out"):
        _export(config, place, target, out, precision)
    return 0


def _export(config: dict[str, Any], place: Place | str, target: str, out: Path, precision: str) -> None:
    encoder = load_encoder(place, dim=config["dim"])

    from embedlab.backbones.hub import push
    from embedlab.export.card import model_card, model_name

    pushed = str(config["push"] or "").rpartition("/")[2]
    name = pushed or model_name(encoder) or Path(str(config["ckpt"])).name or out.name

    def card(made: Path) -> str:
        return model_card(encoder, name, config["licence"], made)

    plain = encoder.merged()
    told = export(plain, target, out, bool(config["normalize"]), card, precision, config["overwrite"])
    held = sorted({str(weight.dtype).removeprefix("torch.") for weight in plain.parameters()})
    kind = "int8" if precision == "int8" else f"{', '.join(held)}; smaller: to=onnx precision=int8"
    print(f"{target}: {out} (32 sentences, {told}), {size_of(out) / 1e6:,.1f} MB in {kind}")
    if config["push"]:
        name, revision = str(config["push"]), config["push_revision"]
        commit = push(out, name, None if revision is None else str(revision))
        print(f"pushed to {name}, commit {commit}")


def export(
    encoder: Encoder,
    target: str,
    out: Path,
    normalize: bool = True,
    card: Callable[[Path], str] | None = None,
    precision: str = "float32",
    replace: bool = True,
) -> str:
    """Writes `encoder` as `target` to the folder `out` (replaced if it exists, and may be), whole or not at all.

    Returns what a round trip on 32 sentences found; raises RuntimeError, and writes nothing, when the difference is
    beyond the format's tolerance, or with ``precision="int8"`` a cosine below `_LEAST_COSINE`.
    """
    write, tolerance = FORMATS[target]
    encoder = encoder.merged()
    with whole_folder(out.absolute(), replace) as made:
        encode = write(encoder, made, normalize)
        if precision == "int8":
            from embedlab.export.onnx import load_onnx, quantize_onnx

            quantize_onnx(made)
            told = _check_cosine(encoder, load_onnx(made), out)
        else:
            told = _check_difference(encoder, encode, out, tolerance, normalize and target == "onnx")
        if card is not None:
            (made / "README.md").write_text(card(made), encoding="utf-8")
    return told


def _check_difference(encoder: Encoder, encode: Encode, out: Path, tolerance: float, normalize: bool) -> str:
    from embedlab.export.roundtrip import SENTENCES, largest_difference

    difference = largest_difference(encoder, encode, normalize=normalize)
    if not difference <= tolerance:
        raise RuntimeError(
            f"the exported encoder gives other vectors: they differ by up to {difference:.1e} "
            f"(at most {tolerance:.0e}) on {len(SENTENCES)} sentences, so {out} was not written"
        )
    return f"largest difference {difference:.1e}"


def _check_cosine(encoder: Encoder, encode: Encode, out: Path) -> str:
    from embedlab.export.roundtrip import SENTENCES, least_cosine

    cosine = least_cosine(encoder, encode)
    if not cosine >= _LEAST_COSINE:
        raise RuntimeError(
            f"the int8 encoder gives other vectors: their least cosine is {cosine:.3f} (at least {_LEAST_COSINE}) "
            f"on {len(SENTENCES)} sentences, so {out} was not written"
        )
    return f"least cosine {cosine:.4f}"


def _sentence_transformers(encoder: Encoder, folder: Path, normalize: bool) -> Encode:
    from sentence_transformers import SentenceTransformer

    from embedlab.backbones.resolve import quiet

    encoder.to_sentence_transformers(folder)
    with quiet():  # a table of the pooler weights that a BERT without pooler does not have, and a bar
        model = SentenceTransformer(str(folder), device="cpu", trust_remote_code=_is_own(folder))
    return lambda texts: model.encode(list(texts), convert_to_numpy=True, show_progress_bar=False)


def _is_own(folder: Path) -> bool:
    """Whether what a folder of sentence-transformers names is this package's module and nothing else."""
    from embedlab.config.read import read_values
    from embedlab.encoders.sentence_transformers import CUSTOM

    modules = read_values(folder / "modules.json")
    return [module["type"] for module in modules] == [CUSTOM]


def _hugging_face(encoder: Encoder, folder: Path, normalize: bool) -> Encode:
    import embedlab

    encoder.save(folder)
    loaded = embedlab.load(str(folder))
    return lambda texts: loaded.encode(list(texts))


def _onnx(encoder: Encoder, folder: Path, normalize: bool) -> Encode:
    from embedlab.export.onnx import export_onnx, load_onnx

    export_onnx(encoder, folder, normalize)
    return load_onnx(folder)


FORMATS: dict[str, tuple[Callable[[Encoder, Path, bool], Encode], float]] = {
    "sentence-transformers": (_sentence_transformers, 1e-5),
    "hf": (_hugging_face, 1e-5),
    "onnx": (_onnx, 1e-4),
}
"""Format -> (writes a folder and gives the reloaded encoder, largest allowed difference)."""
