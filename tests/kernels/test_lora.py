"""Linear layers of one input with their LoRA updates: values, gradients and masks, by torch and by the kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embedlab.kernels.lora import _draw, lora_linear
from tests.interpreted import DEVICE, NEEDS

SHAPES = pytest.mark.parametrize(
    ("tokens", "width", "outputs", "rank"),
    [(5, 64, (64,), 16), (70, 100, (32, 48), 16), (131, 65, (96, 32, 32), 32)],
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


def test_without_dropout_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is captured, as of development scoring, there is no generator to be had."""
    trained, frozen, _ = layers(5, 64, (32,), 16, torch.float32)
    monkeypatch.setattr(torch, "Generator", None)
    together(trained, frozen, 0.0)


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


@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_the_operator_keeps_the_rules_of_operators(dropout: float) -> None:
    (x, downs, up), frozen, _ = layers(5, 64, (32,), 16, torch.float32)
    weight = torch.cat([frozen, up.detach()], 1)
    torch.library.opcheck(lora_linear, (x, downs, up, weight, torch.tensor([3]), dropout))


@pytest.mark.parametrize("dropout", [0.05, 0.5])
def test_each_update_has_its_own_mask_drawn_alike_in_both_passes(dropout: float) -> None:
    trained, frozen, grad = layers(400, 64, (32, 32), 16, torch.float64)
    masks = drawn(400, 64, 2, dropout, "cpu")
    check_masks(masks, dropout)
    found = []
    for out in (together(trained, frozen, dropout), apart(trained, frozen, masks)):
        found.append([out, *torch.autograd.grad(out, trained, grad)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)
    assert torch.equal(together(trained, frozen, dropout), found[0][0])
    assert not torch.equal(together(trained, frozen, dropout, seed=4), found[0][0])


def drawn(tokens: int, width: int, updates: int, dropout: float, device: str, seed: int = 3) -> torch.Tensor:
    """The masks [n, T, D] in fp64: 0, or 1 / (1 - p) of the probability that is drawn."""
    down = torch.zeros(updates, 16, width, device=device)
    weight = torch.zeros(1, width + updates * 16, device=device)
    x, number = torch.ones(tokens, width, device=device), torch.tensor([seed], device=device)
    bits = lora_linear(x, down, weight[:, width:], weight, number, dropout)[2].cpu()
    assert bits.shape == (updates, tokens, -(-width // 32))
    each = np.unpackbits(bits.numpy().view(np.uint8), axis=-1, bitorder="little")[..., :width]
    return torch.from_numpy(each).to(device, torch.float64) / (1 - round(dropout * 2**16) / 2**16)


def check_masks(masks: torch.Tensor, dropout: float) -> None:
    kept = masks > 0
    assert kept.float().mean().item() == pytest.approx(1 - dropout, abs=0.005)
    for one, other in ((kept[0], kept[-1]), (kept[0][1:], kept[0][:-1]), (kept[0][:, 1:], kept[0][:, :-1])):
        if one is not other and len(one):  # independent of the next update, token and column
            assert (one == other).float().mean().item() == pytest.approx(
                1 - 2 * dropout * (1 - dropout), abs=0.03
            )


@pytest.mark.parametrize("dropped", [1, 3277, 2**15, 2**16 - 1])
def test_of_all_sixteen_bits_so_many_drop(dropped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of a value are those that 16 draws give it: each of 2^16 values once."""
    draws = iter(range(16))

    def random_(self: torch.Tensor, *limits: int, generator: torch.Generator) -> torch.Tensor:
        digit = next(draws)
        return self.copy_(-(torch.arange(2**16, dtype=torch.int32).view_as(self) >> digit & 1))

    monkeypatch.setattr(torch.Tensor, "random_", random_)
    bits = torch.empty(1, 1, 2**16, dtype=torch.int32)
    _draw(bits, torch.tensor([0]), dropped / 2**16)
    assert int((bits == 0).sum()) == dropped
    assert int((bits == -1).sum()) == 2**16 - dropped


def philox(seed: int, first: np.ndarray, third: int, rounds: int) -> list[np.ndarray]:
    """Salmon et al. 2011: Philox-4x32 of the counters (first, 0, third, 0)."""
    low, zero = np.uint64(2**32 - 1), np.zeros(len(first), np.uint64)
    c = [first.astype(np.uint64), zero, zero + np.uint64(third), zero]
    keys = [seed, 0]
    for _ in range(rounds):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        high = [p >> np.uint64(32) for p in (b, a)]
        c = [high[0] ^ c[1] ^ np.uint64(keys[0]), b & low, high[1] ^ c[3] ^ np.uint64(keys[1]), a & low]
        keys = [(k + step) % 2**32 for k, step in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)]
    return c


class TestKernels:
    pytestmark = NEEDS

    @pytest.fixture(autouse=True)
    def as_on_a_card(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Interpreted kernels take tensors of the CPU."""
        from embedlab.kernels import lora, lora_triton

        if DEVICE == "cpu":
            monkeypatch.setattr(lora, "_kernels", lambda x, dropout: lora_triton if dropout > 0 else None)

    @SHAPES
    @pytest.mark.parametrize("dropout", [0.05, 0.5])
    def test_values_and_gradients(
        self,
        tokens: int,
        width: int,
        outputs: tuple[int, ...],
        rank: int,
        dropout: float,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Against layers one by one in fp64 with the masks that the kernels draw."""
        if dropout == 0.5:  # several blocks of tokens to a program, the last of them beyond the end
            monkeypatch.setattr("embedlab.kernels.lora_triton._PROGRAMS", 1)
        trained, frozen, grad = layers(tokens, width, outputs, rank, torch.float32, DEVICE)
        masks = drawn(tokens, width, len(outputs), dropout, DEVICE)
        out = together(trained, frozen, dropout)
        mine = [out, *torch.autograd.grad(out, trained, grad)]
        exact = [x.detach().double().requires_grad_() for x in trained]
        want = apart(exact, frozen.double(), masks)
        for a, b in zip(mine, [want, *torch.autograd.grad(want, exact, grad.double())], strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-5 * b.abs().max().item())

    @pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
    def test_both_forms_give_the_same_of_the_same_masks(
        self, dtype: torch.dtype, most: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from embedlab.kernels import lora

        trained, frozen, grad = layers(70, 100, (32, 48), 16, dtype, DEVICE)
        found = []
        for form in (lora._kernels, lambda *_: None):
            monkeypatch.setattr(lora, "_kernels", form)
            out = together(trained, frozen, 0.3)
            masks = out.grad_fn.saved_tensors[1]  # type: ignore[union-attr]
            monkeypatch.setattr(lora, "_draw", lambda bits, *_, same=masks: bits.copy_(same))
            found.append([out, *torch.autograd.grad(out, trained, grad)])
        for mine, plain in zip(*found, strict=True):
            assert (mine - plain).float().norm() < most * plain.float().norm()

    @pytest.mark.parametrize(("updates", "tokens", "width"), [(3, 400, 64), (2, 70, 100), (1, 5, 30)])
    def test_masks(self, updates: int, tokens: int, width: int) -> None:
        """Bit for bit: what is drawn is of seed and shape alone, on any device."""
        masks, words = drawn(tokens, width, updates, 0.05, DEVICE), -(-width // 32)
        kept = np.full(updates * tokens * words, 2**32 - 1, np.uint64)
        for i in range(4):
            for j, word in enumerate(philox(3, np.arange(len(kept)), i, 6)):
                kept = kept & word if 3277 >> (4 * i + j) & 1 else kept | word
        each = np.unpackbits(kept.astype(np.uint32).view(np.uint8), bitorder="little")
        want = each.reshape(updates, tokens, 32 * words)[..., :width]
        assert torch.equal((masks > 0).cpu(), torch.from_numpy(want) > 0)
        if tokens == 400:
            check_masks(masks, 0.05)
            assert not torch.equal(masks, drawn(tokens, width, updates, 0.05, DEVICE, seed=4))

    def test_the_operator_keeps_the_rules_of_operators(self) -> None:
        (x, downs, up), frozen, _ = layers(5, 64, (32,), 16, torch.float32, DEVICE)
        weight, seed = torch.cat([frozen, up.detach()], 1), torch.tensor([3], device=DEVICE)
        torch.library.opcheck(lora_linear, (x, downs, up, weight, seed, 0.05))

    @pytest.mark.gpu
    @SHAPES
    @pytest.mark.parametrize("wide", [False, True])
    def test_half_precision_on_the_card(
        self, tokens: int, width: int, outputs: tuple[int, ...], rank: int, wide: bool
    ) -> None:
        trained, frozen, grad = layers(tokens, width, outputs, rank, torch.bfloat16, "cuda")
        masks = drawn(tokens, width, len(outputs), 0.05, "cuda")
        out = together(trained, frozen, 0.05, wide=wide)
        assert out.dtype == (torch.float32 if wide else torch.bfloat16)
        mine = [out, *torch.autograd.grad(out, trained, grad.to(out.dtype))]
        exact = [x.detach().double().requires_grad_() for x in trained]
        want = apart(exact, frozen.double(), masks)
        for a, b in zip(mine, [want, *torch.autograd.grad(want, exact, grad.double())], strict=True):
            assert (a.double() - b).norm() < 0.02 * b.norm()
