"""Baselines' losses and gradients, from their formulas and transformers' own models."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, relu
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from embedlab.backbones import load_backbone
from embedlab.config.backbone import BackboneConfig
from embedlab.config.optimizer import OptimizerConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.methods.esimcse import ESimCSE, ESimCSEConfig
from embedlab.methods.mntp import MNTP, MNTPConfig
from embedlab.objectives.language_model import mask_tokens
from embedlab.pooling import build_pooling
from tests.methods import test_diffcse as diffcse
from tests.methods import test_infocse as infocse
from tests.methods import test_sncse as sncse
from tests.methods.baselines import Tiny, batch
from tests.support import SENTENCES

TAU = 0.2


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return a @ b / (a.norm() * b.norm())


def nce(a: Tensor, b: Tensor, past: list[Tensor] | None = None) -> Tensor:
    """Row by row, and candidate by candidate."""
    rows = []
    for i, x in enumerate(a):
        logits = torch.stack([cosine(x, y) for y in [*b, *(past or [])]]) / TAU
        rows.append(logits.exp().sum().log() - logits[i])
    return torch.stack(rows).mean()


def encoder_of(path: str, pooling: str, head: Any = None, **backbone: Any) -> SentenceEncoder:
    config = BackboneConfig(source="local", path=path, **backbone)
    found, tokenizer = load_backbone(config, head=head)
    return SentenceEncoder(found, build_pooling(pooling, found.info), Tokenization(tokenizer))


def blocks(model: Any, x: Tensor, mask: Tensor) -> Tensor:
    """The last states of BERT's blocks, from what its embedding layer would give."""
    bias = (1 - mask[:, None, None, :].float()) * -1e9
    for block in model.encoder.layer:
        y = block(x, attention_mask=bias)
        x = y[0] if isinstance(y, tuple) else y
    return x


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def grad_of(model: Any) -> Tensor:
    grad = model.embeddings.word_embeddings.weight.grad.clone()
    model.zero_grad()
    return grad  # type: ignore[no-any-return]


@pytest.mark.parametrize("rows", [12, 18])
def test_six_updates_of_esimcse(tiny: Tiny, rows: int) -> None:
    """Queue of whole batches, oldest out first; average before each update; empty when an epoch begins."""
    torch.manual_seed(0)
    config = ESimCSEConfig(rate=0.0, momentum=0.95, tau=TAU, mask_duplicates=False)
    encoder = encoder_of(str(tiny("bert")), "cls", dropout=0.0)
    method = ESimCSE(encoder, config, OptimizerConfig(), rows).train()
    f, head = copy.deepcopy(encoder.backbone.model), copy.deepcopy(method.head)
    averaged, queue = copy.deepcopy(f), list[Tensor]()
    own, other = (
        torch.optim.SGD([*a.parameters(), *b.parameters()], 0.3)
        for a, b in ((method.encoder, method.head), (f, head))
    )
    method.trainer = SimpleNamespace(global_step=0)  # type: ignore[assignment]
    for step in range(6):
        data = batch(method, tuple(SENTENCES[(5 * step + i) % len(SENTENCES)] for i in range(6)))
        if step == 4:
            method.on_train_epoch_start()
            queue.clear()
        method.trainer.global_step = step  # type: ignore[misc]
        method.on_train_batch_start(None, 0)
        found = method.losses(data).losses["queue_nce"]
        with torch.no_grad():
            for p, q in zip(averaged.parameters(), f.parameters(), strict=True):
                p.copy_(0.95 * p + 0.05 * q)
        tokens = {k: data["sentence"][k] for k in ("input_ids", "attention_mask")}
        z = head(f(**tokens).last_hidden_state[:, 0])
        expected = nce(z, z, queue)
        close(found, expected)
        with torch.no_grad():
            queue = [*queue, *head(averaged(**tokens).last_hidden_state[:, 0])][-rows:]
        for updates, loss in ((own, found), (other, expected)):
            updates.zero_grad()
            loss.backward()
            updates.step()
    assert len(queue) == method.filled.item() == 12


@pytest.mark.parametrize("condition", ["head", "raw"])
def test_diffcse(tiny: Tiny, condition: str) -> None:
    method = diffcse.make(tiny, condition=condition, lam=0.7, tau=TAU)
    torch.nn.init.normal_(method.classifier.weight)
    view = batch(method)["sentence"]
    ids, mask = (torch.cat([view[k]] * 2) for k in ("input_ids", "attention_mask"))
    torch.manual_seed(5)
    found = method.losses(batch(method)).losses
    sum(found.values()).backward()  # type: ignore[union-attr]
    f, d = method.encoder.backbone.model, method.discriminator.backbone.model  # type: ignore[union-attr]
    gradients = [grad_of(f), grad_of(d)]
    torch.manual_seed(5)
    changed = method.changed(ids, mask)
    h = f(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]
    z = method.head(h)
    first = z if condition == "head" else h
    states = blocks(d, torch.cat([first[:, None], d.embeddings(changed)[:, 1:]], 1), mask)
    real = mask.bool()
    told = 0.7 * cross_entropy(method.classifier(states)[real], (changed != ids).long()[real])
    contrast = nce(*z.chunk(2))
    close([found["info_nce"], found["difference"]], [contrast, told])
    (contrast + told).backward()
    close(gradients, [grad_of(f), grad_of(d)])


def test_infocse(tiny: Tiny) -> None:
    method = infocse.make(tiny, weight=0.5, tau=TAU)
    start = AutoModel.from_pretrained(tiny("bert")).eval()
    view = batch(method)["sentence"]
    ids, mask = (torch.cat([view[k]] * 2) for k in ("input_ids", "attention_mask"))
    torch.manual_seed(5)
    found = method.losses(batch(method)).losses
    sum(found.values()).backward()  # type: ignore[union-attr]
    f, auxiliary = method.encoder.backbone.model, method.auxiliary.backbone  # type: ignore[union-attr]
    gradient = grad_of(f)
    torch.manual_seed(5)
    masked = method.masking.mask(ids, mask)
    h = f(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]
    told = {"input_ids": masked.input_ids, "attention_mask": mask}
    with torch.no_grad():  # of two blocks the lower half is one
        lower = start(**told, output_hidden_states=True).hidden_states[1]
    states = blocks(auxiliary.model, torch.cat([h[:, None], lower[:, 1:]], 1), mask)
    there = masked.labels != -100
    logits = auxiliary.head(states).flatten(0, 1)[masked.positions[there]]  # type: ignore[misc]
    predicted = 0.5 * cross_entropy(logits, masked.labels[there])
    contrast = nce(*method.head(h).chunk(2))
    close([found["info_nce"], found["masked_lm"]], [contrast, predicted])
    (contrast + predicted).backward()
    close(gradient, grad_of(f))


def test_sncse(tiny: Tiny) -> None:
    """Texts in their templates, through transformers' tokenizer and model."""
    method = sncse.make(tiny, lam=0.3, tau=TAU)
    found = method.losses(sncse.batch(method)).losses
    sum(found.values()).backward()  # type: ignore[union-attr]
    model = AutoModel.from_pretrained(tiny("bert")).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny("bert"))

    def encode(before: str) -> Tensor:
        texts = [f'This sentence {before}{text}" means [MASK].' for text in SENTENCES[:5]]
        tokens = tokenizer(texts, padding=True, return_tensors="pt")
        at = tokens["input_ids"] == tokenizer.mask_token_id
        return method.head(model(**tokens).last_hidden_state[at])  # type: ignore[no-any-return]

    z1, z2, z3 = encode(': "'), encode('of "'), encode('of "Not ')
    d = torch.stack([cosine(a, n) - cosine(a, p) for a, p, n in zip(z1, z2, z3, strict=True)])
    margin = 0.3 * (relu(d + 0.1) + relu(-d - 0.3)).mean()
    close([found["info_nce"], found["margin"]], [nce(z1, z2), margin])
    (nce(z1, z2) + margin).backward()
    close(grad_of(method.encoder.backbone.model), grad_of(model))


def test_mntp(tiny: Tiny) -> None:
    """A word from the logits at the place before it, of a causal model whose mask hides padding alone."""
    path = str(tiny("llama"))
    method = MNTP(
        encoder_of(path, "mean", "causal_lm", bidirectional=True),
        MNTPConfig(mask_token="▁"),
        OptimizerConfig(),
    ).eval()
    view = batch(method)["sentence"]
    ids, mask = view["input_ids"], view["attention_mask"].bool()
    assert not mask.all()
    torch.manual_seed(1)
    found = method.losses(batch(method)).losses["mntp"]
    found.backward()  # type: ignore[no-untyped-call]
    torch.manual_seed(1)
    maskable = mask & ~torch.isin(ids, method.special_ids)
    maskable[:, 0] = False
    masked = mask_tokens(ids, maskable, method.mask_id, len(method.encoder.tokenizer), 0.2)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    hidden = torch.zeros(len(ids), 1, *ids.shape[1:] * 2)
    hidden = hidden.masked_fill(~mask[:, None, None, :], torch.finfo(torch.float32).min)
    logits = model(input_ids=masked.input_ids, attention_mask=hidden).logits
    there = masked.labels != -100
    row, place = masked.positions[there] // ids.shape[1], masked.positions[there] % ids.shape[1]
    expected = cross_entropy(logits[row, place - 1], ids[row, place])
    close(found, expected)
    expected.backward()
    one, other = (
        m.layers[0].self_attn.q_proj.weight.grad for m in (method.encoder.backbone.model, model.model)
    )
    close(one, other)
