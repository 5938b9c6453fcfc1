"""RankCSE: its three terms from the vectors themselves, teachers of any width and tokenizer, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from embedlab.config.optimizer import OptimizerConfig
from embedlab.errors import UserError
from embedlab.methods.rankcse import RankCSE, RankCSEConfig
from embedlab.methods.simcse import SimCSE, SimCSEConfig
from embedlab.methods.teachers import load_teacher
from embedlab.objectives.ranking import jensen_shannon, list_mle, list_net
from embedlab.objectives.similarity import cosines
from tests.methods.baselines import Tiny, batch, encoder
from tests.methods.golden import check_golden
from tests.methods.runs import run_of
from tests.support import SENTENCES


def make(tiny: Tiny, *teachers: Any, **config: Any) -> RankCSE:
    found = teachers or (encoder(tiny, seed=1),)
    method = RankCSE(encoder(tiny), RankCSEConfig(mlp="none", **config), OptimizerConfig(), found)
    return method.eval()


@pytest.mark.parametrize("name", ["rankcse", "rankcse_listnet"])
def test_golden_losses(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "rankcse":
        check_golden("rankcse", tmp_path, monkeypatch)
    else:
        check_golden("rankcse_listnet", tmp_path, monkeypatch)


@pytest.mark.parametrize("ranking", ["listnet", "listmle"])
def test_three_terms_of_two_teachers(tiny: Tiny, ranking: Any) -> None:
    """The second teacher has another width."""
    method = make(tiny, encoder(tiny, seed=1), encoder(tiny, seed=2, width=16), ranking=ranking, beta=0.5)
    data = batch(method)
    view = data["sentence"]
    tokens = view["input_ids"], view["attention_mask"]
    z, t1, t2 = (e(*tokens) for e in (method.encoder, *(t.encoder for t in method.teachers)))
    s, teacher = cosines(z, z), cosines(t1, t1) / 3 + 2 * cosines(t2, t2) / 3
    simcse = SimCSE(method.encoder, SimCSEConfig(mlp="none"), OptimizerConfig())
    losses = method.losses(data).losses
    torch.testing.assert_close(losses["info_nce"], simcse.eval().losses(data).losses["info_nce"])
    torch.testing.assert_close(losses["consistency"], 0.5 * jensen_shannon(s / 0.05, s.T / 0.05))
    gamma_r = 0.1 * list_net(s, teacher, 0.05, 0.025) if ranking == "listnet" else list_mle(s, teacher, 0.05)
    torch.testing.assert_close(losses["ranking"], gamma_r)


def test_the_released_form(tiny: Tiny) -> None:
    method = make(tiny, ranking="listnet", form="released", beta=7.0, tau2=0.1)
    data = batch(method)
    tokens = data["sentence"]["input_ids"], data["sentence"]["attention_mask"]
    s, t = (cosines(v, v) for v in (method.encoder(*tokens), method.teachers[0].encoder(*tokens)))
    losses = method.losses(data).losses
    torch.testing.assert_close(losses["consistency"], jensen_shannon(s / 0.05, s.T / 0.05, released=True))
    torch.testing.assert_close(losses["ranking"], 0.1 * list_net(s, t, 0.05, 0.1, torch.eye(6).bool()))
    listmle = make(tiny, ranking="listmle", form="released")
    torch.testing.assert_close(
        listmle.losses(data).losses["ranking"], list_mle(s, t, 0.05), rtol=1e-4, atol=0
    )


def test_a_teacher_reads_its_own_tokens(tiny: Tiny) -> None:
    other = encoder(tiny, "roberta")
    method = make(tiny, other)
    views = method.views({"sentence": ("sentence", None)}, 16)
    assert set(views) == {"sentence", "teacher1_1_sentence"}
    assert views["teacher1_1_sentence"][1].max_length == 16
    data = batch(method, teacher1_1_sentence=other.tokenization)
    own = data["teacher1_1_sentence"]
    t = other(own["input_ids"], own["attention_mask"])
    torch.testing.assert_close(method._teachers_list(data), cosines(t, t))
    assert set(make(tiny).views({"sentence": ("sentence", None)}, 16)) == {"sentence"}


@pytest.mark.parametrize("model_type", ["bert", "roberta", "llama"])
@pytest.mark.parametrize("positions", [16, 40, 64])
@pytest.mark.parametrize("max_length", [None, 24, 64])
def test_a_teacher_reads_no_more_than_it_can(
    tiny: Tiny, model_type: str, positions: int, max_length: int | None
) -> None:
    """Texts of 64 tokens, which are the student's most: the teacher's own views end where its positions do."""
    other = encoder(tiny, model_type, "mean", seed=1, max_positions=positions)
    method = make(tiny, other)
    views = method.views({"sentence": ("sentence", None)}, max_length)
    texts = tuple(" ".join(SENTENCES[i : i + 9] * 2) for i in range(4))
    data = batch(method, texts, **{name: way for name, (_, way) in views.items()})
    assert data["sentence"]["input_ids"].shape[1] == (max_length or 64)
    most = min(positions, max_length or 64)
    read = data.get("teacher1_1_sentence", data["sentence"])
    assert read["input_ids"].shape[1] == most
    if model_type == "bert":  # the student's own words
        assert torch.equal(read["input_ids"][:, : most - 1], data["sentence"]["input_ids"][:, : most - 1])
    t = other(read["input_ids"], read["attention_mask"])
    torch.testing.assert_close(method._teachers_list(data), cosines(t, t))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("teacher", "no/such", r"method\.teacher=no/such"),
        ("teacher_pooling", "clss", r"method\.teacher_pooling=clss"),
        ("teacher_pooling", "rep2", r"method\.teacher_pooling=rep2\).*such as cls"),
        ("teacher_pooling", "cls_mlp", r"method\.teacher_pooling=cls_mlp\).*such as cls"),
    ],
)
def test_what_is_wrong_with_a_teacher_is_said_of_its_own_key(
    tiny: Tiny, key: str, value: str, words: str
) -> None:
    given: dict[str, Any] = {"teacher": str(tiny("bert")), "teacher_pooling": None, key: value}
    with pytest.raises(UserError, match=words):
        load_teacher(given["teacher"], "method.teacher", given["teacher_pooling"])


def test_teachers_are_no_part_of_the_model(tiny: Tiny) -> None:
    method = make(tiny).train()
    teacher = method.teachers[0].encoder
    assert not teacher.training
    assert not {id(p) for p in method.trained()} & {id(p) for p in teacher.parameters()}
    assert not any("teacher" in name for name in method.state_dict())
    before = teacher.fingerprint()
    loss, _ = method.total(batch(method))
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None for p in teacher.parameters())
    assert any(p.grad is not None for p in method.encoder.parameters())
    assert teacher.fingerprint() == before


def test_settings_without_meaning_are_named(tiny: Tiny) -> None:
    info, config = encoder(tiny).backbone.info, RankCSEConfig(teacher="runs/simcse")
    assert config.check(info, run_of()) == []
    for change, words in (
        ({"teacher": None}, "method.teacher"), ({"beta": -1.0}, "method.beta"), ({"gamma": -1.0}, "method.gamma"),
        ({"tau2": 0.0}, "method.tau2"), ({"tau3": 0.0}, "method.tau3"), ({"alpha": 2.0}, "method.alpha"),
        ({"teacher_pooling": "clss"}, "method.teacher_pooling=clss"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            replace(config, **change).check(info, run_of())  # type: ignore[arg-type]
