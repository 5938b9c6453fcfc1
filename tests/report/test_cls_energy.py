from __future__ import annotations

import math
from pathlib import Path

import pytest

from embedlab.errors import UserError
from embedlab.evaluation.core.figures import by_layer, profile_figure, save_profile
from embedlab.evaluation.probes.cls_energy import METRICS
from embedlab.report.paired import relation_to_sts


def scores(shift: float = 0.0) -> dict[str, float]:
    return {f"layer{m:02d}/{name}": 0.1 * m + shift for m in (1, 2, 3) for name in METRICS}


def test_values_by_layer() -> None:
    assert by_layer(scores(), "E1") == pytest.approx([0.1, 0.2, 0.3])
    with pytest.raises(UserError, match="no E1 by layer"):
        by_layer({"sts7/spearman": 70.0}, "E1")


def test_a_line_for_each_encoder_and_layers_on_the_axis(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = profile_figure({"before": scores(), "after": scores(0.05)})
    energy, mass, kinds = figure.axes
    lines = [line for line in energy.lines if str(line.get_label()) in ("before", "after")]
    assert [list(line.get_xdata()) for line in lines] == [[1, 2, 3]] * 2
    assert list(lines[1].get_ydata()) == pytest.approx([0.15, 0.25, 0.35])
    assert len(mass.lines) == 4
    assert "after" in kinds.get_title()
    save_profile({"one": scores()}, tmp_path / "new" / "profile.png")
    assert (tmp_path / "new" / "profile.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(UserError, match="figure"):
        save_profile({"one": scores()}, tmp_path / "profile.doc")


def test_relation_over_checkpoints_needs_ten() -> None:
    runs = [{"cls_energy/E_CLS": float(i), "sts7/spearman": float(i**2)} for i in range(10)]
    assert relation_to_sts(runs) == (pytest.approx(1.0), 10)
    with pytest.raises(UserError, match="9 checkpoints"):
        relation_to_sts([*runs[:9], {"cls_energy/E_CLS": 1.0}])


def test_a_run_without_a_number_is_left_out_and_equal_energies_relate_to_nothing() -> None:
    runs = [{"cls_energy/E_CLS": float(i), "sts7/spearman": float(i**2)} for i in range(10)]
    collapsed = {"cls_energy/E_CLS": math.nan, "sts7/spearman": 0.0}
    assert relation_to_sts([*runs, collapsed]) == (pytest.approx(1.0), 10)
    with pytest.raises(UserError, match="9 checkpoints"):
        relation_to_sts([*runs[:9], collapsed])
    assert math.isnan(relation_to_sts([r | {"cls_energy/E_CLS": 1.0} for r in runs]).spearman)
