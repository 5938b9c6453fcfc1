"""Linear layers of one input with their LoRA updates: values, gradients and masks, by torch and by the kernels."""

from __future__ import annotations

import pytest
import torch

from embedlab.kernels.lora import lora_linear
from tests.interpreted import DEVICE, NEEDS

SHAPES = pytest.mark.parametrize(
    ("tokens", "width", "outputs", "rank"),
    [(5, 64, (64,), 16), (70, 100, (32, 48), 16), (131, 64, (96, 32, 32), 32)],
)


def layers(
    tokens: int, width: int, outputs: tuple[int, ...], rank: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """x, downs [n, R, D] and ups [O_i, R] with gradients, the frozen weight [O, D], and a gradient [T, O]."""
    draw = torch.Generator().manual_seed(tokens)
    sizes = [(tokens, width), (len(outputs), rank, width), *((o, rank) for o in outputs)]
    frozen, grad = ((sum(outputs), width), (tokens, sum(outputs)))
    made = [
        torch.randn(s, generator=draw, dtype=torch.float64).to(device, dtype) for s in [*sizes, frozen, grad]
    ]
    return [x.requires_grad_() for x in made[:-2]], made[-2], made[-1]


def together(
    trained: list[torch.Tensor], frozen: torch.Tensor, dropout: float, seed: int = 3, wide: bool = False
) -> torch.Tensor:
    x, downs, *ups = trained
    up = torch.block_diag(*ups)
    weight = torch.cat([frozen, up], 1)
    number = torch.tensor([seed], device=x.device)
    return lora_linear(x, downs, weight[:, x.shape[1] :], weight.detach(), number, dropout, wide)[0]


def apart(
    trained: list[torch.Tensor], frozen: torch.Tensor, masks: torch.Tensor | None = None
) -> torch.Tensor:
    """Layer by layer; masks [n, T, D] of the updates' input."""
    x, downs, *ups = trained
    out, start = [], 0
    for i, up in enumerate(ups):
        inner = x if masks is None else x * masks[i]
        out.append(x @ frozen[start : start + len(up)].T + inner @ downs[i].T @ up.T)
        start += len(up)
    return torch.cat(out, 1)


@SHAPES
def test_values_and_gradients_are_those_of_layers_one_by_one(
    tokens: int, width: int, outputs: tuple[int, ...], rank: int
) -> None:
    trained, frozen, grad = layers(tokens, width, outputs, rank, torch.float64)
    found = []
    for out in (together(trained, frozen, 0.0), apart(trained, frozen)):
        found.append([out, *torch.autograd.grad(out, trained, grad)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)


def test_wide_sums_keep_the_share_of_an_update_that_has_only_begun_to_learn() -> None:
    """A share of a thousandth is lost where the sum is rounded to bf16, one output in two or so."""
    (x, downs, up), frozen, _ = layers(50, 64, (32,), 16, torch.bfloat16)
    ups = [x, downs, (1e-4 * up).detach().requires_grad_()]
    exact = [t.detach().double() for t in ups]
    share = apart(exact, 0 * frozen.double())
    found = [
        together(ups, frozen, 0.0, wide=wide).double() - exact[0] @ frozen.double().T
        for wide in (False, True)
    ]
    errors = [((f - share).norm() / share.norm()).item() for f in found]
    assert errors[1] < 0.02 < 0.5 < errors[0]


def test_the_operator_keeps_the_rules_of_operators() -> None:
    (x, downs, up), frozen, _ = layers(5, 64, (32,), 16, torch.float32)
    weight = torch.cat([frozen, up.detach()], 1)
    torch.library.opcheck(lora_linear, (x, downs, up, weight, torch.tensor([3]), 0.0))


@pytest.mark.parametrize("dropout", [0.05, 0.5])
def test_each_update_has_its_own_mask_drawn_alike_in_both_passes(dropout: float) -> None:
    trained, frozen, grad = layers(400, 64, (32, 32), 16, torch.float64)
    masks = drawn(400, 64, 2, 16, dropout, "cpu")
    check_masks(masks, dropout)
    found = []
    for out in (together(trained, frozen, dropout), apart(trained, frozen, masks.double())):
        found.append([out, *torch.autograd.grad(out, trained, grad)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)
    assert not torch.equal(together(trained, frozen, dropout, seed=4), found[0][0])


def drawn(tokens: int, width: int, updates: int, rank: int, dropout: float, device: str) -> torch.Tensor:
    """The masks [n, T, D] of seed 3: what unit vectors as A make of a 1."""
    found = []
    for first in range(0, width, rank):
        downs = torch.zeros(updates, rank, width, device=device)
        seen = min(rank, width - first)
        downs[:, torch.arange(seen), first + torch.arange(seen)] = 1
        weight = torch.zeros(1, width + updates * rank, device=device)
        number = torch.tensor([3], device=device)
        x = torch.ones(tokens, width, device=device)
        _, joined = lora_linear(x, downs, weight[:, width:], weight, number, dropout)
        found.append(joined[:, width:].view(tokens, updates, rank)[..., :seen])
    return torch.cat(found, -1).transpose(0, 1)


def check_masks(masks: torch.Tensor, dropout: float) -> None:
    kept = masks > 0
    assert kept.float().mean().item() == pytest.approx(1 - dropout, abs=0.02)
    torch.testing.assert_close(masks[kept], torch.full_like(masks[kept], 1 / (1 - dropout)))
    for one, other in ((kept[0], kept[-1]), (kept[0][1:], kept[0][:-1]), (kept[0][:, 1:], kept[0][:, :-1])):
        if one is not other and len(one):  # independent of the next update, token and column
            assert (one == other).float().mean().item() == pytest.approx(
                1 - 2 * dropout * (1 - dropout), abs=0.03
            )


class TestKernels:
    pytestmark = NEEDS

    @pytest.fixture(autouse=True)
    def as_on_a_card(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Interpreted kernels take tensors of the CPU."""
        from embedlab.kernels import lora, lora_triton

        def linear(x, down, up, weight, seed, dropout):  # type: ignore[no-untyped-def]
            joined = x.new_full((len(x), weight.shape[1]), float("nan"))
            lora_triton.launch_down(x, down, seed, joined, dropout)
            return joined @ weight.T, joined

        class Linear(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, down, up, weight, seed, dropout, wide=False):  # type: ignore[no-untyped-def,override]
                out, joined = linear(x, down, up, weight, seed, dropout)
                ctx.save_for_backward(joined, down, weight, seed)
                ctx.dropout = dropout
                return out, joined

            @staticmethod
            def backward(ctx, grad, _):  # type: ignore[no-untyped-def,override]
                joined, down, weight, seed = ctx.saved_tensors
                above = grad @ weight
                of_x, of_down = lora_triton.launch_backward(above, joined, down, seed, ctx.dropout)
                return of_x, of_down, grad.T @ joined[:, down.shape[2] :], None, None, None, None

        if DEVICE == "cpu":
            monkeypatch.setitem(globals(), "lora_linear", Linear.apply)
        else:
            monkeypatch.setitem(globals(), "lora_linear", lora.lora_linear)

    @SHAPES
    @pytest.mark.parametrize("dropout", [0.05, 0.5])
    def test_values_and_gradients(
        self, tokens: int, width: int, outputs: tuple[int, ...], rank: int, dropout: float
    ) -> None:
        """Against layers one by one in fp64 with the masks that the kernels draw."""
        trained, frozen, grad = layers(tokens, width, outputs, rank, torch.float32, DEVICE)
        masks = drawn(tokens, width, len(outputs), rank, dropout, DEVICE)
        out = together(trained, frozen, dropout)
        mine = [out, *torch.autograd.grad(out, trained, grad)]
        exact = [x.detach().double().requires_grad_() for x in trained]
        want = apart(exact, frozen.double(), masks.double())
        for a, b in zip(mine, [want, *torch.autograd.grad(want, exact, grad.double())], strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-5 * b.abs().max().item())

    def test_masks(self) -> None:
        check_masks(drawn(400, 64, 3, 16, 0.05, DEVICE), 0.05)

    @pytest.mark.gpu
    @SHAPES
    @pytest.mark.parametrize("wide", [False, True])
    def test_half_precision_on_the_card(
        self, tokens: int, width: int, outputs: tuple[int, ...], rank: int, wide: bool
    ) -> None:
        trained, frozen, grad = layers(tokens, width, outputs, rank, torch.bfloat16, "cuda")
        masks = drawn(tokens, width, len(outputs), rank, 0.05, "cuda")
        out = together(trained, frozen, 0.05, wide=wide)
        assert out.dtype == (torch.float32 if wide else torch.bfloat16)
        mine = [out, *torch.autograd.grad(out, trained, grad.to(out.dtype))]
        exact = [x.detach().double().requires_grad_() for x in trained]
        want = apart(exact, frozen.double(), masks.double())
        for a, b in zip(mine, [want, *torch.autograd.grad(want, exact, grad.double())], strict=True):
            assert (a.double() - b).norm() < 0.02 * b.norm()
