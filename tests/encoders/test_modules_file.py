"""Folders of sentence-transformers give the vectors that sentence-transformers gives, or are refused by key."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedlab
from embedlab.config.template import Template
from embedlab.encoders.modules_file import FLAGS
from embedlab.encoders.usage import Usage
from embedlab.errors import UserError
from tests.encoders.test_encoder import build
from tests.model_zoo import tiny_model, tiny_words

Tiny = Callable[..., Path]
st = pytest.importorskip("sentence_transformers")
models = pytest.importorskip("sentence_transformers.models")

TEXTS = [
    "A Cat sat on the Mat",
    "dogs",
    "",
    "The QUICK brown fox jumps over the lazy dog. " * 4,
    "naïve café, 42 %",
]
MODES = list(FLAGS.values())


def write(folder: Path, modules: list[Any], **settings: Any) -> Path:
    """A folder that sentence-transformers wrote."""
    model = st.SentenceTransformer(modules=modules, device="cpu", **settings)
    model.save(str(folder), create_model_card=False)
    return folder


def agree(folder: Path, **arguments: Any) -> None:
    """The same vectors by both libraries; cosine to 1e-6 and values to 1e-5."""
    texts = [t for t in TEXTS if t]
    theirs = st.SentenceTransformer(str(folder), device="cpu").encode(texts, **arguments)
    ours = embedlab.load(folder).encode(texts, **arguments)
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    assert np.min((ours * theirs).sum(1) / lengths) > 1 - 1e-6


def transformer(tiny: Tiny, kind: str = "bert", **settings: Any) -> Any:
    return models.Transformer(str(tiny(kind)), **settings)


def edit(file: Path, **values: Any) -> None:
    """Keys of a JSON file."""
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | values))


@pytest.mark.parametrize(
    "modes", [*((m,) for m in MODES), ("cls", "mean"), ("max", "weightedmean", "lasttoken")]
)
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_pooling_modes(tiny: Tiny, tmp_path: Path, modes: tuple[str, ...], kind: str) -> None:
    body = transformer(tiny, kind)
    if body.tokenizer.pad_token is None:
        body.tokenizer.pad_token = body.tokenizer.eos_token
    agree(write(tmp_path / "st", [body, models.Pooling(32, list(modes))]))


def test_the_flags_of_older_versions(tiny: Tiny, tmp_path: Path) -> None:
    folder = write(tmp_path / "st", [transformer(tiny), models.Pooling(32, "cls")])
    for count in (1, 2):
        for chosen in itertools.combinations(FLAGS, count):
            flags = {flag: flag in chosen for flag in FLAGS}
            content = {"word_embedding_dimension": 32} | flags
            (folder / "1_Pooling" / "config.json").write_text(json.dumps(content))
            agree(folder)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("activation", "out"), [("Tanh", 32), ("Identity", 24), ("GELU", 8)])
def test_heads(tiny: Tiny, tmp_path: Path, activation: str, out: int, residual: bool) -> None:
    import torch

    dense = models.Dense(32, out, activation_function=getattr(torch.nn, activation)(), bias=out != 8)
    if residual:
        from sentence_transformers.base.modules.dense import Dense

        dense = Dense(32, out, activation_function=getattr(torch.nn, activation)(), use_residual=True)
    head = [models.Pooling(32, "mean"), dense, models.LayerNorm(out), models.Dropout(0.5), models.Normalize()]
    folder = write(tmp_path / "st", [transformer(tiny), *head])
    agree(folder)
    encoder = embedlab.load(folder)
    encoder.save(tmp_path / "saved")
    encoder.to_sentence_transformers(tmp_path / "exported")
    for again in (tmp_path / "saved", tmp_path / "exported"):
        np.testing.assert_array_equal(embedlab.load(again).encode(TEXTS), encoder.encode(TEXTS))
    theirs = st.SentenceTransformer(str(tmp_path / "exported"), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(theirs, encoder.encode(TEXTS), atol=1e-5)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_prompts_width_length_and_case(tiny: Tiny, tmp_path: Path, pooling: str) -> None:
    prompts = {"query": "find this: ", "document": "text: "}
    body = transformer(tiny, "roberta", max_seq_length=9)
    folder = write(
        tmp_path / "st", [body, models.Pooling(32, pooling)],
        prompts=prompts, default_prompt_name="document", truncate_dim=16, similarity_fn_name="dot",
    )  # fmt: skip
    edit(folder / "sentence_bert_config.json", do_lower_case=True)
    encoder = embedlab.load(folder)
    assert (encoder.dim, encoder.usage.similarity) == (16, "dot")
    theirs = st.SentenceTransformer(str(folder), device="cpu")
    for arguments in ({}, {"prompt_name": "query"}, {"prompt": ""}, {"prompt": "other: "}):
        agree(folder, **arguments)
    np.testing.assert_allclose(encoder.encode_query(TEXTS), theirs.encode_query(TEXTS), atol=1e-5)
    np.testing.assert_allclose(encoder.encode_document(TEXTS), theirs.encode_document(TEXTS), atol=1e-5)
    encoder.save(tmp_path / "saved")
    encoder.to_sentence_transformers(tmp_path / "exported")
    for again in (tmp_path / "saved", tmp_path / "exported"):
        other = embedlab.load(again)
        assert other.usage == encoder.usage
        assert other.fingerprint() == encoder.fingerprint()
        np.testing.assert_array_equal(other.encode_query(TEXTS), encoder.encode_query(TEXTS))
    agree(tmp_path / "exported", prompt_name="query")


@pytest.mark.parametrize("mode", [m for m in MODES if m != "weightedmean"])
def test_a_prompt_that_the_pooling_leaves_out(tiny: Tiny, tmp_path: Path, mode: str) -> None:
    pooling = models.Pooling(32, mode, include_prompt=False)
    folder = write(tmp_path / "st", [transformer(tiny), pooling], prompts={"query": "find this sentence: "})
    agree(folder, prompt_name="query")
    agree(folder)
    embedlab.load(folder).save(tmp_path / "saved")
    ours = embedlab.load(tmp_path / "saved").encode(TEXTS, prompt_name="query")
    np.testing.assert_array_equal(ours, embedlab.load(folder).encode(TEXTS, prompt_name="query"))


@pytest.mark.parametrize("side", ["left", "right"])
def test_where_a_long_text_is_cut(tiny: Tiny, tmp_path: Path, side: str) -> None:
    body = transformer(tiny, max_seq_length=8)
    body.tokenizer.truncation_side = side
    folder = write(tmp_path / "st", [body, models.Pooling(32, "mean")])
    agree(folder)
    embedlab.load(folder).save(tmp_path / "saved")
    np.testing.assert_array_equal(
        embedlab.load(tmp_path / "saved").encode(TEXTS), embedlab.load(folder).encode(TEXTS)
    )


@pytest.mark.parametrize(
    ("own", "asked", "argument"), [(16, 40, None), (40, 16, None), (40, 30, 12), (16, 16, 40)]
)
def test_the_limit_that_counts(
    tiny: Tiny, tmp_path: Path, own: int, asked: int, argument: int | None
) -> None:
    """The settings go before the tokenizer's own limit, and among them `processor_kwargs` before the older key."""
    folder = write(tmp_path / "st", [transformer(tiny), models.Pooling(32, "mean")])
    edit(folder / "tokenizer_config.json", model_max_length=own)
    more = {"processor_kwargs": {"model_max_length": argument}} if argument else {}
    edit(folder / "sentence_bert_config.json", max_seq_length=asked, **more)
    agree(folder)
    encoder = embedlab.load(folder)
    assert encoder.tokenization.row_limit == (argument or asked)
    encoder.save(tmp_path / "saved")
    np.testing.assert_array_equal(embedlab.load(tmp_path / "saved").encode(TEXTS), encoder.encode(TEXTS))


def test_a_limit_beyond_the_model(tiny: Tiny, tmp_path: Path) -> None:
    folder = write(tmp_path / "st", [transformer(tiny, max_seq_length=1000), models.Pooling(32, "mean")])
    assert embedlab.load(folder).tokenization.row_limit == 64


TEXT_BY_NAME = {"query": "ask: ", "document": "text: ", "passage": "pass: ", "a": "other: "}
PROMPTS = [
    ({name: given[name] for name in names}, default)
    for names in [
        (),
        ("query",),
        ("document",),
        ("a",),
        ("query", "document"),
        ("query", "passage"),
        ("a", "query"),
    ]
    for given in (
        TEXT_BY_NAME,
        dict.fromkeys(TEXT_BY_NAME, ""),
        {**TEXT_BY_NAME, "query": None, "document": ""},
    )
    for default in (None, *names)
]


def test_every_shape_of_prompts(tiny: Tiny, tmp_path: Path) -> None:
    """With and without a default, empty or null: by `encode`, by each name, for queries and for documents."""
    folder = write(tmp_path / "st", [transformer(tiny), models.Pooling(32, "mean")])
    for prompts, default in PROMPTS:
        edit(folder / "config_sentence_transformers.json", prompts=prompts, default_prompt_name=default)
        theirs, ours = st.SentenceTransformer(str(folder), device="cpu"), embedlab.load(folder)
        ours.to_sentence_transformers(tmp_path / "exported")
        written = json.loads((tmp_path / "exported" / "config_sentence_transformers.json").read_text())
        exported = copy.copy(theirs)
        exported.prompts = {"query": "", "document": ""} | written.get("prompts", {})
        exported.default_prompt_name = written.get("default_prompt_name")
        names = [{}, *({"prompt_name": n} for n in ours.usage.prompts)]
        for model in (ours, exported):
            for name in names:
                np.testing.assert_allclose(
                    model.encode(TEXTS[:1], **name),
                    theirs.encode(TEXTS[:1], **name),
                    atol=1e-5,
                    err_msg=f"{prompts} {name}",
                )
            for role in ("encode_query", "encode_document"):
                np.testing.assert_allclose(
                    getattr(model, role)(TEXTS[:1]),
                    getattr(theirs, role)(TEXTS[:1]),
                    atol=1e-5,
                    err_msg=f"{prompts} {role}",
                )


@pytest.mark.parametrize("kind", ["bert", "gpt2", "qwen2", "roberta", "xlm-roberta", "llama", "modernbert"])
def test_lower_case_stays(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    """Through `save` and both exports, though some of transformers' classes build their normalizer anew."""
    body = transformer(tiny, kind)
    if body.tokenizer.pad_token is None:
        body.tokenizer.pad_token = body.tokenizer.eos_token
    folder = write(tmp_path / "st", [body, models.Pooling(32, "mean")])
    edit(folder / "sentence_bert_config.json", do_lower_case=True)
    agree(folder)
    encoder = embedlab.load(folder)
    encoder.save(tmp_path / "saved")
    encoder.to_sentence_transformers(tmp_path / "exported")
    for again in (tmp_path / "saved", tmp_path / "exported"):
        np.testing.assert_array_equal(embedlab.load(again).encode(TEXTS), encoder.encode(TEXTS))
        assert embedlab.load(again).fingerprint() == encoder.fingerprint()
    agree(tmp_path / "exported")


@pytest.mark.parametrize("mode", ["mean", "cls", "max", "lasttoken", ("mean", "lasttoken")])
def test_a_prompt_longer_than_the_row(tiny: Tiny, tmp_path: Path, mode: str | tuple[str, ...]) -> None:
    body = transformer(tiny, max_seq_length=8)
    prompts = {"query": "a prompt of far more words than a row has tokens"}
    folder = write(tmp_path / "st", [body, models.Pooling(32, mode, include_prompt=False)], prompts=prompts)
    agree(folder, prompt_name="query")


def test_an_export_with_code_leaves_the_prompt_out_too(tiny: Tiny, tmp_path: Path) -> None:
    encoder = build(tiny("bert"), "mean", Template("This is {sentence} indeed."))
    encoder.usage = Usage({"query": "find this: "}, include_prompt=False)
    encoder.to_sentence_transformers(tmp_path / "st")
    theirs = st.SentenceTransformer(str(tmp_path / "st"), device="cpu", trust_remote_code=True)
    np.testing.assert_allclose(theirs.encode_query(TEXTS), encoder.encode_query(TEXTS), atol=1e-5)


def test_a_decoder_that_is_read_there(tmp_path: Path) -> None:
    """Of BART and its like sentence-transformers takes the decoder's states; of T5 the encoder's, as here."""
    for kind in ("bart", "t5"):
        tiny_model(kind).save_pretrained(tmp_path / kind)
        tiny_words().save_pretrained(tmp_path / kind)
        body = models.Transformer(str(tmp_path / kind))
        folder = write(
            tmp_path / f"st_{kind}", [body, models.Pooling(body.get_embedding_dimension(), "mean")]
        )
        if kind == "t5":
            agree(folder)
        else:
            with pytest.raises(UserError, match="reads the decoder of bart"):
                embedlab.load(folder)


def test_an_adapter_in_the_folder(dense: Path, tmp_path: Path) -> None:
    """With and without the model's own configuration beside it: another base would be taken, without a word."""
    folder = Path(shutil.copytree(dense, tmp_path / "st"))
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    for _ in range(2):
        with pytest.raises(UserError, match="holds an adapter"):
            embedlab.load(folder)
        (folder / "config.json").unlink(missing_ok=True)


@pytest.mark.parametrize(
    "file", ["sentence_bert_config.json", "sentence_roberta_config.json", "tokenizer_config.json"]
)
def test_every_place_where_versions_keep_the_length(tiny: Tiny, tmp_path: Path, file: str) -> None:
    folder = write(tmp_path / "st", [transformer(tiny, max_seq_length=30), models.Pooling(32, "mean")])
    (folder / "sentence_bert_config.json").unlink()
    edit(folder / "tokenizer_config.json", model_max_length=30)
    edit(folder / file, **({"model_max_length": 7} if file.startswith("tok") else {"max_seq_length": 7}))
    agree(folder)
    assert embedlab.load(folder).tokenization.row_limit == 7


REFUSED: list[tuple[str, Any]] = [
    ("1_Pooling/config.json", {"pooling_mode": "attention"}),
    ("1_Pooling/config.json", {"pooling_mode": []}),
    ("1_Pooling/config.json", {"pooling_mode_attention": True}),
    ("1_Pooling/config.json", {"include_prompt": "no"}),
    ("1_Pooling/config.json", {"include_prompt": False, "pooling_mode": "weightedmean"}),
    ("sentence_bert_config.json", {"processor_kwargs": {"model_max_length": 0.5}}),
    ("sentence_bert_config.json", {"max_seq_length": -1}),
    ("sentence_bert_config.json", {"max_seq_length": "long"}),
    ("sentence_bert_config.json", {"a_new_key": 1}),
    ("sentence_bert_config.json", {"config_args": {"num_hidden_layers": 1}}),
    ("sentence_bert_config.json", {"model_args": {"ignore_mismatched_sizes": True}}),
    ("sentence_bert_config.json", {"tokenizer_args": {"add_prefix_space": True}}),
    ("sentence_bert_config.json", {"query_length": 4}),
    ("sentence_bert_config.json", {"transformer_task": "fill-mask"}),
    ("config_sentence_transformers.json", {"prompts": ["query"]}),
    ("config_sentence_transformers.json", {"prompts": {"query": 3}}),
    ("config_sentence_transformers.json", {"default_prompt_name": "missing"}),
    ("config_sentence_transformers.json", {"truncate_dim": 0}),
    ("config_sentence_transformers.json", {"truncate_dim": "64"}),
    ("config_sentence_transformers.json", {"similarity_fn_name": "maxsim"}),
    ("config_sentence_transformers.json", {"a_new_key": 1}),
    ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}),
    ("2_Dense/config.json", {"activation_function": "os.system"}),
    ("2_Dense/config.json", {"activation_function": "torch.nn.modules.loss.MSELoss"}),
    ("2_Dense/config.json", {"out_features": None}),
    ("2_Dense/config.json", {"out_features": 5}),
    ("2_Dense/config.json", {"module_input_name": "token_embeddings"}),
    ("2_Dense/config.json", {"a_new_key": 1}),
    ("3_Normalize/config.json", {"module_input_name": "token_embeddings"}),
    ("3_Normalize/config.json", {"a_new_key": 1}),
    ("4_LayerNorm/config.json", {"eps": 0.5}),
    ("5_Dropout/config.json", {"a_new_key": 1}),
    ("sentence_bert_config.json", {"processor_kwargs": {"do_lower_case": True}}),
]


@pytest.fixture(scope="module")
def dense(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    head = [models.Dense(32, 8), models.Normalize(), models.LayerNorm(8), models.Dropout(0.1)]
    modules = [models.Transformer(str(tiny("bert"))), models.Pooling(32, "cls"), *head]
    return write(tmp_path_factory.mktemp("st") / "dense", modules)


@pytest.mark.parametrize(("file", "values"), REFUSED)
def test_settings_that_are_not_known(dense: Path, tmp_path: Path, file: str, values: dict[str, Any]) -> None:
    folder = Path(shutil.copytree(dense, tmp_path / "st"))
    edit(folder / file, **values)
    with pytest.raises(UserError) as caught:
        embedlab.load(folder)
    assert "\n" not in str(caught.value)
    assert file.split("/")[0] in str(caught.value) or "dense layers" in str(caught.value)


@pytest.mark.parametrize(
    "modules",
    [
        {}, [3], [{"type": 1, "path": ""}], [{"path": ""}],
        [{"type": "sentence_transformers.models.Transformer", "path": ""}],
        [{"type": "sentence_transformers.models.StaticEmbedding", "path": ""}],
        [{"type": "somewhere.Transformer", "path": ""}, {"type": "sentence_transformers.models.Pooling", "path": "1"}],
        [{"type": "sentence_transformers.models.Transformer", "path": "../other"},
         {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}],
    ],
)  # fmt: skip
def test_modules_that_are_not_known(dense: Path, tmp_path: Path, modules: Any) -> None:
    folder = Path(shutil.copytree(dense, tmp_path / "st"))
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UserError) as caught:
        embedlab.load(folder)
    assert "modules.json" in str(caught.value)
