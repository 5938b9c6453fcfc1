"""The basis by itself: against scipy, orthogonality, and adaptive pooling as a matrix."""

from __future__ import annotations

import pytest
import scipy.fft
import torch

from embedlab.pooling.dct import adaptive_bins, block_basis, token_basis


def test_the_ortho_basis_is_scipys_dct() -> None:
    x = torch.randn(5, dtype=torch.float64)
    ours = block_basis(range(5), 5, "ortho").double() @ x
    theirs = torch.from_numpy(scipy.fft.dct(x.numpy(), norm="ortho"))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_t04_parseval_and_exact_inverse() -> None:
    blocks, tokens = 3, 7
    u = torch.randn(blocks, tokens, 4, dtype=torch.float64)
    gamma = block_basis(range(blocks), blocks, "ortho").double()
    beta = token_basis(torch.arange(tokens, dtype=torch.float64), torch.ones(1, tokens), "ortho")[0]
    x = torch.einsum("an,bl,nld->abd", gamma, beta, u)
    torch.testing.assert_close(x.square().sum(), u.square().sum(), rtol=1e-6, atol=0)
    back = torch.einsum("an,bl,abd->nld", gamma, beta, x)
    torch.testing.assert_close(back, u, rtol=1e-6, atol=1e-6)


def test_t04_the_printed_inverse_needs_its_constants() -> None:
    """Equations 5 and 7: X = 1/(N L) sum kappa_a kappa_b x_ab alpha_ab with kappa_0 = 1 and 2 above."""
    blocks, tokens = 3, 5
    u = torch.randn(blocks, tokens, dtype=torch.float64)
    gamma = block_basis(range(blocks), blocks, "sum").double()
    beta = token_basis(torch.arange(tokens, dtype=torch.float64), torch.ones(1, tokens), "sum")[0]
    x = gamma @ u @ beta.T
    kappa = torch.full((blocks, tokens), 4.0, dtype=torch.float64)
    kappa[0] /= 2
    kappa[:, 0] /= 2
    torch.testing.assert_close(gamma.T @ (kappa * x) @ beta / (blocks * tokens), u, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("norm", ["mean", "ortho", "sum"])
def test_the_norms_differ_by_constants_alone(norm: str) -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    b = torch.arange(3.0)
    plain = token_basis(b, mask, "sum")
    ratio = {"mean": torch.tensor([1, 2**0.5, 2**0.5]) / 4, "ortho": torch.tensor([0.5, 0.5**0.5, 0.5**0.5])}
    expected = plain * ratio[norm][None, :, None] if norm in ratio else plain
    torch.testing.assert_close(token_basis(b, mask, norm), expected)


def test_padding_on_either_side_only_shifts_the_basis() -> None:
    b = torch.arange(4.0)
    alone = token_basis(b, torch.ones(1, 5), "mean")
    right = token_basis(b, torch.tensor([[1, 1, 1, 1, 1, 0, 0]]), "mean")
    left = token_basis(b, torch.tensor([[0, 0, 1, 1, 1, 1, 1]]), "mean")
    assert torch.equal(right[..., :5], alone)
    assert torch.equal(left[..., 2:], alone)
    assert not right[..., 5:].any()
    assert not left[..., :2].any()


def test_a_row_without_tokens_has_a_finite_basis() -> None:
    assert torch.equal(token_basis(torch.arange(3.0), torch.zeros(1, 4), "mean"), torch.zeros(1, 3, 4))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 9, 12, 31])
def test_adaptive_bins_are_adaptive_average_pooling(size: int) -> None:
    x = torch.randn(2, size)
    torch.testing.assert_close(x @ adaptive_bins(6, size).T, torch.nn.functional.adaptive_avg_pool1d(x, 6))
