"""A run says what it will do, refuses to do nothing, and says where it ended short."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.trainer import TrainerConfig
from embedlab.errors import UserError
from embedlab.run.check import check_distinct, check_run, compared, planned_steps
from embedlab.run.run import train


class Plan:
    """What `planned_steps` reads of a configuration."""

    def __init__(self, epochs: int, steps: int, accumulate: int) -> None:
        self.trainer = TrainerConfig(accelerator="cpu", max_epochs=epochs, max_steps=steps)
        self.optimizer = OptimizerConfig(accumulate=accumulate)


@given(
    st.integers(8, 200), st.integers(1, 8), st.booleans(), st.integers(1, 4), st.sampled_from([-1, 1, 7, 900]),
    st.integers(1, 5),
)  # fmt: skip
@settings(deadline=None)
def test_planned_steps_are_those_of_a_plain_loop(
    rows: int, batch: int, drop: bool, epochs: int, most: int, accumulate: int
) -> None:
    done = 0
    for _ in range(epochs):
        batches = rows // batch if drop else ceil(rows / batch)
        for place in range(1, batches + 1):
            done += (place % accumulate == 0 or place == batches) and done != most
    assert planned_steps(Plan(epochs, most, accumulate), batches) == done  # type: ignore[arg-type]


@pytest.mark.parametrize(("overrides", "steps"), [
    (["trainer.max_steps=300", "data.batch_size=60"], 1),
    (["trainer.max_steps=9", "data.batch_size=20", "trainer.max_epochs=2", "optimizer.accumulate=2"], 4),
])  # fmt: skip
def test_a_run_that_ends_before_its_steps_says_so_first_and_last(  # type: ignore[no-untyped-def]
    overrides, steps, compose_run, tmp_path, caplog
):
    with caplog.at_level("INFO"):
        train(compose_run(*overrides), tmp_path)
    (first,) = (line for line in caplog.messages if "is not reached" in line)
    assert f"ends the run after {steps}." in first
    (banner,) = (line for line in caplog.messages if line.startswith("step="))
    assert f" steps={steps} | batch" in banner
    assert any(f"ended after {steps} of max_steps=" in line for line in caplog.messages)


def test_a_run_that_does_its_steps_warns_of_none(compose_run, tmp_path, caplog):  # type: ignore[no-untyped-def]
    train(compose_run("trainer.max_steps=2"), tmp_path)
    assert not [line for line in caplog.messages if "max_steps" in line]


def test_text_of_one_sentence_is_refused_where_sentences_are_compared(compose_run, tmp_path):  # type: ignore[no-untyped-def]
    same = tmp_path / "same.txt"
    same.write_text("the same sentence\n" * 200)
    with pytest.raises(UserError, match=r"same\.txt: all 200 rows are the same"):
        train(compose_run(f"data.files={same}", "trainer.max_steps=2"), tmp_path / "run")
    words = compose_run(f"data.files={same}", "method=masked_lm", "trainer.max_steps=1")
    train(words, tmp_path / "words")
    same.write_text("the same sentence\n" * 200 + "another one\n")
    train(compose_run(f"data.files={same}", "trainer.max_steps=1"), tmp_path / "run2")


@pytest.mark.parametrize(
    ("rows", "duplicates", "refused"), [(1, 0, True), (2, 1, True), (2, 0, False), (9, 7, False)]
)
def test_rows_are_the_same_where_all_repeat_the_first(  # type: ignore[no-untyped-def]
    rows, duplicates, refused, compose_run
):
    report = {"rows": rows, "duplicates": duplicates}
    if refused:
        with pytest.raises(UserError, match="no step would change anything"):
            check_distinct(compose_run(), report)
    else:
        check_distinct(compose_run(), report)


@pytest.mark.parametrize(
    ("method", "own"), [("in_batch", None), ("kl", "in_batch"), ("margin_mse", "sigmoid")]
)
def test_a_set_of_a_mix_whose_rows_are_the_same_is_named(method, own, compose_run, tmp_path):  # type: ignore[no-untyped-def]
    for name, rows in (("same", ["a cat,a dog"] * 9), ("pairs", [f"a cat {n},a dog" for n in range(9)])):
        (tmp_path / f"{name}.csv").write_text("\n".join(["anchor,positive", *rows]) + "\n")
    objective = f", objective: {own}" if own else ""
    mix = [
        f"data.mix.{name}={{name: pairs, files: {tmp_path / name}.csv{objective}}}"
        for name in ("pairs", "same")
    ]
    run = compose_run(
        "method=supervised",
        f"method.objective={method}",
        "data=mix",
        "data.batch_size=4",
        "data.max_length=32",
        "trainer.max_steps=2",
        *mix,
    )
    with pytest.raises(UserError, match=r"same\.csv: all 9 rows are the same.*\(data\.mix\.same\)"):
        train(run, tmp_path / "run")
    assert set(compared(run)) == {"pairs", "same"}
    one_row = replace(run, data=replace(run.data, batch_size=1))
    with pytest.raises(UserError, match=r"data\.batch_size=1"):
        check_run(one_row)


@pytest.mark.parametrize("trainer", ["ddp", "fsdp", "gpu", "cpu", "auto"])
@pytest.mark.parametrize("precision", [None, "bf16-mixed", "32-true", "auto"])
def test_half_precision_without_a_card_is_said(trainer, precision, compose_run):  # type: ignore[no-untyped-def]
    more = [] if precision is None else [f"trainer.precision={precision}"]
    more += ["evaluation.select=last"]
    config = compose_run(f"trainer={trainer}", "trainer.accelerator=cpu", "trainer.devices=1", *more)
    said = [line for line in check_run(config) if "without a CUDA device" in line]
    assert bool(said) == (config.trainer.precision == "bf16-mixed")


@pytest.mark.parametrize("select", ["last", "loss", "auto", "dev"])
def test_dev_is_wanted_only_where_it_selects(select, compose_run, tmp_path, sts_dir):  # type: ignore[no-untyped-def]
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "stsb_test.tsv").write_bytes((sts_dir / "stsb_test.tsv").read_bytes())

    def config(folder):  # type: ignore[no-untyped-def]
        return compose_run(
            "trainer.max_steps=1", f"evaluation.select={select}", f"evaluation.sts_dir={folder}"
        )

    if select in ("last", "loss"):
        train(config(tmp_path / "own"), tmp_path / "run")
    else:
        with pytest.raises(UserError, match="has no stsb_dev"):
            train(config(tmp_path / "own"), tmp_path / "run")
    with pytest.raises(UserError, match="no such folder"):
        train(config(tmp_path / "mistyped"), tmp_path / "other")


def test_too_few_rows_are_refused_without_the_report_of_the_text(compose_run, tmp_path, capsys):  # type: ignore[no-untyped-def]
    text = tmp_path / "text.txt"
    text.write_text("".join(f"The cat has {n} names.\n{n}\n" for n in range(9)))
    few = (f"data.files={text}", "data.report=true", "data.min_chars=5", "data.limit=null")
    with pytest.raises(UserError, match=r"^9 rows are less .*, of 18 that were read; dropped: 9 .*min_chars"):
        train(compose_run(*few, "data.batch_size=10"), tmp_path / "run")
    assert "Data: " not in capsys.readouterr().err
    train(compose_run(*few, "data.batch_size=9", "trainer.max_steps=1"), tmp_path / "run")
    assert "Data: " in capsys.readouterr().err
