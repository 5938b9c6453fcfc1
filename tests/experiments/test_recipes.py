"""Each file of conf/experiment composes its paper's recipe: the tables here are written by hand from the papers.

What is not in them (templates, arms, methods' own keys) stands in the tests of each paper's experiments.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from embedlab import files as _paths
from embedlab.cli.compose import compose as command_line
from embedlab.config.data import DataConfig
from embedlab.data.kinds import data_config
from embedlab.errors import UserError
from embedlab.run.check import check_run
from embedlab.run.parse import parse_run
from embedlab.run.stages import Stage

FOLDER = _paths.conf_dir() / "experiment"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
WIKI = "hub:princeton-nlp/datasets-for-simcse wiki1m_for_simcse.txt"
NLI = "hub:princeton-nlp/datasets-for-simcse nli_for_simcse.csv"
OPUS = "hub:Helsinki-NLP/opus-100"
GENSIM = "package:gensim-wikipedia"
GIVEN = "files:?"


class Recipe(NamedTuple):
    """backbone; text; tokens of a sentence; epochs, or steps; batch an update; rate; tau; pooling; text form of STS."""

    backbone: str
    text: str
    length: int | None
    until: str
    batch: int
    lr: float
    tau: float | None
    pooling: str
    scored: str


BERT, ROBERTA, XLMR = (
    "google-bert/bert-base-uncased",
    "FacebookAI/roberta-base",
    "FacebookAI/xlm-roberta-base",
)
SMOL = "HuggingFaceTB/SmolLM2-135M"


def simcse(backbone: str, batch: int, lr: float, pooling: str = "cls") -> Recipe:
    return Recipe(backbone, WIKI, 32, "1 epoch", batch, lr, 0.05, pooling, "tok")


def nli(backbone: str, pooling: str) -> Recipe:
    return Recipe(backbone, NLI, 32, "3 epochs", 512, 5e-5, 0.05, pooling, "tok")


def twin(backbone: str, batch: int, lr: float, tau: float | None = 0.05) -> Recipe:
    return Recipe(backbone, WIKI, 64, "1 epoch", batch, lr, tau, "cls", "tok")


def sfp(backbone: str, batch: int, lr: float, scored: str = "tok", until: str = "1 epoch") -> Recipe:
    return Recipe(backbone, WIKI, 32, until, batch, lr, 0.05, "rep2", scored)


def bepa(batch: int = 64, text: str = OPUS, until: str = "10 epochs") -> Recipe:
    return Recipe(XLMR, text, 128, until, batch, 2e-5, 0.07, "cls", "raw")


RECIPES = {
    "simcse_bert_unsup": simcse(BERT, 64, 3e-5),
    "simcse_roberta_unsup": simcse(ROBERTA, 512, 1e-5),
    "simcse_bert_sup": nli(BERT, "cls_mlp"),
    "simcse_roberta_sup": nli(ROBERTA, "cls_mlp"),
    "promptbert_bert_unsup": simcse(BERT, 256, 1e-5, "mask"),
    "promptbert_roberta_unsup": simcse(ROBERTA, 256, 1e-5, "mask"),
    "rankcse_bert": simcse(BERT, 128, 3e-5),
    "esimcse_bert": simcse(BERT, 64, 3e-5),
    "esimcse_roberta": simcse(ROBERTA, 64, 1e-5),
    "mixcse_bert": simcse(BERT, 64, 3e-5),
    "pcl_bert": simcse(BERT, 64, 3e-5),
    "whitenedcse_bert": simcse(BERT, 128, 1e-5),
    "diffcse_bert": simcse(BERT, 64, 7e-6)._replace(until="2 epochs"),
    "infocse_bert": simcse("Luyu/condenser", 64, 7e-6)._replace(until="2 epochs"),
    "sncse_bert": simcse(BERT, 256, 1e-5, "mask")._replace(text=GIVEN, length=22),
    "sncse_roberta": simcse(ROBERTA, 256, 1e-5, "mask")._replace(text=GIVEN, length=22),
    "edfse_like_bert": simcse(BERT, 64, 3e-5),
    "whitening_bert": Recipe(BERT, NLI, 64, "1 epoch", 512, 3e-5, None, "first_last", "tok"),
    "promptbert_bert_sup": nli(BERT, "mask"),
    "promptbert_roberta_sup": nli(ROBERTA, "mask"),
    **dict.fromkeys(
        ("s2sent_table2", "s2sent_table3", "s2sent_table4", "s2sent_fig5", "s2sent_fig6", "s2sent_fig7",
         "s2sent_fig8", "s2sent_controls"),
        simcse(BERT, 64, 3e-5, "s2sent"),
    ),
    **dict.fromkeys(
        ("s2sent_table2_prompt", "s2sent_fig6_prompt", "s2sent_fig7_prompt"), simcse(BERT, 64, 1e-5, "s2sent")
    ),
    **dict.fromkeys(
        ("s2sent_table2_prompt_roberta", "s2sent_fig6_prompt_roberta", "s2sent_fig7_prompt_roberta"),
        simcse(ROBERTA, 64, 1e-5, "s2sent"),
    ),
    "jtcse_stage1_a": twin(BERT, 64, 1.5e-5),
    "jtcse_stage1_b": twin(BERT, 64, 2e-5),
    **dict.fromkeys(
        ("jtcse_bert", "jtcse_bert_sick", "jtcse_ablation", "jtcse_layers", "jtcse_dropout"), twin(BERT, 64, 1.3e-6)
    ),
    "jtcse_roberta": twin(ROBERTA, 256, 1e-6),
    "tncse_bert": twin(BERT, 64, 1e-6),
    "tncse_pooling": twin(BERT, 64, 1e-6),
    "tncse_roberta": twin(ROBERTA, 256, 1e-6),
    "jtcse_distil": twin(BERT, 128, 1e-5),
    "jtcse_distil_roberta": twin(ROBERTA, 128, 1e-5),
    "tncse_distil": twin(BERT, 64, 1e-5),
    "tncse_distil_roberta": twin(ROBERTA, 256, 1e-5),
    "jtcse_ensemble_distil": twin(BERT, 128, 8.5e-6),
    "jtcse_ensemble_distil_roberta": twin(ROBERTA, 128, 8.5e-6),
    "tncse_ensemble_distil": twin(BERT, 64, 1.5e-5),
    "tncse_ensemble_distil_roberta": twin(ROBERTA, 128, 1.5e-5),
    **dict.fromkeys(("jtcse_ensemble", "tncse_ensemble"), twin(BERT, 64, 1.3e-6, None)),
    **dict.fromkeys(("jtcse_ensemble_roberta", "tncse_ensemble_roberta"), twin(ROBERTA, 64, 1.3e-6, None)),
    "csesfp_opt": sfp("facebook/opt-6.7b", 264, 3e-5),
    "csesfp_llama2": sfp("meta-llama/Llama-2-7b-hf", 256, 4e-5),
    "csesfp_llama3": sfp("meta-llama/Meta-Llama-3-8B", 256, 5e-5),
    "csesfp_mistral": sfp("mistralai/Mistral-7B-v0.1", 312, 2e-5),
    "csesfp_gemma": sfp("google/gemma-2b", 256, 5e-5),
    "csesfp_smollm2": sfp(SMOL, 256, 2e-4, "raw"),
    "csesfp_cost": sfp(SMOL, 256, 2e-4, "raw", "300 steps"),
    "csesfp_templates": sfp(SMOL, 256, 2e-4, "raw", "500 steps"),
    "prompteol_prompts": sfp(SMOL, 256, 2e-4, "raw")._replace(pooling="last"),
    **dict.fromkeys(
        ("bepa_opus", "bepa_official", "bepa_table", "bepa_collapse", "bepa_loss_ablation", "bepa_temperature",
         "bepa_negatives"),
        bepa(),
    ),
    "bepa_batch": bepa(256),
    "bepa_flores": bepa(64, GIVEN, "50 epochs"),
    **dict.fromkeys(
        ("same_start", "same_start_rankcse"), Recipe("mini", WIKI, 32, "1 epoch", 64, 3e-5, 0.05, "mean", "raw")
    ),
    "same_start_sncse": Recipe("mini", GIVEN, 32, "1 epoch", 64, 3e-5, 0.05, "mask", "raw"),
    "same_start_promptbert": Recipe("mini", WIKI, 32, "1 epoch", 64, 3e-5, 0.05, "mask", "raw"),
    **dict.fromkeys(
        ("same_start_jtcse", "same_start_tncse", "same_start_student"),
        Recipe("mini", WIKI, 32, "1 epoch", 64, 1e-5, 0.05, "mean", "raw"),
    ),
    "same_start_whitening": Recipe("mini", WIKI, 64, "1 epoch", 64, 3e-5, None, "first_last", "raw"),
    **{
        f"same_start_decoders{arm}": sfp(SMOL, 256, 2e-4, "raw")._replace(pooling=pooling)
        for arm, pooling in (("", "last"), ("_csesfp", "rep2"), ("_echo", "echo"))
    },
    "same_start_decoders_metaeol": sfp(SMOL, 256, 2e-4, "raw")._replace(pooling="last", tau=None),
    "same_start_decoders_bidirectional": sfp("local", 256, 2e-4, "raw")._replace(pooling="mean"),
    # Own ones: what docs/ says of them.
    "quickstart": Recipe("mini", GENSIM, 32, "40 steps", 64, 3e-5, 0.05, "mean", "raw"),
    "jtcse_mini": Recipe("mini", GENSIM, 32, "40 steps", 32, 1e-5, 0.05, "mean", "raw"),
    "csesfp_tiny": Recipe("local", GENSIM, 32, "80 steps", 32, 1e-3, 0.05, "mean", "raw"),
    "bepa_quickstart": Recipe("local", "package:emoji-train", 32, "300 steps", 64, 2e-3, 0.07, "mean", "raw"),
    "distil_mini": Recipe("mini", GIVEN, 256, "13 epochs", 1024, 6e-4, 0.05, "mean", "raw"),
    "pretrain_mini": Recipe("fresh", GIVEN, None, "20000 steps", 512, 5e-4, None, "mean", "raw"),
    "pretrain_mini_multi": Recipe("fresh", GIVEN, None, "20000 steps", 512, 5e-4, None, "cls", "raw"),
}  # fmt: skip
SCHEDULES = {
    # schedule, warm-up, weight decay, clipping, updates between two looks at dev
    "simcse": ("linear", 0, 0.0, 1.0, 125),
    "promptbert": ("linear", 0, 0.0, 1.0, 125),
    **dict.fromkeys(
        (
            "rankcse",
            "esimcse",
            "mixcse",
            "diffcse",
            "infocse",
            "sncse",
            "edfse",
            "whitening",
            "whitenedcse",
            "pcl",
        ),
        ("linear", 0, 0.0, 1.0, 125),
    ),
    "s2sent": ("linear", 0, 0.0, 1.0, 125),
    "jtcse": ("constant", 0, 0.01, None, 100),
    "tncse": ("constant", 0, 0.01, None, 100),
    "csesfp": ("linear", 100, 0.0, 4.0, 150),
    "bepa": ("linear", 500, 0.01, 1.0, 125),
    "same": ("linear", 0, 0.0, 1.0, 125),
}
OTHERWISE = {
    **dict.fromkeys(("csesfp_smollm2", "csesfp_cost", "csesfp_templates"), ("linear", 100, 0.0, 1.0, 150)),
    "bepa_flores": ("linear", 200, 0.01, 1.0, 125),
    **dict.fromkeys((n for n in NAMES if n.startswith("same_start_decoders")), ("linear", 100, 0.0, 1.0, 50)),
}
SMALL = {
    *("quickstart", "jtcse_mini", "csesfp_tiny", "bepa_quickstart"),
    *("distil_mini", "pretrain_mini", "pretrain_mini_multi"),
}
"""Own ones, whose schedules are no paper's."""

TOWERS = {"bert": (1.5e-5, 2e-5), "roberta": (1.5e-5, 1.25e-5)}
"""Rates of stage 1, batch 64 and the backbone's dropout."""
TWINS = {
    # method, rate, batch, dropout
    ("jtcse", "bert"): ("jtcse", 1.3e-6, 64, None),
    ("jtcse", "roberta"): ("jtcse", 1e-6, 256, None),
    ("tncse", "bert"): ("tncse", 1e-6, 64, 0.00025),
    ("tncse", "roberta"): ("tncse", 1e-6, 256, 0.0175),
}
DROPOUT = {
    "same_start_decoders_bidirectional": 0.3,  # as LLM2Vec's SimCSE has it
    "distil_mini": 0.0,
    "tncse_bert": 0.00025,
    "tncse_pooling": 0.00025,
    "tncse_roberta": 0.0175,
    **dict.fromkeys((name for name in NAMES if "ensemble_distil" in name), 0.015),
}


ASKED = {"jtcse_bert_sick": ("sick=sick.txt",), "edfse_like_bert": ("rtt=tables",)}
"""What an experiment cannot do without; its text aside (`GIVEN`), which is asked for when the data are read."""


@cache
def composed(name: str) -> dict[str, Any]:
    """What ``embedlab train experiment=NAME --cfg job`` prints, its references resolved."""
    with initialize_config_dir(str(_paths.conf_dir()), version_base="1.3"):
        config = compose("train", [f"experiment={name}", "trainer=cpu", *ASKED.get(name, ())])
    content = OmegaConf.to_container(config, resolve=True)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def text_of(data: dict[str, Any]) -> str:
    if data["hub"]:
        return " ".join(filter(None, (f"hub:{data['hub']}", data["hub_files"])))
    return f"package:{data['package']}" if data["package"] else GIVEN


def runs(name: str) -> dict[str, dict[str, Any]]:
    """The configurations that an experiment trains: of its stages by their names, and its own by ``""``."""
    values = composed(name)
    stages = {stage: Stage.read(stage, content) for stage, content in values["stages"].items()}
    return {**{key: stage.values(values) for key, stage in stages.items()}, "": values}


def test_every_experiment_has_a_recipe() -> None:
    assert set(RECIPES) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_is_its_papers_recipe(name: str) -> None:
    v = composed(name)
    backbone, data, optimizer, trainer = (v[key] for key in ("backbone", "data", "optimizer", "trainer"))
    steps, epochs = trainer["max_steps"], trainer["max_epochs"]
    found = Recipe(
        backbone["name"] if backbone["source"] == "hub" or backbone["name"] == "mini" else backbone["source"],
        text_of(data),
        data["max_length"],
        f"{steps} steps" if steps != -1 else f"{epochs} epoch{'s' * (epochs > 1)}",
        data["batch_size"] * optimizer["accumulate"],
        optimizer["lr"],
        v["method"].get("tau"),
        v["pooling"]["name"],
        v["evaluation"]["sts_text"],
    )
    assert found == RECIPES[name]
    if name not in SMALL:
        schedule = OTHERWISE.get(name) or SCHEDULES.get(name.partition("_")[0]) or OTHERWISE["csesfp_smollm2"]
        keys = ("schedule", "warmup_steps", "weight_decay", "clip")
        assert (*(optimizer[key] for key in keys), v["evaluation"]["every"]) == schedule
    assert backbone["dropout"] == DROPOUT.get(name)


@pytest.mark.parametrize("name", NAMES)
def test_no_text_stands_in_for_a_hubs(name: str) -> None:
    """Nor for one that has to be given; files on the command line take the place of any."""
    for values in runs(name).values():
        data = values["data"]
        assert not (data["hub"] and data["package"])
        assert data_config({**data, "files": "mine.txt", "also": None}).source == "mine.txt"


STAGED = [name for name in NAMES if name.startswith(("jtcse", "tncse")) and composed(name)["stages"]]


@pytest.mark.parametrize("name", sorted(set(STAGED) - {"jtcse_mini", "jtcse_ablation"}))
def test_the_stages_of_a_twin_are_the_papers(name: str) -> None:
    parts, kind = runs(name), "roberta" if "roberta" in name else "bert"
    for stage, lr in zip(("stage1_a", "stage1_b"), TOWERS[kind], strict=True):
        v = parts[stage]
        found = v["method"]["name"], v["optimizer"]["lr"], v["data"]["batch_size"], v["backbone"]["dropout"]
        assert found == ("simcse", lr, 64, None)
        assert (v["method"]["layout"], v["method"]["mlp"], text_of(v["data"])) == ("pairs", "none", WIKI)
    if "twin" in parts:
        v = parts["twin"]
        found = v["method"]["name"], v["optimizer"]["lr"], v["data"]["batch_size"], v["backbone"]["dropout"]
        assert found == TWINS[name.partition("_")[0], kind]
    for v in parts.values():
        assert (v["data"]["max_length"], v["optimizer"]["schedule"]) == (64, "constant")
        if v["method"]["name"] == "ensemble":
            assert v["method"]["weights"] == [0.3, 0.7]
            assert (v["method"]["second"], v["method"]["pooling"]) == ("ffgcc/InfoCSE-bert-base", "cls")
        if v["method"]["name"] == "distil":
            assert v["method"]["k1"] == (0.1 if "ensemble" in name else 0.01)


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_is_a_sound_run(name: str) -> None:
    """As `embedlab train` checks it before a weight is loaded; what stages make is taken as made."""
    values = copy.deepcopy(composed(name))
    if text_of(values["data"]) == GIVEN:
        values["data"]["files"] = "mine.tsv"
    for key in values["stages"]:
        stage = Stage.read(key, values["stages"][key])
        check_run(parse_run(stage.values(values)))
        *path, last = stage.result.split(".")
        node = values
        for part in path:
            node = node[part]
        node[last] = f"made/{stage.name}"
    if values["backbone"]["source"] != "local":  # of a stage's making, which cannot be looked at
        check_run(parse_run(values))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("jtcse_bert_sick", "(sick)"),
        ("bepa_flores", "data.files=PATH"),
        ("pretrain_mini", "data.files=PATH"),
        ("distil_mini", "data.files=PATH"),
    ],
)
def test_what_has_to_be_given_is_said_in_one_line(name: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_run(command_line("train", [f"experiment={name}"]))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "lam", "around"),
    [
        ("sncse_bert", 1e-3, '"{sentence}" means {mask}.'),
        ("sncse_roberta", 5e-4, '" {sentence} " means{mask}.'),
    ],
)
def test_sncses_margin_and_templates(name: str, lam: float, around: str) -> None:
    v = composed(name)
    method = v["method"]
    assert (method["lam"], method["alpha"], method["beta"]) == (lam, 0.1, 0.3)
    texts = v["template"]["text"], method["second_template"]["text"]
    assert texts == (f"This sentence : {around}", f"This sentence of {around}")


def test_bepas_table_is_scored_on_the_papers_sets() -> None:
    """From the hub: MultiNLI, SQuAD and MLQA's test; a folder has small sets in their place."""
    scored = composed("bepa_table")["evaluation"]
    assert (scored["final"], scored["sts_dir"]) == (["xnli", "qa", "glue"], "hub")


def test_the_page_is_that_of_the_files() -> None:
    tool = Path(__file__).parents[2] / "tools" / "experiments.py"
    done = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_files_beside_the_text_are_read_after_it() -> None:
    config = DataConfig(hub="some/set", also=["a.txt", "b.txt"])
    assert config.source == "hub:some/set and 2 more"
