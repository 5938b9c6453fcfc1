"""Linear classifiers as SentEval trains them, many at a time.

SentEval's transfer protocol fits hundreds of small softmax classifiers on the same vectors: one for each fold
and each L2 value. Each is tiny (width x classes), so one at a time is all overhead. Here the classifiers of
one shape are rows of one tensor and take each optimiser step together; every one keeps its own rows, its own
L2 and its own early stop, and ends with the weights it would have had alone
(`tests/evaluation/test_classifier.py` trains them alone).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Largest gathered batch of one group, [jobs, batch, width] floats. On a CPU it should stay in the cache next
# to the core; on a GPU a big one amortises kernel launches.
_CPU_GROUP_BYTES = 1 << 20
_CUDA_GROUP_BYTES = 1 << 28


@dataclass(frozen=True)
class ClassifierConfig:
    """Optimiser and stopping rule of one classifier (SentEval `tools/classifier.py`, nhid=0).

    A round is `epoch_size` passes over the training rows, then one look at the dev accuracy. Training ends
    after `tenacity + 1` rounds without a new best (counted over the whole run, not in a row) or once
    `max_epoch` passes are exceeded; the weights of the best round are kept. `l2` in a `Job` is the
    optimiser's (coupled) weight decay, on the bias too. Learning rates are the optimisers' defaults: 1e-3 for
    adam, 1e-2 for rmsprop.
    """

    optimizer: str = "adam"
    batch_size: int = 64
    tenacity: int = 5
    epoch_size: int = 4
    max_epoch: int = 200
    seed: int = 1111


@dataclass(frozen=True)
class Job:
    """One split of the rows, tried with each of `l2`: `train` rows are fitted, `dev` rows decide when to
    stop.

    `drawn`: length of a permutation already taken from the seeded stream before training starts (SentEval
    draws its 5 % dev split that way), 0 for none.
    """

    train: np.ndarray
    dev: np.ndarray
    l2: tuple[float, ...]
    drawn: int = 0


@dataclass(frozen=True)
class Fitted:
    """The classifiers of one job, in the order of its `l2` (R of them)."""

    weight: Tensor  # [R, classes, D + 1], the last column is the bias
    dev_accuracy: list[float]  # 0..1, of the round that was kept
    epochs: list[int]  # passes over the training rows until the stop


class LabelledVectors:
    """Features [N, D] and integer labels [N] (0..classes-1), with a column of ones for the bias."""

    def __init__(self, features: Tensor, labels: np.ndarray, classes: int) -> None:
        features = features.detach().float()
        self.x = torch.cat([features, features.new_ones(len(features), 1)], dim=1).contiguous()
        self.y = torch.as_tensor(np.asarray(labels), dtype=torch.int64, device=self.x.device)
        self.classes = classes
        self.one_hot = torch.nn.functional.one_hot(self.y, classes).to(self.x.dtype)

    def correct(self, weight: Tensor, rows: Tensor) -> Tensor:
        """Count of right answers [R] of classifiers `weight` [R, classes, D + 1] on `rows` [m]."""
        return (self.predict(weight, rows) == self.y[rows]).sum(dim=1)

    def predict(self, weight: Tensor, rows: Tensor) -> Tensor:
        """Predicted labels [R, m]."""
        logits = torch.matmul(weight, self.x[rows].T)  # [R, classes, m]
        return logits.argmax(dim=1)


def fit_linear(data: LabelledVectors, jobs: Sequence[Job], config: ClassifierConfig) -> list[Fitted]:
    """Fit every job; results in the order given. Independent of the number of threads.

    On a CPU the groups run on `torch.get_num_threads()` threads, each group on one: its matrices are too
    small to split.
    """
    groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for i, job in enumerate(jobs):
        groups[len(job.train), job.drawn, len(job.l2)].append(i)
    on_cpu = data.x.device.type == "cpu"
    row_bytes = config.batch_size * data.x.shape[1] * data.x.element_size()
    size = max(1, (_CPU_GROUP_BYTES if on_cpu else _CUDA_GROUP_BYTES) // row_bytes)
    chunks = [members[i : i + size] for members in groups.values() for i in range(0, len(members), size)]

    start = _initial_weight(data, config.seed)
    results: dict[int, Fitted] = {}

    def run(chunk: list[int]) -> None:
        if on_cpu:
            torch.set_num_threads(1)
        fitted = _fit_group(data, [jobs[i] for i in chunk], start, config)
        results.update(zip(chunk, fitted, strict=True))

    threads = torch.get_num_threads()
    try:
        # A pool even for one thread: set_num_threads is per thread, and the caller's must not change under
        # it.
        with ThreadPoolExecutor(max_workers=threads if on_cpu else 1) as pool:
            list(pool.map(run, chunks))
    finally:
        torch.set_num_threads(threads)  # MKL's own setting is one for the process
    return [results[i] for i in range(len(jobs))]


def _initial_weight(data: LabelledVectors, seed: int) -> Tensor:
    """[classes, D + 1]: what `nn.Linear` starts from after `torch.manual_seed(seed)`, the same for every
    classifier.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = torch.nn.Linear(data.x.shape[1] - 1, data.classes)
    return torch.cat([layer.weight.detach(), layer.bias.detach()[:, None]], dim=1).to(data.x.device)


class _Adam:
    """torch.optim.Adam with its defaults, for one tensor. Written out: an optimiser object costs more a step
    than all the arithmetic of a small group.
    """

    def __init__(self, weight: Tensor) -> None:
        self.mean = torch.zeros_like(weight)
        self.square = torch.zeros_like(weight)
        self.steps = 0

    def update(self, weight: Tensor, grad: Tensor) -> None:
        self.steps += 1
        self.mean.lerp_(grad, 1 - 0.9)
        self.square.mul_(0.999).addcmul_(grad, grad, value=1 - 0.999)
        scale = self.square.sqrt().div_(math.sqrt(1 - 0.999**self.steps)).add_(1e-8)
        weight.addcdiv_(self.mean, scale, value=-1e-3 / (1 - 0.9**self.steps))

    def keep(self, jobs: Tensor) -> None:
        self.mean, self.square = self.mean[jobs], self.square[jobs]


class _RMSprop:
    """torch.optim.RMSprop with its defaults, for one tensor."""

    def __init__(self, weight: Tensor) -> None:
        self.square = torch.zeros_like(weight)

    def update(self, weight: Tensor, grad: Tensor) -> None:
        self.square.mul_(0.99).addcmul_(grad, grad, value=1 - 0.99)
        weight.addcdiv_(grad, self.square.sqrt().add_(1e-8), value=-1e-2)

    def keep(self, jobs: Tensor) -> None:
        self.square = self.square[jobs]


_OPTIMIZERS: dict[str, type[_Adam] | type[_RMSprop]] = {"adam": _Adam, "rmsprop": _RMSprop}


def _fit_group(
    data: LabelledVectors, jobs: Sequence[Job], start: Tensor, config: ClassifierConfig
) -> list[Fitted]:
    """Train J jobs x R L2 values with the same number of training rows, in step with one another."""
    x, device = data.x, data.x.device
    j, r, c, d = len(jobs), len(jobs[0].l2), data.classes, data.x.shape[1]
    n = len(jobs[0].train)
    rows = torch.as_tensor(np.stack([job.train for job in jobs]), device=device)  # [J, n]
    dev = [torch.as_tensor(job.dev, device=device) for job in jobs]
    l2 = torch.tensor([job.l2 for job in jobs], dtype=x.dtype, device=device).repeat_interleave(c, dim=1)[
        :, :, None
    ]

    # Class-major, [J, R * C, D + 1]: both products below then stream along D, several times faster on a CPU
    # than D-major.
    weight = start.repeat(j, r, 1)
    optimizer = _OPTIMIZERS[config.optimizer](weight)
    shuffle = np.random.RandomState(
        config.seed
    )  # numpy's legacy stream: what np.random.seed(seed) starts upstream
    if jobs[0].drawn:
        shuffle.permutation(jobs[0].drawn)

    best = weight.view(j, r, c, d).clone()
    best_correct = torch.full((j, r), -1, dtype=torch.int64, device=device)
    misses = torch.zeros((j, r), dtype=torch.int64, device=device)
    stopped = torch.zeros((j, r), dtype=torch.bool, device=device)
    epochs = torch.zeros((j, r), dtype=torch.int64, device=device)
    active = torch.arange(
        j, device=device
    )  # jobs that still have a classifier in training; `weight` holds only these

    epoch = 0
    while len(active) and epoch <= config.max_epoch:
        for _ in range(config.epoch_size):
            order = rows[:, torch.as_tensor(shuffle.permutation(n), device=device)]
            _pass(data, weight, l2, order, config.batch_size, optimizer)
        epoch += config.epoch_size

        current = weight.view(len(active), r, c, d)
        correct = torch.stack([data.correct(current[k], dev[i]) for k, i in enumerate(active.tolist())])
        training = ~stopped[active]
        better = training & (correct > best_correct[active])
        missed = training & ~better
        best_correct[active] = torch.where(better, correct, best_correct[active])
        best[active] = torch.where(better[:, :, None, None], current, best[active])
        epochs[active] = torch.where(training, epoch, epochs[active])
        stopped[active] |= missed & (misses[active] >= config.tenacity)
        misses[active] += missed

        keep = ~stopped[active].all(dim=1)
        if not bool(keep.all()):
            active, rows, l2, weight = active[keep], rows[keep], l2[keep], weight[keep]
            optimizer.keep(keep)

    dev_rows = torch.tensor([len(job.dev) for job in jobs], dtype=torch.float64)
    accuracy = best_correct.cpu().double() / dev_rows[:, None]
    return [Fitted(best[i], accuracy[i].tolist(), epochs[i].tolist()) for i in range(j)]


def _pass(
    data: LabelledVectors,
    weight: Tensor,
    l2: Tensor,
    order: Tensor,
    batch_size: int,
    optimizer: _Adam | _RMSprop,
) -> None:
    """One pass over the rows `order` [J, n] of each job, in batches; changes `weight` [J, R * C, D + 1] in
    place.
    """
    j = len(order)
    target = data.one_hot[order].permute(0, 2, 1)[:, None]  # [J, 1, C, n]
    buffer = data.x.new_empty(j * batch_size, data.x.shape[1])
    grad = torch.empty_like(weight)
    for rows, one_hot in zip(order.split(batch_size, dim=1), target.split(batch_size, dim=3), strict=True):
        b = rows.shape[1]
        x = torch.index_select(data.x, 0, rows.reshape(-1), out=buffer[: j * b]).view(j, b, -1)
        logits = torch.bmm(weight, x.transpose(1, 2))  # [J, R * C, B]
        # Gradient of the mean cross-entropy with respect to the logits, times B: softmax - one-hot.
        error = logits.view(j, -1, data.classes, b).softmax(dim=2).sub_(one_hot)
        torch.mul(weight, l2, out=grad)
        grad.baddbmm_(error.view_as(logits), x, alpha=1 / b)
        optimizer.update(weight, grad)
