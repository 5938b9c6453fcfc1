"""Poolings over several blocks: the controls, and which settings are refused before any weight is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from embedlab.config.backbone import BackboneInfo
from embedlab.config.template import Template
from embedlab.engine.optimizer import parameter_groups
from embedlab.errors import UserError
from embedlab.pooling import build_pooling, pooling_config
from embedlab.pooling.blocks import inner_tokens

BERT = BackboneInfo("encoder", 12, 768, 512, True, 0.1, "bert", True)
SMALL = replace(BERT, layers=4, width=8, inner_width=8)
LLAMA = BackboneInfo("decoder", 30, 576, 8192, False, 0.0, "llama", False)
PROMPT = Template('This sentence of "{sentence}" means {mask}.')
CONTROLS = ("last_n", "scalar_mix", "feature_mix")


def states() -> tuple[tuple[Tensor, ...], Tensor]:
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    return tuple(torch.randn(2, 5, 8) for _ in range(5)), mask


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_begin_as_the_average_of_the_last_blocks(name: str) -> None:
    hidden, mask = states()
    z = build_pooling({"name": name, "n": 2}, SMALL)(hidden, mask, {})
    both = (hidden[3] + hidden[4]) / 2
    torch.testing.assert_close(z, torch.stack([both[0].mean(0), both[1, 2:].mean(0)]))


@pytest.mark.parametrize(("pool", "at"), [("cls", (0, 2)), ("last", (4, 4)), ("mask", (3, 3))])
@pytest.mark.parametrize("name", CONTROLS)
def test_controls_read_one_token_too(name: str, pool: str, at: tuple[int, int]) -> None:
    hidden, mask = states()
    z = build_pooling({"name": name, "n": 1, "pool": pool, "block_offset": 1}, SMALL)(
        hidden, mask, {"mask": 1}
    )
    torch.testing.assert_close(z, torch.stack([hidden[3][0, at[0]], hidden[3][1, at[1]]]))


@pytest.mark.parametrize(("name", "shape"), [("scalar_mix", (3, 1)), ("feature_mix", (3, 8))])
def test_static_mixes_learn_a_weight_for_each(name: str, shape: tuple[int, int]) -> None:
    hidden, mask = states()
    pooling = build_pooling({"name": name, "n": 3}, SMALL)
    assert [tuple(p.shape) for p in pooling.parameters()] == [shape]
    logits = torch.randn(shape)
    pooling.logits.data = logits
    w = torch.softmax(logits, 0)
    means = torch.stack([torch.stack([h[0].mean(0), h[1, 2:].mean(0)]) for h in hidden[2:]])
    z = pooling(hidden, mask, {})
    torch.testing.assert_close(z, sum(w[n] * means[n] for n in range(3)))
    z.square().sum().backward()
    assert pooling.logits.grad.any()


def test_the_average_has_nothing_to_learn() -> None:
    assert not list(build_pooling("last_n", SMALL).parameters())


@pytest.mark.parametrize("name", ["s2sent", "scalar_mix"])
def test_the_gate_may_learn_faster(name: str) -> None:
    model = torch.nn.ModuleDict(
        {"body": torch.nn.Linear(2, 2), "pooling": build_pooling({"name": name, "lr_mult": 10, "n": 3}, BERT)}
    )
    slow, fast = parameter_groups(model, 3e-5)
    assert slow["params"] == list(model["body"].parameters())
    assert fast["lr"] == pytest.approx(3e-4)
    assert len(fast["params"]) == len(list(model["pooling"].parameters()))


def refusal(settings: dict[str, Any], info: BackboneInfo = BERT, template: Template | None = None) -> str:
    with pytest.raises(UserError) as caught:
        pooling_config({"name": "s2sent", **settings}).check(info, template, "simcse")
    return str(caught.value)


def doubts(
    settings: dict[str, Any], info: BackboneInfo = BERT, template: Template | None = None
) -> list[str]:
    return pooling_config({"name": "s2sent", **settings}).check(info, template, "simcse")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"n": 13}, "this backbone has 12 blocks (pooling.n=13). Fix: 1 to 12"),
        (
            {"m": 5},
            "does not divide the backbone's 768 features (pooling.m=5). Fix: one of 1, 2, 4, 8, 16, 32",
        ),
        ({"r": 800}, "no bottleneck is left of 768 features (pooling.r=800). Fix: 1 to 768"),
        (
            {"n": 12, "block_offset": 2},
            "12 of 12 blocks leave room for an offset of 1 (pooling.block_offset=2). Fix: 0 to 1",
        ),
        (
            {"pool": "mask"},
            "there is no {mask} in the template to read out (pooling.pool=mask). "
            "Fix: template=promptbert_bert, or pooling.pool=mean",
        ),
    ],
)
def test_what_has_no_meaning_names_key_value_and_fix(settings: dict, line: str) -> None:
    assert refusal(settings) == line


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n", 0),
        ("n", 2.5),
        ("m", 0),
        ("r", "12"),
        ("block_offset", -1),
        ("lr_mult", 0.0),
        *[
            (k, "odd")
            for k in ("mode", "squeeze", "no_fs", "order", "invalid", "dct_norm", "act", "block_norm")
        ],
        *[(k, "odd") for k in ("gate1d", "pool", "fs_tokens", "gate", "init")],
        ("lr_mult", -1.0),
    ],
)
def test_values_out_of_range_name_their_key(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"pooling.{key}={value}"):
        pooling_config({"name": "s2sent", key: value})


def test_batch_norm_needs_one_vector_a_sentence() -> None:
    assert "pooling.bn" in refusal({"bn": True, "squeeze": "none"})


def test_the_list_of_frequencies_ends() -> None:
    assert "pooling.m=64" in refusal({"m": 64, "invalid": "zero"})
    assert doubts({"m": 64}) == []


def test_the_first_hidden_state_is_the_last_that_an_offset_reaches() -> None:
    assert doubts({"n": 12, "block_offset": 1}) == doubts({"n": 3, "block_offset": 10}) == []
    assert "pooling.block_offset=11" in refusal({"n": 3, "block_offset": 11})


def test_a_decoders_first_token_and_missing_mask_are_refused() -> None:
    assert "pooling.pool=cls" in refusal({"pool": "cls"}, LLAMA)
    assert "pooling.pool=mask" in refusal({"pool": "mask"}, LLAMA, PROMPT)
    assert doubts({"n": 30}, LLAMA) == []
    assert doubts({"pool": "mask"}, BERT, PROMPT) == []


def test_blocks_of_another_width_are_refused() -> None:
    assert "1024 features and the last layer 512" in refusal({}, replace(LLAMA, width=512, inner_width=1024))


def test_the_sentences_tokens_must_be_known() -> None:
    assert "pooling.fs_tokens" in refusal({"fs_tokens": "sentence"}, BERT, replace(PROMPT, join="text"))
    with pytest.raises(UserError, match=r"pooling\.exclude_special"):
        pooling_config({"name": "s2sent", "exclude_special": True}).check(LLAMA, None, "csesfp")
    assert pooling_config("s2sent").check(LLAMA, None, "csesfp") == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pool": "cls"}, "table 3"),
        ({"n": 1}, "does not train"),
        ({"mode": "avg1d", "gate1d": "softmax"}, "null control"),
        ({"dct_norm": "sum"}, "saturates"),
        ({"invalid": "grid6"}, "padding"),
        ({"block_norm": "global_exp"}, "batch mates"),
        ({"r": 10}, "pooling.r=10 does not divide the backbone's 768 features: the bottleneck has 76"),
    ],
)
def test_what_is_known_to_be_poor_is_a_warning(settings: dict, words: str) -> None:
    (warning,) = doubts(settings)
    assert words in warning


@pytest.mark.parametrize("settings", [{}, {"n": 12}, {"n": 1, "mode": "auto"}, {"mode": "none", "m": 5}])
def test_what_is_sound_is_silent(settings: dict) -> None:
    assert doubts(settings) == []


def test_a_width_that_r_does_not_divide_gets_the_next_smaller_bottleneck() -> None:
    pooling = build_pooling({"name": "s2sent", "r": 12}, replace(BERT, width=256, inner_width=256))
    assert pooling.gate.squeeze.weight.shape == (21, 256)


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_inner_tokens_are_whole_numbers(dtype: torch.dtype) -> None:
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 0, 0, 0]]).to(dtype)
    found = inner_tokens(mask, 1, 2)
    assert found.dtype == torch.long
    assert found.tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]


def test_presets_compose() -> None:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from embedlab import files as _paths

    folder = str(_paths.conf_dir() / "pooling")
    made = {}
    with initialize_config_dir(folder, version_base="1.3"):
        for name in ("s2sent", "s2_paper", "s2_official", "s2_frozen", *CONTROLS):
            made[name] = pooling_config(OmegaConf.to_container(compose(name)))
    assert made["s2sent"] == pooling_config("s2sent")
    assert made["s2_paper"] == replace(made["s2sent"], bias=False)
    assert made["s2_official"] == replace(
        made["s2sent"], invalid="grid6", dct_norm="ortho", bn=True, block_norm="global_exp", block_offset=1
    )
    assert made["s2_frozen"].gate == "frozen"
    assert [made[c] for c in CONTROLS] == [pooling_config(c) for c in CONTROLS]
