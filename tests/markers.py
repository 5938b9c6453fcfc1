"""A pytest plugin (`-p tests.markers`): skips what this machine cannot run, each with its reason."""

from __future__ import annotations

import functools
import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run tests marked slow too (or set EMBEDLAB_SLOW=1)")
    parser.addoption(
        "--whole", action="store_true", help="run every case of tests that have a sample (marked whole)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Outside of a sample are hundreds of cases: they are left out, not skipped one by one."""
    if not config.getoption("--whole"):
        whole = [item for item in items if item.get_closest_marker("whole") is not None]
        config.hook.pytest_deselected(items=whole)
        items[:] = [item for item in items if item.get_closest_marker("whole") is None]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if (marker := item.get_closest_marker("gpu")) is not None:
        needed, found = (marker.args or (1,))[0], _gpus()
        if found < needed:
            pytest.skip(f"needs {needed} CUDA device{'s' if needed > 1 else ''}, found {found}")
    if item.get_closest_marker("hub") is not None and (reason := _no_hub()):
        pytest.skip(reason)
    if item.get_closest_marker("slow") is not None and not _slow_wanted(item.config):
        pytest.skip("slow: --slow or EMBEDLAB_SLOW=1 runs it")


def _slow_wanted(config: pytest.Config) -> bool:
    # The environment variable reaches the workers of pytest-xdist and nested runs as well.
    return bool(config.getoption("--slow")) or os.environ.get("EMBEDLAB_SLOW", "0") == "1"


@functools.cache
def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


@functools.cache
def _no_hub() -> str:
    """Why the model hub cannot be used; empty if it can."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return "the hub is off in tests: HF_HUB_OFFLINE=0 turns it on"
    try:
        HfApi().model_info("google-bert/bert-base-uncased", timeout=5)
    except Exception as error:
        return f"the model hub cannot be reached: {type(error).__name__}"
    return ""
