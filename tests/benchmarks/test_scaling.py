"""The scaling benchmark: its text, its tables, and one process of it on small models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.scaling import GRADIENTS, WORKLOADS, sentences, tables

ROOT = Path(__file__).parents[2]


def test_a_sentence_has_the_stated_length() -> None:
    lengths = [len(s.split()) for s in sentences(200)]
    assert (min(lengths), max(lengths)) == (24, 30)
    assert len(set(sentences(200))) == 200


def test_speeds_are_multiples_of_the_first_number_of_devices() -> None:
    def speed(n: float) -> dict[str, float]:
        return {"sentences_per_second": n, "sd": 10.0, "step_ms": 1.0, "memory_gib": 2.0}

    errors = {"loss": 1.0, "loss_error": 1e-7, "gradient_error": 2e-6, "gradient_error_norm": 3e-7}
    found = {
        1: {"throughput": {"simcse-64 graph": speed(1000)}, "gradients": {"jtcse": {"loss": 1.0}}},
        4: {
            "throughput": {"simcse-64 graph": speed(3000), "late eager": speed(5)},
            "gradients": {"jtcse": errors},
        },
    }
    text = tables(found)
    assert "| simcse-64 | graph | 1,000 ± 10/s (1.00x), 2.0 GiB | 3,000 ± 10/s (3.00x), 2.0 GiB |" in text
    assert "| late | eager | - | 5 ± 10/s, 2.0 GiB |" in text
    assert "| jtcse | 4 | 1.0e-07 | 2.0e-06 | 3.0e-07 |" in text


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_ranks_of_the_benchmark(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.scaling", "--tiny", "--worlds", "1,2", "--steps", "eager"]
    command += ["--json", str(out)]
    subprocess.run(command, cwd=ROOT, check=True)
    found = json.loads(out.read_text())["worlds"]
    assert found["2"]["throughput"].keys() == {f"{w.name} eager" for w in WORKLOADS}
    assert found["2"]["gradients"].keys() == set(GRADIENTS)
    assert all(g["gradient_error"] < 1e-3 for g in found["2"]["gradients"].values())
