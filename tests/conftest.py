"""Fixtures that every part's tests share."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "disabled")

import pytest
import torch

from embedlab.console import LogHandler
from tests.support import tiny_backbone

pytest_plugins = ["tests.tiny_run"]

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny("bert", layers=4) -> folder of a random model with its tokenizer, made once a session.

    The folders are shared: copy one before changing it.
    """
    made: dict[tuple[Any, ...], Path] = {}

    def get(model_type: str = "bert", **arch: Any) -> Path:
        key = (model_type, *sorted(arch.items()))
        if key not in made:
            made[key] = tiny_backbone(model_type, tmp_path_factory.mktemp("tiny") / model_type, **arch)
        return made[key]

    return get


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What takes more leaves them to the tests after it, whose last digits then are not those of other processes."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_log_of_tests_before() -> None:
    """A command that ran in this process shows its log on standard error, where the next test wants one line, and
    writes it into a folder that may be gone."""
    for logger in (logging.getLogger(), logging.getLogger("embedlab")):
        for handler in list(logger.handlers):
            hydras = type(handler) in (LogHandler, logging.FileHandler)
            if hydras or getattr(getattr(handler, "stream", None), "closed", False):
                logger.removeHandler(handler)
