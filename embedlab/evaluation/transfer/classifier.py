"""Linear classifiers as SentEval trains them, many at a time.

SentEval's transfer protocol fits hundreds of small softmax classifiers on the same vectors: one for each fold
and each L2 value. Each is tiny (width x classes), so one at a time is all overhead. Here the classifiers of
one shape are rows of one tensor and take each optimiser step together; every one keeps its own rows, its own
L2 and its own early stop, and ends with the weights it would have had alone
(`tests/evaluation/test_classifier.py` trains them alone).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
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
    """Fit every job; results in the order given, and the same for any number of threads.

    Jobs of one size take the same steps: they are cut anew into groups of like size after each round, of the
    jobs that are still in training, so that late stoppers do not train in nearly empty groups. On a CPU the
    groups run on `torch.get_num_threads()` threads, each group on one: its matrices are too small to split.
    """
    alike: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for i, job in enumerate(jobs):
        alike[len(job.train), job.drawn, len(job.l2)].append(i)
    on_cpu = data.x.device.type == "cpu"
    row_bytes = config.batch_size * data.x.shape[1] * data.x.element_size()
    size = max(1, (_CPU_GROUP_BYTES if on_cpu else _CUDA_GROUP_BYTES) // row_bytes)
    start = _initial_weight(data, config.seed)
    fits = [_Fit(data, [jobs[i] for i in members], start, config) for members in alike.values()]

    threads = torch.get_num_threads()
    try:
        # A pool even for one thread: set_num_threads is per thread, and the caller's must not change under
        # it.
        with ThreadPoolExecutor(
            threads if on_cpu else 1, initializer=_one_thread if on_cpu else None
        ) as pool:
            for _ in range(0, config.max_epoch + 1, config.epoch_size):
                running = [fit for fit in fits if fit.active]
                if not running:
                    break
                groups = [group for fit in running for group in fit.groups(size)]
                list(pool.map(_Group.train, groups))
                for fit in running:
                    fit.finish_round([group for group in groups if group.fit is fit])
    finally:
        torch.set_num_threads(threads)  # MKL's own setting is one for the process
    results = {
        i: fitted for members, fit in zip(alike.values(), fits, strict=True)
        for i, fitted in zip(members, fit.results(), strict=True)
    }  # fmt: skip
    return [results[i] for i in range(len(jobs))]


def _one_thread() -> None:
    torch.set_num_threads(1)


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

    buffers = 2  # mean, mean square

    @staticmethod
    def update(weight: Tensor, grad: Tensor, state: Sequence[Tensor], step: int) -> None:
        """One step in place; `step` counts from 1."""
        mean, square = state
        mean.lerp_(grad, 1 - 0.9)
        square.mul_(0.999).addcmul_(grad, grad, value=1 - 0.999)
        scale = square.sqrt().div_(math.sqrt(1 - 0.999**step)).add_(1e-8)
        weight.addcdiv_(mean, scale, value=-1e-3 / (1 - 0.9**step))


class _RMSprop:
    """torch.optim.RMSprop with its defaults, for one tensor."""

    buffers = 1  # mean square

    @staticmethod
    def update(weight: Tensor, grad: Tensor, state: Sequence[Tensor], step: int) -> None:
        """One step in place."""
        (square,) = state
        square.mul_(0.99).addcmul_(grad, grad, value=1 - 0.99)
        weight.addcdiv_(grad, square.sqrt().add_(1e-8), value=-1e-2)


_OPTIMIZERS: dict[str, type[_Adam] | type[_RMSprop]] = {"adam": _Adam, "rmsprop": _RMSprop}


class _Fit:
    """The classifiers of J jobs with the same number n of training rows, in step with one another."""

    def __init__(
        self, data: LabelledVectors, jobs: Sequence[Job], start: Tensor, config: ClassifierConfig
    ) -> None:
        self.data, self.config = data, config
        self.optimizer = _OPTIMIZERS[config.optimizer]
        device, j, r, c = data.x.device, len(jobs), len(jobs[0].l2), data.classes
        self.n = len(jobs[0].train)
        self.rows = torch.as_tensor(np.stack([job.train for job in jobs]), device=device)  # [J, n]
        self.dev = [torch.as_tensor(job.dev, device=device) for job in jobs]
        # numpy's legacy stream: what np.random.seed(seed) starts upstream
        self.shuffle = np.random.RandomState(config.seed)
        if jobs[0].drawn:
            self.shuffle.permutation(jobs[0].drawn)
        # Of the jobs in training, class-major, [A, R * C, D + 1]: both products of a step then stream along D,
        # several times faster on a CPU than D-major.
        l2 = torch.tensor([job.l2 for job in jobs], dtype=data.x.dtype, device=device)
        self.l2 = l2.repeat_interleave(c, dim=1)[:, :, None]
        self.weight = start.repeat(j, r, 1)
        self.state = [torch.zeros_like(self.weight) for _ in range(self.optimizer.buffers)]
        self.active = list(range(j))  # the jobs with a classifier in training
        self.steps = self.epoch = 0
        self.orders: list[Tensor] = []  # this round's permutations of the n rows

        self.best = self.weight.view(j, r, c, -1).clone()
        self.best_correct = torch.full((j, r), -1, dtype=torch.int64, device=device)
        self.misses = torch.zeros((j, r), dtype=torch.int64, device=device)
        self.stopped = torch.zeros((j, r), dtype=torch.bool, device=device)
        self.epochs = torch.zeros((j, r), dtype=torch.int64, device=device)

    def groups(self, size: int) -> list[_Group]:
        """The active jobs in groups of at most `size`, for one round."""
        self.orders = [
            torch.as_tensor(self.shuffle.permutation(self.n), device=self.rows.device)
            for _ in range(self.config.epoch_size)
        ]
        count = -(-len(self.active) // size)
        bounds = [len(self.active) * i // count for i in range(count + 1)]
        return [_Group(self, slice(a, b)) for a, b in itertools.pairwise(bounds)]

    def finish_round(self, groups: Sequence[_Group]) -> None:
        """Keep what is the best so far, and let go of the jobs whose classifiers have all stopped."""
        self.epoch += self.config.epoch_size
        self.steps += self.config.epoch_size * -(-self.n // self.config.batch_size)
        correct = torch.cat([group.correct for group in groups])
        active = torch.tensor(self.active, device=self.rows.device)
        current = self.weight.view(len(active), *self.best.shape[1:])
        training = ~self.stopped[active]
        better = training & (correct > self.best_correct[active])
        missed = training & ~better
        self.best_correct[active] = torch.where(better, correct, self.best_correct[active])
        self.best[active] = torch.where(better[:, :, None, None], current, self.best[active])
        self.epochs[active] = torch.where(training, self.epoch, self.epochs[active])
        self.stopped[active] |= missed & (self.misses[active] >= self.config.tenacity)
        self.misses[active] += missed
        keep = ~self.stopped[active].all(dim=1)
        if not bool(keep.all()):
            self.active = active[keep].tolist()
            self.rows, self.l2, self.weight = self.rows[keep], self.l2[keep], self.weight[keep]
            self.state = [buffer[keep] for buffer in self.state]

    def results(self) -> list[Fitted]:
        """One for each job."""
        dev_rows = torch.tensor([len(dev) for dev in self.dev], dtype=torch.float64)
        accuracy = self.best_correct.cpu().double() / dev_rows[:, None]
        return [
            Fitted(self.best[i], accuracy[i].tolist(), self.epochs[i].tolist()) for i in range(len(self.dev))
        ]


class _Group:
    """A slice of a fit's active jobs, small enough for the cache of a core; `correct` is there once trained."""

    correct: Tensor  # [G, R]: right answers on each job's dev rows after the round

    def __init__(self, fit: _Fit, part: slice) -> None:
        self.fit, self.part = fit, part

    def train(self) -> None:
        """One round: `epoch_size` passes over the training rows, and the count on the dev rows."""
        fit, part = self.fit, self.part
        weight = fit.weight[part]  # views: the steps change the fit's own tensors
        state = [buffer[part] for buffer in fit.state]
        step = fit.steps
        for order in fit.orders:
            step = _pass(
                fit.data,
                weight,
                fit.l2[part],
                fit.rows[part][:, order],
                fit.config.batch_size,
                lambda grad, at: fit.optimizer.update(weight, grad, state, at),
                step,
            )
        current = weight.view(len(weight), *fit.best.shape[1:])
        self.correct = torch.stack(
            [fit.data.correct(current[k], fit.dev[i]) for k, i in enumerate(fit.active[part])]
        )


def _pass(
    data: LabelledVectors,
    weight: Tensor,
    l2: Tensor,
    order: Tensor,
    batch_size: int,
    update: Callable[[Tensor, int], None],
    step: int,
) -> int:
    """One pass over the rows `order` [G, n] of each job, in batches: `update(gradient, step)` changes `weight`
    [G, R * C, D + 1]. Returns the number of steps so far.
    """
    g = len(order)
    target = data.one_hot[order].permute(0, 2, 1)[:, None]  # [G, 1, C, n]
    buffer = data.x.new_empty(g * batch_size, data.x.shape[1])
    grad = torch.empty_like(weight)
    for rows, one_hot in zip(order.split(batch_size, dim=1), target.split(batch_size, dim=3), strict=True):
        b = rows.shape[1]
        x = torch.index_select(data.x, 0, rows.reshape(-1), out=buffer[: g * b]).view(g, b, -1)
        logits = torch.bmm(weight, x.transpose(1, 2))  # [G, R * C, B]
        # Gradient of the mean cross-entropy with respect to the logits, times B: softmax - one-hot.
        error = logits.view(g, -1, data.classes, b).softmax(dim=2).sub_(one_hot)
        torch.mul(weight, l2, out=grad)
        grad.baddbmm_(error.view_as(logits), x, alpha=1 / b)
        step += 1
        update(grad, step)
    return step
