"""The batched classifiers against the same classifiers trained one at a time with nn.Linear and autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from embedlab.evaluation.transfer import classifier
from embedlab.evaluation.transfer.classifier import ClassifierConfig, Fitted, Job, LabelledVectors, fit_linear
from tests.evaluation.senteval_reference import train_alone


def data(n: int = 120, width: int = 7, classes: int = 3, seed: int = 0) -> tuple[torch.Tensor, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n)
    centres = rng.normal(size=(classes, width))
    return torch.tensor(centres[labels] + 1.5 * rng.normal(size=(n, width)), dtype=torch.float32), labels


def jobs(n: int = 120) -> list[Job]:
    """Splits of different sizes (so several groups), one with a drawn dev split."""
    rng = np.random.default_rng(5)
    made = []
    for size in (90, 90, 89, 90):
        order = rng.permutation(n)
        made.append(Job(np.sort(order[:size]), np.sort(order[size:]), (1e-5, 1e-2, 3e-1)))
    order = rng.permutation(n)
    return [*made, Job(order[:90], order[90:], (1e-3,), drawn=95)]


@pytest.mark.parametrize(
    "config",
    [
        ClassifierConfig(batch_size=16, tenacity=2, epoch_size=2, max_epoch=40),
        ClassifierConfig(optimizer="rmsprop", batch_size=32, tenacity=1, epoch_size=1, max_epoch=30),
    ],
    ids=["adam", "rmsprop"],
)
def test_each_classifier_is_the_one_trained_alone(config: ClassifierConfig) -> None:
    x, y = data()
    fitted = fit_linear(LabelledVectors(x, y, 3), jobs(), config)
    stops = set()
    for job, result in zip(jobs(), fitted, strict=True):
        for i, l2 in enumerate(job.l2):
            train, dev = (x[job.train], y[job.train]), (x[job.dev], y[job.dev])
            model, accuracy, epochs = train_alone(train, dev, l2, config, 3, job.drawn)
            weight = torch.cat([model.weight, model.bias[:, None]], 1).detach()
            torch.testing.assert_close(result.weight[i], weight, rtol=2e-3, atol=2e-4)
            assert result.dev_accuracy[i] == pytest.approx(accuracy, abs=1e-6)
            assert result.epochs[i] == epochs
            stops.add(epochs)
    assert len(stops) > 2, "the fixture must make classifiers stop at different rounds"


def test_l2_reaches_weight_and_bias() -> None:
    x, y = data(n=200, classes=2)
    y[:150] = 1  # an unbalanced set: the bias wants to grow
    job = Job(np.arange(160), np.arange(160, 200), (0.0, 1.0))
    config = ClassifierConfig(optimizer="rmsprop", batch_size=8, epoch_size=30, max_epoch=0)
    (fitted,) = fit_linear(LabelledVectors(x + 1, y, 2), [job], config)
    free, decayed = fitted.weight
    assert decayed[:, -1].abs().max() < 0.5 * free[:, -1].abs().max()
    assert decayed[:, :-1].norm() < 0.5 * free[:, :-1].norm()


def test_threads_and_company_do_not_change_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    vectors, config = LabelledVectors(x, y, 3), ClassifierConfig(batch_size=16, max_epoch=20)

    def fit(threads: int) -> list[Fitted]:
        torch.set_num_threads(threads)
        return fit_linear(vectors, jobs(), config)

    one = fit(1)
    assert torch.get_num_threads() == 1
    # Every job a group of its own: nothing shared but the code.
    monkeypatch.setattr("embedlab.evaluation.transfer.classifier._CPU_GROUP_BYTES", 1)
    try:
        two = fit(2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a.weight, b.weight, rtol=1e-3, atol=1e-4)
        assert a.epochs == b.epochs


def test_global_random_state_is_left_alone() -> None:
    x, y = data()
    torch.manual_seed(3)
    np.random.seed(3)
    expected = torch.rand(1), np.random.rand()
    torch.manual_seed(3)
    np.random.seed(3)
    fit_linear(LabelledVectors(x, y, 3), jobs()[:1], ClassifierConfig(max_epoch=4))
    assert (torch.rand(1), np.random.rand()) == expected


@pytest.mark.gpu
def test_cuda_equals_cpu() -> None:
    x, y = data()
    config = ClassifierConfig(batch_size=16, max_epoch=20)
    on_cpu = fit_linear(LabelledVectors(x, y, 3), jobs(), config)
    on_gpu = fit_linear(LabelledVectors(x.cuda(), y, 3), jobs(), config)
    for a, b in zip(on_cpu, on_gpu, strict=True):
        torch.testing.assert_close(a.weight, b.weight.cpu(), rtol=1e-2, atol=1e-3)


def test_everything_is_made_where_the_vectors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another default device stands for a card: the vectors are not where tensors are made by default."""
    x, y = data()
    config = ClassifierConfig(batch_size=16, tenacity=1, epoch_size=1, max_epoch=3)
    expected = fit_linear(LabelledVectors(x, y, 3), jobs(), config)
    original = classifier._Fit.__init__

    def elsewhere(self: Any, *args: Any) -> None:
        with torch.device("meta"):
            original(self, *args)

    monkeypatch.setattr(classifier._Fit, "__init__", elsewhere)
    for one, other in zip(expected, fit_linear(LabelledVectors(x, y, 3), jobs(), config), strict=True):
        torch.testing.assert_close(one.weight, other.weight)
