"""What is logged of JTCSE's towers, against its definition in float64; where a tower is looked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from embedlab.backbones import load_backbone
from embedlab.config.backbone import BackboneConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.folder import POOLING_WEIGHTS
from embedlab.encoders.tokenization import Tokenization
from embedlab.errors import UserError
from embedlab.methods.towers import (
    _folder,
    _take_weights,
    gradient_norms,
    linear_cka,
    tower_pooler,
    towers_apart,
)
from embedlab.pooling import build_pooling


def vectors(seed: int, rows: int = 12, width: int = 5) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def cka(a: Tensor, b: Tensor) -> float:
    """HSIC(K, M) / sqrt(HSIC(K, K) HSIC(M, M)) with the centring matrix H, linear kernels (Kornblith et al., 3)."""
    h = torch.eye(len(a), dtype=torch.float64) - 1 / len(a)
    k, m = (x.double() @ x.double().T for x in (a, b))

    def hsic(one: Tensor, two: Tensor) -> float:
        return float((one @ h @ two @ h).trace())

    return hsic(k, m) / (hsic(k, k) * hsic(m, m)) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_logged_is_its_definition(dtype: torch.dtype) -> None:
    """In half precision too, of the vectors as they are."""
    u, v = vectors(0).to(dtype), (3 * vectors(1) + 1).to(dtype)
    found = towers_apart(u, v)
    a, b = u.double(), v.double()
    expected = {
        "towers/cosine": ((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))).mean(),
        "towers/norm_ratio": (a.norm(dim=1) / b.norm(dim=1)).mean(),
        "towers/cka": torch.tensor(cka(u, v)),
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name].double(), value.double(), rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(linear_cka(u, v), found["towers/cka"], rtol=0, atol=0)


def test_equal_rows_are_aligned_with_nothing() -> None:
    assert linear_cka(torch.ones(4, 3), vectors(0, 4)) == 0


def test_gradient_norms_are_over_all_vectors_and_leave_the_graph() -> None:
    u, v, s = (vectors(i).requires_grad_() for i in range(3))
    terms = {"one": (3 * u - 4 * v).sum(), "two": (u.bfloat16() * 2).sum(), "none": s.sum()}
    found = gradient_norms(terms, [u, v])
    assert float(found["gradient/one"]) == pytest.approx(5 * 60**0.5)
    assert float(found["gradient/two"]) == pytest.approx(2 * 60**0.5)
    assert float(found["gradient/none"]) == 0
    torch.autograd.grad(terms["one"], u)


def test_a_new_pooler_is_berts() -> None:
    pooler = tower_pooler([], 64, 3)
    dense, activation = pooler  # type: ignore[misc]
    assert isinstance(activation, torch.nn.Tanh)
    assert 0.019 < dense.weight.detach().std().item() < 0.021
    assert not dense.bias.any()


def test_a_folder_goes_before_its_export_and_that_before_its_best(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no encoder"):
        _folder(str(tmp_path), "method.tower1")
    for name in ("best", "export", "."):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text("{}")
        assert _folder(str(tmp_path), "method.tower1") == tmp_path / name


def test_a_pooling_goes_on_from_the_checkpoints_weights(tiny: Callable[..., Path], tmp_path: Path) -> None:
    backbone, tokenizer = load_backbone(BackboneConfig(source="local", path=str(tiny("bert"))))
    stored = build_pooling("cls_mlp", backbone.info)
    SentenceEncoder(backbone, stored, Tokenization(tokenizer)).save(tmp_path / "stage1")
    fresh = build_pooling("cls_mlp", backbone.info)
    assert not torch.equal(fresh.linear.weight, stored.linear.weight)  # type: ignore[union-attr]
    _take_weights(fresh, tmp_path / "stage1", "method.tower1")
    assert torch.equal(fresh.linear.weight, stored.linear.weight)  # type: ignore[union-attr]
    with pytest.raises(UserError, match="pooling is cls_mlp, not scalar_mix"):
        _take_weights(
            build_pooling({"name": "scalar_mix", "n": 2}, backbone.info), tmp_path / "stage1", "key"
        )
    (tmp_path / "stage1" / POOLING_WEIGHTS).write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="weights do not fit"):
        _take_weights(fresh, tmp_path / "stage1", "method.tower1")
    (tmp_path / "stage1" / POOLING_WEIGHTS).unlink()
    with pytest.raises(UserError, match="pooling is without weights"):
        _take_weights(fresh, tmp_path / "stage1", "method.tower1")
