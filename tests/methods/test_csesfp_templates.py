"""The prompts of CSE-SFP and its baselines: wording, marks that no sentence moves, the limit (T6, T14)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from embedlab import files as _paths
from embedlab.config.template import Template
from embedlab.encoders.tokenization import Tokenization
from tests.support import DECODERS, SENTENCES, tiny_tokenizer

ONE_STAGE = ("eol", "sth", "sum")
PAPER = {
    "eol_sum": 'This sentence : "<S>" means in one word|, it can be summarized as|',
    "sth_sum": 'This sentence : "<S>" means something|, it can be summarized as|',
    "sth_sum_also": 'This sentence : "<S>" means something|, it can also be summarized as|',
    "eol": 'This sentence : "<S>" means in one word:"',
    "sth": 'This sentence : "<S>" means something',
    "sum": 'This sentence : "<S>" can be summarized as',
}
SENSITIVITY = (
    "eol_sum",
    "sth_sum",
    "sth_sum_also",
    "eol_sum_also",
    "eol_eol",
    "sth_sth",
    "sum_sum",
    "sum_eol",
    "cot_eol_sum",
    "knowledge_eol_sum",
)
NASTY = (
    "",
    " ",
    'He said "yes" and left.',
    '"',
    'quote at the end"',
    "100 % of {sentence} or %s",
    "Straße, naïve café, 東京 and 🙂",
    "trailing space ",
    "ends in a comma,",
    "it can be summarized as",
    "...",
)


@cache
def _template(name: str) -> Template:
    return Template(**yaml.safe_load((_paths.conf_dir() / "template" / f"{name}.yaml").read_text()))


@cache
def _tokenizer(model_type: str) -> Any:
    return tiny_tokenizer(model_type, max_length=512)


def _first_stage(template: Template) -> str:
    return template.text[: template.text.index("{rep1}")].split('{sentence}"')[1]


@pytest.mark.parametrize("name", PAPER)
def test_wording(name: str) -> None:
    text = PAPER[name].replace("<S>", "{sentence}").replace("|", "{rep1}", 1).replace("|", "{rep2}", 1)
    assert _template(name) == Template(text, "text")


@pytest.mark.parametrize("name", SENSITIVITY)
@pytest.mark.parametrize("model_type", DECODERS)
def test_t6_marks_hold_for_every_sentence(name: str, model_type: str) -> None:
    template, tokenizer = _template(name), _tokenizer(model_type)
    tokenization = Tokenization(tokenizer, template)
    k = tokenization.marks["rep1"]
    assert tokenization.marks["rep2"] == 0
    assert k > 0
    rows = tokenization.ids(NASTY)
    tail = rows[0][-k:]
    assert tokenizer.decode(tail).strip() == "".join(p.text for p in template.after[2:]).strip()
    for row in rows:
        assert row[-k:] == tail
        assert row[-k - 1] == rows[0][-k - 1]
        upto_rep1 = tokenizer.decode(row[:-k])
        assert upto_rep1.endswith(_first_stage(template))
        assert tokenizer.eos_token_id not in row[1:]  # nothing follows the prompt


@pytest.mark.parametrize("name", ONE_STAGE)
@pytest.mark.parametrize("model_type", DECODERS)
def test_one_stage_prompts_end_in_the_same_token(name: str, model_type: str) -> None:
    tokenizer = _tokenizer(model_type)
    rows = Tokenization(tokenizer, _template(name)).ids(NASTY)
    end = _template(name).text.split("{sentence}")[1]
    assert len({row[-1] for row in rows}) == 1
    assert all(tokenizer.decode(row, skip_special_tokens=True).endswith(end[1:]) for row in rows)


@pytest.mark.parametrize("name", ["eol_sum", "sth_sum_also"])
@pytest.mark.parametrize("model_type", DECODERS)
def test_t14_only_the_sentence_is_cut(name: str, model_type: str) -> None:
    tokenizer, template = _tokenizer(model_type), _template(name)
    long = " ".join(SENTENCES)
    assert len(tokenizer(long, add_special_tokens=False)["input_ids"]) > 100
    tokenization = Tokenization(tokenizer, template, max_length=32)
    (row,) = tokenization.ids([long])
    text = tokenizer.decode(row, skip_special_tokens=True).strip()
    before, after = template.before.strip(), "".join(p.text for p in template.after)
    assert text.startswith(before)
    assert text.endswith(after)
    sentence = text[len(before) : -len(after)]
    assert long.startswith(sentence)
    assert 25 <= len(tokenizer(sentence, add_special_tokens=False)["input_ids"]) <= 34
    assert len(row) <= tokenization.overhead + 34


def test_braces_in_a_sentence_are_text() -> None:
    tokenizer = _tokenizer("gpt2")
    (row,) = Tokenization(tokenizer, _template("eol_sum")).ids(["a {rep1} and {sentence} and {}"])
    assert "a {rep1} and {sentence} and {}" in tokenizer.decode(row)


def test_k_of_a_gpt2_type_tokenizer() -> None:
    """The values of the specification, on the one real tokenizer that is at hand."""
    folder = Path(__file__).parents[2] / ".backbones" / "smollm2-135m"
    if not folder.is_dir():
        pytest.skip("make it with shared/tools/get_backbones.py")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    k = {
        n: Tokenization(tokenizer, _template(n)).marks["rep1"] for n in ("eol_sum", "sth_sum", "sth_sum_also")
    }
    assert k == {"eol_sum": 6, "sth_sum": 6, "sth_sum_also": 7}
    empty = {
        n: len(Tokenization(tokenizer, _template(n)).ids([""])[0]) for n in ("eol_sum", "eol", "sth", "sum")
    }
    assert empty == {"eol_sum": 14, "eol": 9, "sth": 6, "sum": 8}
