"""Every method's losses, statistics and gradients without padding, by modules and by kernels: those of padded rows."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from embedlab.config.run import RunConfig
from embedlab.engine.module import Method
from embedlab.engine.precision import ComputeCopy
from embedlab.engine.step import backbones_of
from embedlab.kernels import fused_block
from embedlab.methods import diffcse
from embedlab.methods.masked_lm import MaskedPrediction
from embedlab.objectives.language_model import Masked, mask_tokens
from embedlab.objectives.replaced_tokens import fill_masks
from embedlab.run.check import resolved_packing
from embedlab.run.run import build
from tests.support import SENTENCES

Tiny = Callable[..., Path]
Compose = Callable[..., RunConfig]
PROMPT = ("method=promptbert", "template=promptbert_bert", "method.denoise_lengths=9")
PROMPT_ROBERTA = ("method=promptbert", "template=promptbert_roberta", "method.denoise_lengths=9")
WIDE = {"width": 32, "heads": 2, "ffn": 64}  # heads of 16, the narrowest that the kernels take
OWN = ("method=supervised", "data=parallel", "data.max_length=32")
BEPA = ("method=bepa", "data=parallel", "data.max_length=24")
JTCSE = ("method=jtcse", "method.icnce=fixed", "method.n_ca=2")
MLM = ("method=masked_lm", "pooling=mean", "data.pack=16", "data.max_length=null")


class Case(NamedTuple):
    settings: tuple[str, ...]
    model_type: str = "bert"
    passes: int = 1
    """Of the fused blocks over a tower, in one loss."""
    positions: int = 64
    """Of the model."""

    @property
    def arch(self) -> dict[str, int]:
        return {"layers": 4, "max_positions": self.positions, **WIDE}


CASES = {
    "simcse": Case(("method=simcse", "pooling=cls")),
    "simcse_roberta_mean": Case(("method=simcse", "pooling=mean"), "roberta"),
    "simcse_modern": Case(("method=simcse", "pooling=mean"), "modernbert", 0),
    "supervised": Case((*OWN, "pooling=cls", "method.matryoshka.dims=[32,8]")),
    "supervised_sigmoid": Case((*OWN, "pooling=mean", "method.objective=sigmoid"), "roberta"),
    "supervised_several": Case((*OWN, "pooling=mean", "method.objective=multi_positive"), "distilbert"),
    "mixcse": Case(("method=mixcse", "pooling=cls")),
    "mixcse_released": Case(("method=mixcse", "pooling=mean", "method.form=released", "method.mlp=bn2")),
    "rankcse": Case(("method=rankcse", "pooling=cls")),
    "rankcse_listnet": Case(("method=rankcse", "pooling=mean", "method.ranking=listnet"), "roberta"),
    "esimcse": Case(("method=esimcse", "pooling=cls", "method.redraw=once")),
    "esimcse_mean": Case(("method=esimcse", "pooling=mean", "method.redraw=once", "method.queue=0"), "roberta"),
    # Nothing is drawn that a loss depends on: a card draws otherwise than the host.
    "pcl": Case(("method=pcl", "pooling=cls", "method.augmentations=[reverse,none]"), passes=2),
    "pcl_released": Case(
        ("method=pcl", "pooling=mean", "method.augmentations=[reverse]", "method.form=released"), "roberta"
    ),
    "whitenedcse": Case(("method=whitenedcse", "pooling=cls", "method.groups=32", "method.tau=1")),
    "diffcse": Case(("method=diffcse", "pooling=cls", "method.mlp=train")),
    "diffcse_mean": Case(("method=diffcse", "pooling=mean", "method.condition=raw", "method.mlp=train"), "distilbert"),
    "infocse": Case(("method=infocse", "pooling=cls", "method.mlp=train")),
    "infocse_mean": Case(("method=infocse", "pooling=mean", "method.weight=1e-3", "method.mlp=none"), "roberta"),
    "tncse": Case(("method=tncse", "pooling=cls"), passes=2),
    "tncse_mean_roberta": Case(("method=tncse", "pooling=mean"), "roberta", 2),
    "jtcse": Case((*JTCSE, "pooling=cls"), passes=0),
    "jtcse_mean": Case(("method=jtcse", "pooling=mean", "method.n_ca=4", "method.icnce=symmetric"), "roberta", 0),
    "jtcse_layers": Case((*JTCSE, "pooling=first_last"), "distilbert", 0),
    "jtcse_instream": Case((*JTCSE, "pooling=cls", "method.wiring=instream"), passes=0),
    "jtcse_values": Case((*JTCSE, "pooling=cls", "method.route=value_owner"), passes=0),
    "bepa": Case((*BEPA, "pooling=cls")),
    "bepa_bi": Case((*BEPA, "pooling=mean", "method.mlm_pack=bi"), "xlm-roberta"),
    "bepa_layers": Case((*BEPA, "pooling=first_last", "method.target=stopgrad", "method.predictor=mlp"), "roberta"),
    "bepa_modern": Case((*BEPA, "pooling=cls"), "modernbert", 0),
    "bepa_ema": Case((*BEPA, "pooling=cls", "method.target=ema")),
    "bepa_control": Case((*BEPA, "pooling=cls", "method.lam=0", "method.mlm_pack=bi")),
    "bepa_masked": Case((*BEPA, "pooling=cls", "method.align_input=packed_masked"), passes=2),
    "bepa_blocks": Case((*BEPA, "pooling=cls", "method.align_input=packed_blockmask")),
    "masked_lm": Case(MLM),
    "masked_lm_modern": Case(MLM, "modernbert", 0),
    "masked_lm_exact": Case((*MLM, "method.rule=exact"), "xlm-roberta"),
    "masked_lm_long": Case((*MLM[:2], "data.pack=150", MLM[3], "data.batch_size=2"), positions=256),
    "promptbert": Case((*PROMPT, "pooling=mask")),
    "promptbert_two": Case((*PROMPT, "pooling=mask", "method.second_template.text='it : {sentence} is {mask} .'")),
    "promptbert_roberta": Case((*PROMPT_ROBERTA, "pooling=mask"), "roberta"),
    "promptbert_mean": Case((*PROMPT, "pooling=mean", "method.denoise=true")),
    "promptbert_s2": Case((*PROMPT, "pooling=s2sent", "pooling.n=2", "method.denoise=true")),
    "promptbert_plain": Case((*PROMPT, "pooling=mask", "method.denoise=false")),
}  # fmt: skip


def extra_settings(case: Case, tiny: Tiny, folder: Path) -> list[str]:
    """The second tower, the teacher and the pairs of a case that has them."""
    settings = []
    if case.settings[0] == "method=rankcse":
        settings += [f"method.teacher={tiny(case.model_type, seed=1)}", "method.teacher_pooling=mean"]
    if case.settings[0] in ("method=jtcse", "method=tncse"):
        settings.append(f"method.tower2={tiny(case.model_type, seed=1, **case.arch)}")
    if "data=parallel" in case.settings:
        pairs = folder / "pairs.tsv"
        texts = [*SENTENCES, *(f"{a} {b}" for a, b in itertools.pairwise(SENTENCES))]
        pairs.write_text("en\tox\n" + "".join(f"{a}\t{a[::-1]}\n" for a in texts))
        settings.append(f"data.files={pairs}")
    return settings


@pytest.fixture
def made(compose_run: Compose, tiny: Tiny, tmp_path: Path) -> Callable[[Case], Method]:
    def make(case: Case) -> Method:
        settings = (*case.settings, *extra_settings(case, tiny, tmp_path))
        config = compose_run(*settings, model_type=case.model_type, **case.arch)
        assert resolved_packing(config)
        method, _ = build(config, tmp_path)
        return method.eval()

    return make


def views(method: Method, case: Case) -> dict[str, Any]:
    texts = SENTENCES[:6]
    if "method=masked_lm" in case.settings:
        length = int(case.settings[2].removeprefix("data.pack="))
        ids = torch.randint(8, 100, (6, length), generator=torch.Generator().manual_seed(0))
        return {"sentence": {"input_ids": ids, "attention_mask": torch.ones_like(ids), "full": True}}
    if "data=parallel" in case.settings:
        sides = {"source": texts, "target": tuple(t[: 10 + 3 * i] for i, t in enumerate(texts))}
        return {name: rows(method.encoder.tokenization, side) for name, side in sides.items()}
    if isinstance(getattr(method, "templates", None), list):
        return {name: rows(t, texts) for name, t in zip(("first", "second"), two(method), strict=True)}
    found = {"sentence": rows(method.encoder.towers[0].tokenization, texts)}
    return {"rows": torch.arange(len(texts)), **found}


def two(method: Any) -> list[Any]:
    return [method.templates[0], method.templates[-1]]


def rows(tokenization: Any, texts: tuple[str, ...]) -> dict[str, Any]:
    return {**tokenization.pad(tokenization.ids(texts), 8), "hash": torch.arange(len(texts))}


def results(
    method: Method, batch: dict[str, Any], copies: bool, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Losses, what else is logged, and the gradients of the weights, in one random state; copies have a type."""
    trained = [b for b in backbones_of(method) if any(p.requires_grad for p in b.parameters())]
    twins = [ComputeCopy(b, dtype) for b in trained] if copies else []
    torch.manual_seed(4)
    with ExitStack() as stack:
        for twin in twins:
            stack.enter_context(twin.swapped())
        loss, logged = method.total(batch)
        loss.backward()
    for twin in twins:
        twin.hand_over(add=False)
    found = {f"grad {n}": p.grad.clone() for n, p in method.named_parameters() if p.grad is not None}
    method.zero_grad()
    return found | {n: v for n, v in logged.items() if "accuracy" not in n}


def told(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        n: {**v, "token_budget": int(v["attention_mask"].sum()) + 5} if isinstance(v, dict) else v
        for n, v in batch.items()
    }


def same(got: dict[str, Tensor], want: dict[str, Tensor], share: float) -> None:
    """Up to a share of the largest value of each tensor; of gradients, of the largest of all."""
    assert got.keys() == want.keys()
    most = max(float(v.abs().max()) for n, v in want.items() if n.startswith("grad "))
    for name, value in want.items():
        scale = most if name.startswith("grad ") else max(1.0, float(value.abs().max()))
        error = float((got[name] - value).abs().max())
        assert error <= share * scale, f"{name}: {error} of {scale}"


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_padded_rows_in_fp64(
    made: Callable[[Case], Method], name: str
) -> None:
    case = CASES[name]
    method = made(case).double()
    batch = views(method, case)
    want = results(method, batch, copies=False)
    # Logits of a vocabulary are fp32 whatever the model is.
    share = 1e-5 if hasattr(method, "prediction") else 1e-9
    same(results(method, told(batch), copies=False), want, share)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_by_the_fused_blocks_are_those_of_padded_rows(
    made: Callable[[Case], Method], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    method = made(case)
    batch = views(method, case)
    want = results(method, batch, copies=True)
    ran: list[int] = []
    states = fused_block.states
    monkeypatch.setattr(fused_block, "applies", lambda backbone, device: fused_block.fusable(backbone))
    monkeypatch.setattr(fused_block, "states", lambda *a, **k: [ran.append(1), states(*a, **k)][1])
    same(results(method, told(batch), copies=True), want, 1e-4)
    assert len(ran) == case.passes


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_by_the_kernels_on_a_card_are_as_near_to_fp64_as_those_with_padding(
    made: Callable[[Case], Method], name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both with weights in the compute type, as in a captured step: bf16 ones have a bf16 residual stream."""
    check_gradients(made(CASES[name]), CASES[name], dtype, torch.device("cuda"), monkeypatch)


@pytest.mark.parametrize(
    "name", ["simcse", "jtcse_values", "bepa", "promptbert_two", "rankcse", "diffcse", "infocse"]
)
def test_gradients_in_bf16_are_as_near_to_fp64_as_those_with_padding(
    made: Callable[[Case], Method], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fused_block, "applies", lambda b, device: b.low_precision_weights and fused_block.fusable(b)
    )
    check_gradients(made(CASES[name]), CASES[name], torch.bfloat16, torch.device("cpu"), monkeypatch)


def check_gradients(
    method: Method, case: Case, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MaskedPrediction, "mask", _mask_of_the_host)
    monkeypatch.setattr(diffcse, "fill_masks", _fill_of_the_host)
    half = dtype == torch.bfloat16
    want = _flat(results(_cast(copy.deepcopy(method), torch.float64), views(method, case), copies=False))
    _cast(method, device)
    batch = _moved(views(method, case), device)
    ran: list[int] = []
    apply = fused_block._Embed.apply
    monkeypatch.setattr(fused_block._Embed, "apply", lambda *a: [ran.append(1), apply(*a)][1])
    with ExitStack() as stack:
        for backbone in backbones_of(method):
            backbone.compiled = device.type == "cuda"  # where one token of the last block is read
            trained = any(p.requires_grad for p in backbone.parameters())
            stack.enter_context(backbone.computing(low_precision_weights=trained))
        stack.enter_context(torch.autocast(device.type, dtype, enabled=half))
        padded = _flat(results(method, batch, copies=True, dtype=dtype))
        assert not ran
        packed = _flat(results(method, told(batch), copies=True, dtype=dtype))
    assert bool(ran) == (case.model_type != "modernbert")
    errors = [float((x - want).norm() / want.norm()) for x in (packed, padded)]
    assert errors[0] <= 2 * errors[1] + (4e-3 if half else 1e-5), errors


def _cast(method: Method, to: torch.device | torch.dtype) -> Method:
    """With the networks that are no sub-modules, which a run moves to its device before the first step."""
    teachers = [teacher.encoder for teacher in getattr(method, "teachers", ())]
    for network in (method, *teachers, *getattr(method, "_generator", ()), *getattr(method, "_lower", ())):
        network.to(to)
    return method


def _mask_of_the_host(self: MaskedPrediction, input_ids: Tensor, attention_mask: Tensor) -> Masked:
    """`MaskedPrediction.mask`, drawn on the host wherever the rows are."""
    ids, special = input_ids.cpu(), self.special_ids.cpu()
    maskable = attention_mask.cpu().bool() & ~torch.isin(ids, special)
    draw = torch.Generator().manual_seed(0)
    masked = mask_tokens(ids, maskable, self.mask_id, self.vocab_size, self.probability, self.rule, draw)
    return Masked(*(x.to(input_ids.device) for x in masked))


def _fill_of_the_host(input_ids: Tensor, masked: Masked, logits: Tensor) -> Tensor:
    """`fill_masks`, drawn on the host from all tokens alike: rounded logits would choose others."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        filled = fill_masks(input_ids.cpu(), Masked(*(x.cpu() for x in masked)), torch.zeros(logits.shape))
    return filled.to(input_ids.device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {name: _moved(part, device) for name, part in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


def _flat(found: dict[str, Tensor]) -> Tensor:
    """All gradients as one, in fp64 on the host."""
    return torch.cat([v.double().cpu().flatten() for n, v in sorted(found.items()) if n.startswith("grad ")])
