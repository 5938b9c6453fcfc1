"""Spectra of several encoders out of their score files."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from embedlab.errors import UserError
from embedlab.evaluation import suite
from embedlab.evaluation.core.figures import read_spectra, save_spectrum
from embedlab.evaluation.core.protocol import write_scores
from tests.evaluation.multilingual import Interlingua, write_parallel


def test_spectra_are_read_from_score_files_and_drawn(tmp_path: Path) -> None:
    write_parallel(tmp_path / "parallel")
    files = {}
    for name, clusters in (("before", 5.0), ("after", 0.0)):
        files[name] = tmp_path / f"{name}.json"
        scores, block = suite("languages").run(Interlingua(clusters), {"data_dir": tmp_path})
        write_scores(files[name], scores, block)
    found = read_spectra(files)
    drop = {name: values[2] / values[0] for name, values in found.items()}
    assert drop["before"] < 0.5 < drop["after"], "three languages span two directions, which dominate"
    assert read_spectra(files, "deu")["after"] == pytest.approx(read_spectra(files, "fra")["after"], rel=1e-3)
    save_spectrum(found, str(tmp_path / "figure.png"))
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(UserError, match=r"no spectrum of this language \(language=xxx\)"):
        read_spectra(files, "xxx")
