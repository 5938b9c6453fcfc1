"""What needs no torch to be refused is refused before torch is loaded: in a second, not in six."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
from embedlab.cli.main import main
status = main(sys.argv[1:])
print(status, "torch" in sys.modules)
"""

RUN_FILE = """
model: {backbone: {source: shipped, name: mini}, method: {name: simcse}, pooling: {name: cls}}
data: {name: wikipedia, files: in.txt}
"""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("train no.such.key=1", "(no.such.key"),
        ("train method=nonsense", "(method"),
        ("train data.batch_size=0", "(data.batch_size"),
        ("train data.files=/nowhere.txt data.limit=1", "(data.files"),
        ("train data.files=nowhere/*.txt", "(data.files"),
        ("train data.files=bad.jsonl", "bad.jsonl:2: not JSON"),
        (
            "train data.files=bad.tsv data=pairs method=supervised",
            "bad.tsv:3: 1 fields where the header has 2",
        ),
        ("train data.files=in.csv", "in.csv: no column sentence or text"),
        ("train data=mix +data.mix.a.name=pairs +data.mix.a.files=bad.tsv", "bad.tsv:3: 1 fields"),
        ("train trainer.max_steps=none", "(trainer.max_steps"),
        ("train callbacks.early_stopping=0", "(callbacks.early_stopping"),
        ("train evaluation.final=[nonsense]", "(evaluation.final"),
        ("train backbone.attention=nonsense", "(backbone.attention"),
        (
            "train data.files=in.txt trainer.devices=1",
            "1 row is less than one batch of 64 (data.batch_size",
        ),
        ("train data.files=in.txt trainer.devices=2 data.drop_last=false", "(trainer.devices=2"),
        (
            "train data.files=in.csv data=pairs method=supervised data.limit=9",
            "one batch of 64 (data.batch_size",
        ),
        ("train data=mix +data.mix.a.name=pairs +data.mix.a.files=in.csv", "one batch of 64 (data.mix.a)"),
        ("fit --config run.yaml --data.batch_size=2", "1 row is less than one batch of 2"),
        ("mine none.csv out.csv ckpt=mini", "(input"),
        ("mine in.csv out.csv ckpt=mini negatives=0", "(negatives"),
        ("quantize in.npy out.npy store=int4", "(store"),
        ("benchmark ckpt=mini format=nonsense", "(format"),
        ("evaluate ckpt=mini suite=nonsense", "(suite"),
        ("evaluate ckpt=mini suite=sts data_dir=/nowhere", "(data_dir"),
        ("evaluate ckpt=/nowhere suite=lee", "(ckpt"),
        ("evaluate ckpt=mini suite=lee compare=/nowhere", "(compare"),
        ("evaluate ckpt=mini suite=lee out=in.txt", "(out"),
        ("evaluate ckpt=mini suite=lee out=in.txt/x.json", "(out"),
        ("evaluate ckpt=mini suite=lee dtype=float8", "(dtype"),
        ("encode in.txt out.npy ckpt=in.txt", "(ckpt"),
        ("encode in.txt out.npy ckpt=.", "(ckpt"),
        ("encode in.txt out.npy ckpt=mini store=int4", "(store"),
        ("encode in.txt out.npy ckpt=mini store=int8", "(store"),
        ("encode in.txt out.npy ckpt=mini store=int8 calibration=none.npy", "(calibration"),
        ("encode in.txt out.npy ckpt=mini dtype=float8", "(dtype"),
        ("encode empty.txt out.npy", "empty.txt: the file is empty"),
        ("mine in.csv out.csv ckpt=/nowhere", "(ckpt"),
        ("mine in.csv out.csv ckpt=mini teacher=/nowhere", "(teacher"),
        ("mine in.csv out.csv ckpt=mini search=/nowhere", "(search"),
        ("export ckpt=/nowhere out=out to=hf", "(ckpt"),
        ("benchmark ckpt=/nowhere", "(ckpt"),
        ("search index in.txt index ckpt=/nowhere", "(ckpt"),
        ("search index in.txt index dtype=float8", "(dtype"),
        ("search query . words", "is no search index. Fix: embedlab search index TEXTS ."),
        ("search query in.txt words", "in.txt: is a file. Fix: name the folder of an index"),
        ("encode in.txt in.txt/v.npy ckpt=mini", "in.txt: is a file (output=in.txt/v.npy)"),
        ("search serve .", "is no search index. Fix: embedlab search index TEXTS ."),
        ("search export . out.parquet", "is no search index. Fix: embedlab search index TEXTS ."),
        ("contamination in.txt data_dir=/nowhere", "(data_dir"),
        ("contamination in.txt data_dir=in.txt", "(data_dir"),
        ("train data.files=in.txt backbone.name=minni", "(backbone.name"),
        ("train data.files=in.txt backbone=local backbone.path=/nowhere", "(backbone.path"),
        ("train data.files=in.txt evaluation.sts_dir=in.txt", "(evaluation.sts_dir"),
        ("train data.files=in.txt hydra.run.dir=in.txt", "(hydra.run.dir"),
        ("train data.files=in.txt ckpt_path=none.ckpt", "(ckpt_path"),
        ("mine in.csv out.csv ckpt=mini work=in.txt", "(work"),
        ("mine in.txt out.csv ckpt=mini", "in.txt: a .txt file has one text a line"),
        ("mine in.csv out.csv ckpt=mini columns.anchor=x", "(columns.anchor"),
        ("fit", "(config"),
        ("fit --config none.yaml", "(config"),
        ("fit --config in.csv", "what it names has no keys with values (config)"),
        ("fit --config list.yaml", "list.yaml: holds no keys"),
        ("fit --config cut.yaml", "cut.yaml:1: is not YAML"),
        ("fit --config run.yaml --no.such.key=1", "(no.such.key"),
        ("fit --config run.yaml --data.batch_size=many", "(data.batch_size=many"),
        ("fit --config run.yaml --data.batch_size=0", "(data.batch_size=0"),
        ("fit --config run.yaml --data.files=/nowhere.txt", "(data.files"),
        (
            "fit --config run.yaml --model.method.tauu=1",
            "(model.method.tauu=1). Fix: did you mean model.method.tau ",
        ),
        ("fit --config run.yaml --model.backbone.name=minni", "(model.backbone.name"),
        ("fit --config run.yaml --trainer.max_steps=none", "(trainer.max_steps"),
        ("fit --config run.yaml --trainer.max_stepss=1", "(trainer.max_stepss"),
        ("fit --config run.yaml --trainer.gradient_clip_val=1", "set model.optimizer.clip"),
        ("fit --config run.yaml --trainer.default_root_dir=in.txt", "(trainer.default_root_dir=in.txt"),
        ("fit --config run.yaml --ckpt_path=none.ckpt", "(ckpt_path"),
        ("predict --config run.yaml --ckpt_path=last", "(trainer.default_root_dir"),
        ("validate --config run.yaml", "(evaluation.sts_dir"),
        ("search index none.txt index", "none.txt: no such file"),
        ("search index in.txt in.txt", "in.txt: is a file. Fix: name a folder"),
        ("report nowhere", "nowhere: no such folder"),
        ("report in.txt", "in.txt: is a file. Fix: give the folder of a run or a sweep"),
        ("tune method.tau=0.05", "nothing varies"),
    ],
)
def test_no_torch_before_the_refusal(arguments: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a cat\n")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "in.csv").write_text("anchor,positive\na cat,a dog\n")
    (tmp_path / "bad.jsonl").write_text('{"text": "a cat"}\n{"text": \n')
    (tmp_path / "bad.tsv").write_text("anchor\tpositive\na cat\ta dog\na bird\n")
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    (tmp_path / "list.yaml").write_text("[1, 2]\n")
    (tmp_path / "cut.yaml").write_text("data: [")
    command = [sys.executable, "-c", CODE, *arguments.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "2 False", done.stderr
    assert done.stderr.count("\n") == 1
    assert told in done.stderr
