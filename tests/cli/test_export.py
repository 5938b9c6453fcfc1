"""`embedlab export`: the exported encoder gives the same vectors, or there is no export."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import embedlab
from embedlab.cli import export as command
from embedlab.cli.main import main
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.export.roundtrip import SENTENCES, largest_difference
from tests.test_files import safetensors_meets_it


@pytest.fixture(scope="module")
def ckpt(tiny: Callable[..., Path]) -> Path:
    return tiny("bert")


def test_the_sentences_are_32_and_distinct() -> None:
    assert len(SENTENCES) == len(set(SENTENCES)) == 32


def test_sentence_transformers_folder_agrees(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    st = pytest.importorskip(
        "sentence_transformers", reason="sentence-transformers (extra st) is not installed"
    )
    out = tmp_path / "deep" / "st"
    assert main(["export", f"ckpt={ckpt}", "to=sentence-transformers", f"out={out}"]) == 0
    assert "largest difference" in capsys.readouterr().out
    ours = embedlab.load(str(ckpt)).encode(list(SENTENCES))
    theirs = st.SentenceTransformer(str(out), device="cpu").encode(list(SENTENCES))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert [p.name for p in out.parent.iterdir()] == ["st"]


def test_hugging_face_folder_loads_without_embedlab(ckpt: Path, tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    out = tmp_path / "hf"
    assert main(["export", f"ckpt={ckpt}", "to=hf", f"out={out}"]) == 0
    batch = AutoTokenizer.from_pretrained(out)(["a plane takes off"], return_tensors="pt")
    hidden = AutoModel.from_pretrained(out).eval()(**batch).last_hidden_state
    ours = embedlab.load(str(out)).encode("a plane takes off")
    np.testing.assert_allclose(hidden.mean(1)[0].detach().numpy(), ours, atol=1e-5)


def test_a_full_disk_is_one_line_and_leaves_nothing(ckpt, tmp_path, monkeypatch, capsys):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(SentenceEncoder, "save", lambda *_, **__: safetensors_meets_it())
    assert main(["export", f"ckpt={ckpt}", "to=hf", f"out={tmp_path / 'hf'}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "model_type",
    ["bert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("roberta", "opt", "llama"))],
)
def test_onnx_graph_pools_and_normalises(tiny: Callable[..., Path], tmp_path: Path, model_type: str) -> None:
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} (extra onnx) is not installed")
    from embedlab.export.onnx import load_onnx

    out, folder = tmp_path / "onnx", tiny(model_type, layers=1)
    assert main(["export", f"ckpt={folder}", "to=onnx", f"out={out}"]) == 0
    assert load_onnx(out)([]).shape == (0, embedlab.load(str(folder)).dim)
    vectors = load_onnx(out, batch_size=5)(SENTENCES)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    ours = embedlab.load(str(folder)).encode(list(SENTENCES), normalize=True)
    assert np.abs(vectors - ours).max() < 1e-4


def test_a_graphs_tokenizer_cuts_where_the_encoder_does(ckpt: Path, tmp_path: Path) -> None:
    """By the tokenizer and onnxruntime alone, with nothing of this package."""
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} (extra onnx) is not installed")
    import onnxruntime
    from transformers import AutoTokenizer

    encoder = embedlab.load(ckpt)
    encoder.tokenization = Tokenization(encoder.tokenizer, max_length=9)
    encoder.save(tmp_path / "short")
    assert main(["export", f"ckpt={tmp_path / 'short'}", "to=onnx", f"out={tmp_path / 'onnx'}"]) == 0
    texts = [SENTENCES[0], " ".join(SENTENCES)]
    rows = AutoTokenizer.from_pretrained(tmp_path / "onnx")(
        texts, truncation=True, padding=True, return_tensors="np"
    )
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    inputs = {name: rows[name].astype(np.int64) for name in ("input_ids", "attention_mask")}
    np.testing.assert_allclose(session.run(None, inputs)[0], encoder.encode(texts, normalize=True), atol=1e-5)
    assert encoder.tokenization.model_limit == 64, "the encoder that is exported stays as it is"


def test_int8_keeps_the_direction_of_every_vector(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} (extra onnx) is not installed")
    import onnx

    from embedlab.export.onnx import load_onnx

    out = tmp_path / "onnx"
    assert main(["export", f"ckpt={ckpt}", "to=onnx", "precision=int8", f"out={out}", "dim=24"]) == 0
    told = float(capsys.readouterr().out.partition("least cosine ")[2].partition(")")[0])
    vectors = load_onnx(out)(SENTENCES)
    ours = embedlab.load(str(ckpt)).encode(list(SENTENCES), normalize=True, dim=24)
    least = float((vectors * ours).sum(1).min())
    assert least == pytest.approx(told, abs=1e-4)
    assert 0.95 < least < 0.999999  # of fp32 weights it would be 1
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert "MatMulInteger" in {node.op_type for node in onnx.load(out / "model.onnx").graph.node}
    assert "batch_size=1" in (out / "README.md").read_text()
    alone = load_onnx(out, batch_size=1)
    np.testing.assert_array_equal(alone(SENTENCES[::-1]), alone(SENTENCES)[::-1])


def test_int8_that_turns_a_vector_is_loud_and_leaves_nothing(
    ckpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx = pytest.importorskip("embedlab.export.onnx")
    monkeypatch.setattr(onnx, "quantize_onnx", lambda folder: None)
    monkeypatch.setattr(onnx, "export_onnx", lambda encoder, folder, normalize: None)

    def turned(folder: Path):  # type: ignore[no-untyped-def]
        ours = embedlab.load(str(ckpt)).encode(list(SENTENCES))
        ours[5, :4] *= -9
        return lambda texts: ours

    monkeypatch.setattr(onnx, "load_onnx", turned)
    with pytest.raises(RuntimeError, match=r"least cosine is .* \(at least 0.95\)"):
        main(["export", f"ckpt={ckpt}", "to=onnx", "precision=int8", f"out={tmp_path / 'out'}"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["sentence-transformers", "hf"])
def test_a_differing_export_is_loud_and_leaves_nothing(
    ckpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    write, tolerance = command.FORMATS[target]

    def wrong(*arguments):  # type: ignore[no-untyped-def]
        encode = write(*arguments)
        return lambda texts: np.asarray(encode(texts)) + np.eye(len(texts), 32) * 0.01

    monkeypatch.setitem(command.FORMATS, target, (wrong, tolerance))
    out = tmp_path / "out"
    with pytest.raises(RuntimeError, match="gives other vectors"):
        main(["export", f"ckpt={ckpt}", f"to={target}", f"out={out}"])
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    (out / "config.json").write_text("x")
    with pytest.raises(RuntimeError, match="gives other vectors"):
        main(["export", f"ckpt={ckpt}", f"to={target}", f"out={out}", "overwrite=true"])
    assert [p.name for p in out.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [(["to=hf"], "float32; smaller: to=onnx precision=int8"), (["to=onnx", "precision=int8"], "int8")],
)
def test_size_and_kind_of_numbers_are_said(
    arguments: list[str], kind: str, ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "to=onnx" in arguments:
        pytest.importorskip("onnxruntime", reason="onnxruntime (extra onnx) is not installed")
        pytest.importorskip("onnxscript", reason="onnxscript (extra onnx) is not installed")
    assert main(["export", f"ckpt={ckpt}", f"out={tmp_path / 'out'}", *arguments]) == 0
    written = sum(p.stat().st_size for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert capsys.readouterr().out.strip().endswith(f", {written / 1e6:,.1f} MB in {kind}")


def test_nan_and_wrong_shapes_never_pass(ckpt: Path) -> None:
    encoder = embedlab.load(str(ckpt))
    vectors = np.asarray(encoder.encode(list(SENTENCES)))
    assert largest_difference(encoder, lambda texts: vectors) < 1e-6
    assert largest_difference(encoder, lambda texts: vectors[:, :-1]) == float("inf")
    assert largest_difference(encoder, lambda texts: np.full_like(vectors, np.nan)) == float("inf")
    assert largest_difference(encoder, lambda texts: vectors[::-1]) > 1e-3


def test_existing_folders(ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("x")
    arguments = ["export", f"ckpt={ckpt}", "to=hf", f"out={out}"]
    for more in ([], ["overwrite=true"]):
        assert main([*arguments, *more]) == 2
        assert "other things" in capsys.readouterr().err
    (out / "config.json").write_text("x")
    assert main(arguments) == 2
    assert "holds an encoder already (overwrite=false)" in capsys.readouterr().err
    assert main([*arguments, "overwrite=true"]) == 0
    assert not (out / "old").exists()
    assert (out / "embedlab.json").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["to=tensorflow"], "to=tensorflow"),
        (["to=hf", "ckpt=/nowhere"], "/nowhere"),
        (["to=hf", "precision=int8"], "no such precision of to=hf (precision=int8)"),
        (["to=onnx", "precision=fp4"], "precision=fp4"),
        (["to=hf", "dim=33"], "exceeds width 32 (dim=33)"),
        (["to=hf", "out=FILE"], "is a file"),
        (["to=hf", "out=null"], "no folder is named"),
        (["to=hf", "out="], "no folder is named"),
        ([], "to"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    ckpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    file = tmp_path / "FILE"
    file.write_text("x")
    arguments = [a.replace("FILE", str(file)) for a in arguments]
    given = {a.split("=")[0] for a in arguments}
    rest = [a for a in (f"ckpt={ckpt}", f"out={tmp_path / 'o'}") if a.split("=")[0] not in given]
    assert main(["export", *rest, *arguments]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert [p.name for p in tmp_path.iterdir()] == ["FILE"]


def test_a_run_into_a_copy_is_independent_of_the_original(ckpt: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(ckpt, tmp_path / "source"))
    out = tmp_path / "hf"
    assert main(["export", f"ckpt={source}", "to=hf", f"out={out}"]) == 0
    expected = embedlab.load(str(source)).encode(["still here"])
    shutil.rmtree(source)
    np.testing.assert_allclose(embedlab.load(str(out)).encode(["still here"]), expected, atol=1e-6)
