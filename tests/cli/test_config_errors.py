"""Hydra's errors, explained."""

from __future__ import annotations

import pytest
from hydra.errors import MissingConfigException

from embedlab.cli.config_errors import explain


@pytest.mark.parametrize("name", ["submitit_slurm", "submitit_local"])
def test_a_launcher_that_is_not_installed_names_its_extra(name: str) -> None:
    missing = f"hydra/launcher/{name}"
    found = explain(MissingConfigException(f"Could not load '{missing}'.", missing, ["local", "slurm"]))
    assert found is not None
    assert str(found).count("\n") == 0
    assert "not installed" in str(found)
    assert "embedlab[cluster]" in str(found)
