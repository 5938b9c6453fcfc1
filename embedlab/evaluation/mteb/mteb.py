"""MTEB tasks through the package `mteb`, with its protocols (`specs/evaluation.md` 5.2), not SentEval's.

STS here is on raw text and, for SICK-R, over 9,927 pairs; classification draws 8 samples a label ten times.
Neither compares with the suites `sts` and `transfer`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from embedlab.console import KERNEL_HINTS, quiet
from embedlab.errors import UserError
from embedlab.evaluation.core import protocol
from embedlab.evaluation.core.suite import Scored, Settings, Suite
from embedlab.evaluation.core.vectors import Encoder, Prompted
from embedlab.files import existing_folder

LISTS = Path(__file__).parent / "task_lists"
_SAID = "#:"  # begins the lines of a list file that are said where the list is used

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MTEBTasks:
    """mteb's task objects, the folder of each whose data are local, and what the lists of tasks say of themselves."""

    tasks: list[Any]
    local: dict[str, str]
    notes: list[str]


_ROLES: tuple[Literal["query", "document"], ...] = ("query", "document")


class MTEB(Suite):
    """Tasks of the package `mteb`.

    Settings: tasks (names of mteb, names of our lists such as jtcse_zeroshot, paths of .txt files with a name
    a line; default STSBenchmark), data_dir (folder with local copies: ORGANISATION/NAME or NAME of the data
    set, or the task's name; what is not there comes from the hub or its cache), prompts (mteb's key -> text;
    default: the encoder's own),
    languages (three letters; only these subsets), mteb_cache (folder in which mteb keeps results, to go on
    after an interruption), mteb_predictions (folder for mteb's predictions, by which `embedlab report --mteb` compares
    query by query).

    Scores x100: "STSBenchmark/cosine_spearman": the task's main score, mean over its evaluation splits and
    subsets; "STS22.v2[de-en]/cosine_spearman" where there are several subsets; for two or more tasks of a
    type the mean of their main scores, "mteb_classification/main_score". A task that fails (its data are not
    here, say) is a warning, and UserError when none succeeds.
    """

    name = "mteb"
    keys = ("tasks", "languages", "prompts", "mteb_cache", "mteb_predictions")
    packages: ClassVar = {"mteb": "mteb"}

    def load(self, settings: Settings) -> MTEBTasks:
        """The tasks by name; mteb itself reads their data."""
        tasks = resolve_tasks(settings.get("tasks"), settings.get("languages"))
        notes = list_notes(settings.get("tasks"))
        return MTEBTasks(tasks, _use_local_data(tasks, settings.get("data_dir")), notes)

    def score(self, encoder: Encoder, data: MTEBTasks, settings: Settings) -> Scored:
        """The main score of each task."""
        mteb = _mteb()
        for note in data.notes:  # before hours of scoring
            log.warning("%s", note)
        own = {role: Prompted(encoder, role).text for role in _ROLES}
        prompts = dict(settings.get("prompts") or {role: text for role, text in own.items() if text})
        model = _adapter(encoder, prompts)
        folder = settings.get("mteb_cache")
        cache = mteb.ResultCache(cache_path=folder) if folder else None
        result = mteb.evaluate(
            model,
            data.tasks,
            cache=cache,
            prediction_folder=settings.get("mteb_predictions"),
            raise_error=False,
            show_progress_bar=False,
            encode_kwargs={"batch_size": 64},
        )
        failures = {failed.task_name: _first_line(failed.exception) for failed in result.exceptions or ()}
        done = [task_result for task_result in result.task_results if task_result.scores]
        if not done:
            name, reason = next(iter(failures.items()), ("mteb", "no task was scored"))
            raise UserError(
                f"{name} cannot be scored ({reason})",
                key="tasks",
                fix="data_dir=FOLDER with the task's data, or a machine that reaches the hub",
            )
        scores = _flat(done)
        return self.result(
            encoder,
            scores,
            name="mteb",
            aggregation="mean over subsets and splits of a task; mean over tasks of a type",
            data={
                task_result.task_name: {
                    "source": data.local.get(task_result.task_name, "hub"),
                    # A data.local copy carries no revision: what mteb says is the one that the hub would have been
                    # asked for.
                    "revision": None if task_result.task_name in data.local else task_result.dataset_revision,
                    "splits": {
                        split: [entry["hf_subset"] for entry in entries]
                        for split, entries in task_result.scores.items()
                    },
                    "prompts": model.used.get(task_result.task_name, {}),
                }
                for task_result in done
            },
            warnings=[f"{name} was not scored: {reason}" for name, reason in failures.items()],
            notes=data.notes,
            prompts=prompts,
            mteb=mteb.__version__,
            similarity="cosine",
        )


def task_type(name: str) -> str | None:
    """The type of one of mteb's tasks, such as ``STS``; None where mteb does not know it, or is not installed."""
    try:
        return str(_mteb().get_task(name).metadata.type)
    except (KeyError, UserError):
        return None


def resolve_tasks(names: str | Sequence[str] | None, languages: Sequence[str] | None = None) -> list[Any]:
    """mteb's task objects for task names, list names and list files; UserError for a name that is none of
    these, or a language that is none.
    """
    mteb = _mteb()
    tasks = {}
    for name in (task for entry in _entries(names) for task in _expand(entry)):
        try:
            task = mteb.get_task(name, languages=list(languages) if languages else None)
        except KeyError as error:
            lists = ", ".join(sorted(path.stem for path in LISTS.glob("*.txt")))
            raise UserError(
                f"mteb {mteb.__version__} has no such task",
                key="tasks",
                value=name,
                fix=f"a name of mteb.get_tasks(), a list ({lists}) or a .txt file of names",
            ) from error
        except ValueError as error:  # says which code
            raise UserError(
                str(error).partition(", you can find")[0], key="languages", value=",".join(map(str, languages or ())),
                fix="codes of ISO 639-3, such as deu",
            ) from error  # fmt: skip
        tasks[task.metadata.name] = task
    return list(tasks.values())


def list_notes(names: str | Sequence[str] | None) -> list[str]:
    """What the list files among `names` say of themselves: their lines that begin with "#:"."""
    lines = [line for entry in _entries(names) for line in _list_lines(entry) or ()]
    return [line.removeprefix(_SAID).strip() for line in lines if line.startswith(_SAID)]


def _entries(names: str | Sequence[str] | None) -> list[str]:
    wanted = names.split(",") if isinstance(names, str) else list(names or ["STSBenchmark"])
    return [entry.strip() for entry in wanted]


def _list_lines(entry: str) -> list[str] | None:
    """The lines of the list file that `entry` names; None: it is no list."""
    path = LISTS / f"{entry}.txt"
    if not path.is_file():
        if not entry.endswith(".txt"):
            return None
        path = Path(entry)
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        fix = "a text file with a task's name a line"
        raise UserError(f"cannot be read ({error})", file=path, key="tasks", value=entry, fix=fix) from error


def _expand(entry: str) -> list[str]:
    lines = _list_lines(entry)
    if lines is None:
        return [entry]
    names = [line.split("#")[0].strip() for line in lines]
    if not any(names):
        raise UserError("names no task", file=entry, key="tasks", value=entry, fix="one task name a line")
    return [name for name in names if name]


def _use_local_data(tasks: Sequence[Any], data_dir: Any) -> dict[str, str]:
    """Point tasks whose data lie in `data_dir` there; task name -> folder."""
    if data_dir is None:
        return {}
    root = existing_folder(data_dir, "give a folder of data sets", "data_dir")
    found = {}
    for task in tasks:
        path = str(task.metadata.dataset["path"])
        for name in (path, path.split("/")[-1], task.metadata.name):
            if (root / name).is_dir():
                found[task.metadata.name] = str(root / name)
                # The class shares `metadata`; only this task object is to read elsewhere.
                dataset = {**task.metadata.dataset, "path": str((root / name).resolve())}
                task.metadata = task.metadata.model_copy(update={"dataset": dataset})
                break
    return found


def _flat(results: Sequence[Any]) -> dict[str, float]:
    scores: dict[str, float] = {}
    types: dict[str, list[float]] = defaultdict(list)
    for result in results:
        task = result.task.metadata
        metric = str(task.main_score)
        subsets: dict[str, list[float]] = defaultdict(list)
        for entry in (entry for split in result.scores.values() for entry in split):
            subsets[entry["hf_subset"]].append(100 * float(entry["main_score"]))
        if len(subsets) > 1:
            for subset, values in subsets.items():
                scores[f"{result.task_name}[{subset}]/{metric}"] = float(np.mean(values))
        mean = float(np.mean([value for values in subsets.values() for value in values]))
        scores[f"{result.task_name}/{metric}"] = mean
        types[str(task.type).lower()].append(mean)
    for kind, values in types.items():
        if len(values) > 1:
            scores[f"mteb_{kind}/main_score"] = float(np.mean(values))
    return scores


def _adapter(encoder: Encoder, prompts: Mapping[str, str]) -> Any:
    from embedlab.evaluation.mteb.mteb_adapter import MTEBEncoder

    checkpoint = str(protocol.encoder_facts(encoder)["checkpoint"])
    try:
        return MTEBEncoder(encoder, "embedlab/encoder", checkpoint, prompts)
    except KeyError as error:
        raise UserError(
            f"mteb has no such prompt key ({error.args[0]})",
            key="prompts",
            fix="use a task, a task type, query or document",
        ) from error


def _mteb() -> Any:
    try:
        with quiet(KERNEL_HINTS):
            import mteb
    except ImportError as error:
        raise UserError(
            f"mteb cannot be imported ({_first_line(error)})", fix="pip install 'embedlab[eval]'"
        ) from error
    logging.getLogger("mteb").setLevel(logging.CRITICAL)  # failures are reported as warnings of the suite
    return mteb


def _first_line(error: object) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
