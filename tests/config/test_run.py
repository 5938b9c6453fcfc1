from __future__ import annotations

import pytest

from embedlab.errors import UserError
from embedlab.evaluation.core.suite import suite_names
from embedlab.run.callbacks.checkpoints import LAST
from embedlab.run.check import check_run, resolved_packing, resolved_step
from embedlab.run.run import train


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("optimizer.lr=abc", r"not a number \(optimizer.lr=abc\)"),
        ("optimizer.betas=[1,2]", r"two numbers from 0 up to 1 \(optimizer.betas=\[1.*\]\)"),
        ("optimizer.betas=[0.9,0.99,0.9]", "not a list of 2 numbers"),
        ("optimizer.eps=-1", r"must be above 0 \(optimizer.eps=-1.*\)"),
        ("optimizer.weight_decay=-1", r"must be at least 0.* \(optimizer.weight_decay=-1.*\)"),
        ("callbacks.progress=bar", "one of auto, rich, plain, none"),
        ("optimizer.lr=inf", r"not a finite number \(optimizer.lr=inf\)"),
        ("optimizer.accumulate=1.5", r"not a whole number \(optimizer.accumulate=1.5\)"),
        ("trainer.max_steps=x", r"not a whole number \(trainer.max_steps=x\)"),
        ("trainer.devices=x", r"trainer.devices=x\). Fix: 1, auto"),
        ("trainer.devices=0", r"trainer.devices=0\). Fix: 1, auto"),
        ("trainer.devices=[0,0]", r"names a device twice \(trainer.devices=\[0, 0\]\)"),
        (
            "trainer.devices=[0,1]",
            r"a CPU has no numbers \(trainer.devices=\[0, 1\]\). Fix: trainer.devices=2",
        ),
        ("trainer.num_nodes=0", r"must be at least 1 \(trainer.num_nodes=0\)"),
        ("callbacks.checkpoint.every_minutes=x", r"not a number \(callbacks.checkpoint.every_minutes=x\)"),
        ("adapter.r=x", r"not a whole number \(adapter.r=x\)"),
        ("method.tau=x", r"not a number \(method.tau=x\)"),
        ("evaluation.final=[foo]", r"no such suite \(evaluation.final=foo\)"),
        ("evaluation.final=lee", r"not a list of texts \(evaluation.final=lee\)"),
        ("data.files=3", r"not text \(data.files=3\)"),
        ("data.files=[]", r"names no file \(data.files\)"),
        ("data.columns=text", r"Fix: data.columns.sentence=text"),
        ("data.shuffle=3", r"not true or false \(data.shuffle=3\)"),
        ("seed=4294967296", r"seed=4294967296\). Fix: seed=42"),
        ("seed=null", r"seed=null"),
        ("ckpt_path=3", r"not text \(ckpt_path=3\)"),
        ("+metod=simcse", r"unknown key \(metod=simcse\). Fix: did you mean method"),
    ],
)
def test_a_value_that_cannot_be_meant_is_one_line(compose_run, override, line):  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=line):
        check_run(compose_run(override))


@pytest.mark.parametrize(
    ("model_type", "overrides", "suite", "why"),
    [
        ("gpt2", ["pooling=last"], "cls_energy", "cannot look into the blocks of gpt2"),
        (
            "bert",
            ["method=jtcse", "method.n_ca=1", "method.tower1=a", "method.tower2=b"],
            "xnli",
            "one backbone",
        ),
        ("bert", ["method=tncse", "method.tower1=a", "method.tower2=b"], "qa", "one backbone"),
        ("bert", ["method=ensemble", "method.first=a", "method.second=b"], "glue", "one backbone"),
    ],
)
def test_a_suite_that_could_not_score_the_result_is_refused(compose_run, model_type, overrides, suite, why):  # type: ignore[no-untyped-def]
    settings = (*overrides, "evaluation.final=[lee,sts]")
    check_run(compose_run(*settings, model_type=model_type))
    with pytest.raises(UserError, match=rf"{why} \(evaluation.final={suite}\). Fix: leave {suite} out"):
        check_run(compose_run(*settings[:-1], f"evaluation.final=[lee,{suite}]", model_type=model_type))


def test_every_suite_can_score_an_ordinary_encoder(compose_run):  # type: ignore[no-untyped-def]
    check_run(compose_run(f"evaluation.final=[{','.join(suite_names())}]"))


def test_a_contrastive_batch_of_one_teaches_nothing(compose_run):  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=r"there are none \(data.batch_size=1\)"):
        check_run(compose_run("data.batch_size=1"))
    check_run(compose_run("data.batch_size=1", "method=masked_lm"))
    two = ("data.batch_size=1", "trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu")
    check_run(compose_run(*two))
    with pytest.raises(UserError, match=r"there are none \(data.batch_size=1\)"):
        check_run(compose_run(*two, "method.gather_negatives=false"))


@pytest.mark.parametrize(
    ("overrides", "shape"),
    [
        (["data.batch_size=4000"], {}),
        ([], {"layers": 3}),
    ],
    ids=["fewer rows than a batch", "another model"],
)
def test_a_resume_that_cannot_begin_touches_nothing(compose_run, tmp_path, overrides, shape):  # type: ignore[no-untyped-def]
    folder = tmp_path / "run"
    train(compose_run("trainer.max_steps=2"), folder)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert folder / LAST in before
    with pytest.raises(UserError):
        train(compose_run("trainer.max_steps=4", "ckpt_path=last", *overrides, **shape), folder)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_a_run_of_too_few_rows_leaves_no_configuration(compose_run, tmp_path):  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match="less than one batch"):
        train(compose_run("data.batch_size=61"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_runs_folder_as_backbone_names_its_export(compose_run, tmp_path):  # type: ignore[no-untyped-def]
    train(compose_run("trainer.max_steps=1"), tmp_path / "run")
    with pytest.raises(UserError, match="the folder of a run") as caught:
        check_run(compose_run(f"backbone.path={tmp_path / 'run'}"))
    key, _, export = str(caught.value.fix).partition("=")
    assert key == caught.value.key == "backbone.path"
    train(compose_run(f"backbone.path={export}", "trainer.max_steps=1"), tmp_path / "again")


@pytest.mark.parametrize("choice", ["mini", "fresh", "bert-base"])
def test_a_path_that_the_backbone_does_not_read_is_refused(compose_run, tmp_path, choice):  # type: ignore[no-untyped-def]
    """Else the run would train another model than the one that was named."""
    with pytest.raises(UserError, match="backbone=local alone") as caught:
        check_run(compose_run(f"backbone={choice}", f"backbone.path={tmp_path}"))
    assert caught.value.key == "backbone.path"
    assert f"backbone=local backbone.path={tmp_path}" in str(caught.value.fix)
    assert not [w for w in check_run(compose_run("backbone=mini", "backbone.path=null")) if "path" in w]


def test_weights_alone_are_no_checkpoint(compose_run, tmp_path):  # type: ignore[no-untyped-def]
    import torch

    torch.save({"w": torch.zeros(2)}, tmp_path / "w.ckpt")
    with pytest.raises(UserError, match="weights alone"):
        train(compose_run(f"ckpt_path={tmp_path / 'w.ckpt'}"), tmp_path / "run")


def test_lightnings_objections_are_the_users(compose_run, tmp_path):  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=r"invalid strategy name.*\(trainer\)"):
        train(compose_run("trainer.strategy=foo"), tmp_path / "run")


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp", "deepspeed"])
def test_steps_are_captured_where_each_device_has_the_whole_model(  # type: ignore[no-untyped-def]
    compose_run, monkeypatch, devices, strategy
):
    monkeypatch.setattr("embedlab.run.check.on_cuda", lambda trainer: True)
    monkeypatch.setattr("embedlab.run.check.device_count", lambda trainer: devices)
    cuda = ("trainer.precision=bf16-mixed", f"trainer.strategy={strategy}")
    captured = strategy in ("auto", "ddp") or (devices == 1 and strategy != "fsdp")
    for drop in ("true", "false"):
        run = compose_run(*cuda, f"data.drop_last={drop}")
        assert resolved_step(run) == ("graph" if captured else "compile")
    run = compose_run(*cuda, "step=graph")
    if captured:
        assert resolved_step(run) == "graph"
    else:
        with pytest.raises(UserError, match=r"trainer\.strategy=ddp.*Fix: step=compile"):
            resolved_step(run)


@pytest.mark.parametrize(
    ("overrides", "cause"),
    [
        (("step=compile",), "step=graph"),
        (("optimizer.chunk=2",), "optimizer.chunk"),
        (("method=distil", "method.teacher=x"), "method=distil"),
        (("pooling=s2_official", "pooling.r=8", "pooling.n=1", "pooling.m=4"), "pooling=s2sent counts it"),
    ],
)
def test_unpad_is_refused_where_padding_stays(compose_run, overrides, cause):  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=cause):
        resolved_packing(compose_run("unpad=true", *overrides))
    assert resolved_packing(compose_run("unpad=auto", *overrides)) is False


def test_eager_steps_leave_out_padding_on_the_cpu_alone(compose_run, monkeypatch):  # type: ignore[no-untyped-def]
    assert resolved_packing(compose_run()) is True
    assert resolved_packing(compose_run("unpad=false")) is False
    monkeypatch.setattr("embedlab.run.check.on_cuda", lambda trainer: True)
    assert resolved_packing(compose_run("step=eager")) is False


def test_unpad_names_what_it_cannot_do(compose_run, monkeypatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr("embedlab.run.check.resolved_step", lambda run: "graph")
    assert resolved_packing(compose_run()) is True
    assert resolved_packing(compose_run("unpad=false")) is False
    assert resolved_packing(compose_run("unpad=auto", "pooling=mean", model_type="gpt2")) is False
    for more in (("csesfp", "rep2", "eol_sum"), ("prompteol", "last", "eol")):
        named = (f"{key}={value}" for key, value in zip(("method", "pooling", "template"), more, strict=True))
        assert resolved_packing(compose_run(*named, "adapter=lora", model_type="llama")) is True
    for overrides, model_type, cause in (
        (("backbone.attention=eager",), "bert", "attention"),
        (("pooling=mean",), "gpt2", "gpt2"),
        (("method=csesfp", "pooling=rep2", "template=eol_sum"), "gpt2", "gpt2 is none of .*llama"),
        (("data.pack=32", "method=causal_lm"), "gpt2", "causal_lm"),
    ):
        with pytest.raises(UserError, match=cause):
            resolved_packing(compose_run("unpad=true", *overrides, model_type=model_type))
    with pytest.raises(UserError, match="one of auto, true, false"):
        resolved_packing(compose_run("unpad=perhaps"))


@pytest.mark.parametrize("value", ["1", "0", "1.0", "yes", "null"])
def test_unpad_is_a_switch_or_auto(compose_run, value):  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match="one of auto, true, false"):
        resolved_packing(compose_run(f"unpad={value}"))
