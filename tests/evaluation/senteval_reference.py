"""SentEval's classifier and its nested folds, one classifier at a time, as plainly as possible."""

from __future__ import annotations

import copy

import numpy as np
import torch
from sklearn.model_selection import StratifiedKFold

from embedlab.evaluation.transfer.classifier import ClassifierConfig


def train_alone(
    train: tuple[torch.Tensor, np.ndarray],
    dev: tuple[torch.Tensor, np.ndarray],
    l2: float,
    config: ClassifierConfig,
    classes: int,
    drawn: int = 0,
) -> tuple[torch.nn.Linear, float, int]:
    """One nn.Linear by autograd and torch.optim: the kept model, its dev accuracy, passes until the stop."""
    stream = np.random.RandomState(config.seed)
    torch.manual_seed(config.seed)
    model = torch.nn.Linear(train[0].shape[1], classes)
    kind = {"adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop}[config.optimizer]
    optimizer = kind(model.parameters(), weight_decay=l2)
    if drawn:
        stream.permutation(drawn)
    x, y = train[0], torch.tensor(train[1])
    best, kept, misses, passes = -1.0, model, 0, 0
    while passes <= config.max_epoch:
        for _ in range(config.epoch_size):
            for rows in torch.tensor(stream.permutation(len(x))).split(config.batch_size):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
        passes += config.epoch_size
        accuracy = score(model, *dev)
        if accuracy > best:
            best, kept = accuracy, copy.deepcopy(model)
        else:
            if misses >= config.tenacity:
                break
            misses += 1
    return kept, best, passes


def score(model: torch.nn.Linear, x: torch.Tensor, y: np.ndarray) -> float:
    return float((model(x).argmax(1).numpy() == y).mean())


def nested_folds(
    x: torch.Tensor, y: np.ndarray, folds: int, grid: tuple[float, ...], config: ClassifierConfig
) -> tuple[float, float, list[float]]:
    """(dev accuracy, test accuracy, chosen L2 of each outer fold) of the inner k-fold protocol, in
    percent.
    """
    classes = int(y.max()) + 1
    outer = StratifiedKFold(folds, shuffle=True, random_state=1111)
    inner = StratifiedKFold(folds, shuffle=True, random_state=1111)
    devs, tests, chosen = [], [], []
    for rest, held in outer.split(x, y):
        xr, yr = x[rest], y[rest]
        means = []
        for l2 in grid:
            found = [
                train_alone((xr[a], yr[a]), (xr[b], yr[b]), l2, config, classes)[1]
                for a, b in inner.split(xr, yr)
            ]
            means.append(round(100 * float(np.mean(found)), 2))
        l2 = grid[int(np.argmax(means))]
        order = np.random.RandomState(config.seed).permutation(len(xr))
        cut = int(0.05 * len(xr))
        dev, train = order[:cut], order[cut:]
        model, _, _ = train_alone(
            (xr[train], yr[train]), (xr[dev], yr[dev]), l2, config, classes, drawn=len(xr)
        )
        devs.append(max(means))
        tests.append(round(100 * score(model, x[held], y[held]), 2))
        chosen.append(l2)
    return round(float(np.mean(devs)), 2), round(float(np.mean(tests)), 2), chosen
