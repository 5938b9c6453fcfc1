"""What each configuration key means, for ``--help`` and the documentation alike.

A meaning stands once: as the comment above a key in ``conf/``, else with the field of the record that checks it, whose
annotation has the choices. Records are read as text, so that help does not wait for torch.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from embedlab.files import conf_dir
from embedlab.parts import conf_dirs, part_names

_RECORDS = {
    "backbone": "backbone.BackboneConfig", "adapter": "adapter.AdapterConfig", "template": "template.Template",
    "data": "data.DataConfig", "optimizer": "optimizer.OptimizerConfig", "trainer": "trainer.TrainerConfig",
    "logger": "trainer.LoggerConfig", "callbacks": "trainer.CallbacksConfig",
    "callbacks.checkpoint": "trainer.CheckpointConfig", "evaluation": "trainer.ScoringConfig", "": "run.RunConfig",
}  # fmt: skip
_ROOMS = {"method": "methods", "pooling": "pooling", "data": "data/kinds"}
_GROUPS = {group for group in (*_RECORDS, *_ROOMS) if group}

KEYS = "keys and their values:\n"
"""The line after which a help text has the configuration."""


@dataclass(frozen=True)
class Meaning:
    """Of a key: a sentence or several ("" where none is known), and the values that it can have (none: any)."""

    text: str = ""
    choices: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = all(re.search(rf"(?<!\w){re.escape(choice)}(?!\w)", self.text) for choice in self.choices)
        listed = "" if said else f"One of {', '.join(self.choices)}."
        text = self.text if not self.text or self.text.endswith((".", ":")) else f"{self.text}."
        word = text.partition(" ")[0]
        if word.isalpha() and word not in self.choices:
            text = text[0].upper() + text[1:]
        return f"{text} {listed}".strip()


def meanings(group: str, name: str = "") -> dict[str, Meaning]:
    """Of the keys of one group.

    Args:
        group: of the configuration, such as ``pooling`` or ``callbacks.checkpoint``; "": beside the groups.
        name: of the part, where the group has several kinds of parts.

    Returns: by key, in no order; keys of other parts of the group may be among them.
    """
    said, nearest = _comments(group, name), _comments(group, name, nearest=True)
    fields = _fields_of(group, name)
    if "name" in fields and not fields["name"].text:
        said = {"name": f"Which part; {group}=NAME chooses it with its keys", **said}
    return {
        key: Meaning(
            said.get(key) or fields.get(key, Meaning()).text or nearest.get(key, ""),
            fields.get(key, Meaning()).choices,
        )
        for key in {**nearest, **fields, **said}
    }


def annotated(config: str, indent: str = "  ", width: int = 100) -> str:
    """A configuration as YAML, with what each key means above it.

    Args:
        config: YAML of a run's configuration, as OmegaConf writes it.
        indent: before every line.
        width: of a line.
    """
    names = {group: name for group, key, name in _walk(config) if key == "name"}
    lines = []
    for line, (group, key, _) in zip(config.splitlines(), _walk(config), strict=True):
        section = f"{group}.{key}".lstrip(".")
        is_group = line.endswith(":") and section in _GROUPS
        if key and not is_group:
            meaning = str(meanings(group, names.get(group, "")).get(key, ""))
            start = f"{indent}{' ' * (len(line) - len(line.lstrip()))}# "
            lines += textwrap.wrap(meaning, width, initial_indent=start, subsequent_indent=start)
        lines.append(f"{indent}{line}")
    return "\n".join(lines)


def _walk(config: str) -> Iterator[tuple[str, str, str]]:
    """Group, key and value of each line; no key for one that goes on with a list or a long text."""
    above: list[tuple[int, str]] = []
    for line in config.splitlines():
        found = re.match(r"( *)'?([\w.]+)'?:(?: (.*))?$", line)
        if found is None:
            yield "", "", ""
            continue
        while above and above[-1][0] >= len(found[1]):
            above.pop()
        yield ".".join(key for _, key in above), found[2], found[3] or ""
        above.append((len(found[1]), found[2]))


@cache
def _comments(group: str, name: str, nearest: bool = False) -> dict[str, str]:
    """Comments above the keys in the files of a group, those of the part ``name`` first; the ``nearest`` one of keys
    that have none of their own, but follow a key that has."""
    if not group:
        return _comments_in(conf_dir() / "train.yaml")[nearest]
    top, _, rest = group.partition(".")
    files = [file for folder in (conf_dir(), *conf_dirs()) for file in sorted((folder / top).glob("*.yaml"))]
    files.sort(key=lambda file: file.stem != name)
    found: dict[str, str] = {}
    for file in files:
        if top in _ROOMS and not _says_name(file, name):
            continue
        for key, text in _comments_in(file)[nearest].items():
            section, _, last = key.rpartition(".")
            if section == rest:
                found.setdefault(last, text)
    return found


def _says_name(file: Path, name: str) -> bool:
    """Whether a file makes the part of this name, by itself or from the file that it begins with."""
    text = file.read_text(encoding="utf-8")
    if own := re.search(r"^name: (.*)$", text, re.MULTILINE):
        return own[1] == name
    return file.stem == name or f"\n  - {name}\n" in text


@cache
def _comments_in(file: Path) -> tuple[dict[str, str], dict[str, str]]:
    """By dotted key: of those below a comment, and of those that follow one of them. In a file that is one choice of
    several, what stands at the top is about the whole file."""
    found: dict[str, str] = {}
    follow: dict[str, str] = {}
    last = ""
    headed = len(list(file.parent.glob("*.yaml"))) > 1
    said: list[str] = []
    above: list[tuple[int, str]] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        key = re.match(r"( *)(\w+):", line)
        if line.lstrip().startswith("#"):
            said.append(line.strip(" #"))
            continue
        if key:
            while above and above[-1][0] >= len(key[1]):
                above.pop()
            above.append((len(key[1]), key[2]))
            last = "" if headed else " ".join(said) or last
            if last:
                (found if said else follow)[".".join(k for _, k in above)] = last
            headed = False
        said = []
    return found, follow


@cache
def _fields_of(group: str, name: str) -> dict[str, Meaning]:
    found: dict[str, Meaning] = {}
    if group in _RECORDS:
        module, _, record = _RECORDS[group].rpartition(".")
        found |= fields(f"embedlab.config.{module}", record)
    part = part_names(_ROOMS.get(group, "none")).get(name)
    for record in _records_of(part, name) if part else []:
        found |= fields(str(part), record)
    return found


@cache
def _tree(module: str) -> ast.Module:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return ast.Module([], [])
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def _records_of(module: str, name: str) -> list[str]:
    """Classes of a module that have fields, one of them ``name`` with this default."""
    return [
        node.name
        for node in _tree(module).body
        if isinstance(node, ast.ClassDef)
        and any(
            isinstance(line, ast.AnnAssign)
            and ast.unparse(line.target) == "name"
            and isinstance(line.value, ast.Constant)
            and line.value.value == name
            for line in node.body
        )
    ]


def fields(module: str, record: str) -> dict[str, Meaning]:
    """Of a record with those that it inherits: the text below a field, else its entry in ``Args:``.

    Args:
        module: that has the record.
        record: the class's name.
    """
    node = _find(module, record, ast.ClassDef)
    if node is None:
        return {}
    found: dict[str, Meaning] = {}
    for base in node.bases:
        place = _imported(module, ast.unparse(base))
        found |= fields(*place) if place else {}
    listed = _arguments(ast.get_docstring(node) or "")
    for line, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(line, ast.AnnAssign) and "ClassVar" not in (kind := ast.unparse(line.annotation)):
            key = ast.unparse(line.target)
            text = _text(following) or listed.get(key) or found.get(key, Meaning()).text
            found[key] = Meaning(_plain(text), tuple(_literals(module, kind)))
        elif isinstance(line, ast.Assign) and (text := _text(following)):
            key = ast.unparse(line.targets[0])
            old = found.get(key, Meaning())
            found[key] = Meaning(_plain(text), old.choices)
    return found


def _plain(text: str) -> str:
    """A docstring's text in the words of a configuration."""
    return re.sub(r"\bNone:", "null:", " ".join(text.replace("`", "").split()))


def _text(node: ast.stmt | None) -> str:
    if (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ):
        return node.value.value
    return ""


def _find(module: str, name: str, kind: type[ast.stmt]) -> Any:
    return next(
        (n for n in _tree(module).body if isinstance(n, kind) and getattr(n, "name", "") == name), None
    )


def _imported(module: str, name: str) -> tuple[str, str] | None:
    """Where a name of a module comes from: itself, or a module of some package that it imports from."""
    for node in _tree(module).body:
        if isinstance(node, ast.ImportFrom) and node.module and any(a.name == name for a in node.names):
            return (node.module, name) if node.module.startswith(module.partition(".")[0]) else None
    return module, name


def _literals(module: str, annotation: str) -> Iterator[str]:
    """The values that an annotation lists, by itself or under a name."""
    for node in ast.walk(ast.parse(annotation, mode="eval")):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
            values = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            yield from (str(v.value).lower() if isinstance(v.value, bool) else str(v.value)
                        for v in values if isinstance(v, ast.Constant))  # fmt: skip
        elif isinstance(node, ast.Name) and node.id[:1].isupper() and (place := _imported(module, node.id)):
            for line in _tree(place[0]).body:
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == place[1]:
                    yield from _literals(place[0], ast.unparse(line.value))


def _arguments(docstring: str) -> dict[str, str]:
    """Entries of ``Args:``; one of several names counts for each."""
    part = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", docstring, re.MULTILINE | re.DOTALL)
    if part is None:
        return {}
    entries = re.split(r"^    (?=[\w, ]+: )", part[1], flags=re.MULTILINE)
    found = {}
    for entry in entries:
        names, sign, text = entry.partition(":")
        if sign:
            found.update(dict.fromkeys(re.split(r", *", names.strip()), text))
    return found


def listed_keys(comment: str) -> dict[str, str]:
    """The keys that a command's leading comment lists, ``key  meaning``, with their meanings.

    Args:
        comment: of ``conf/COMMAND.yaml``, without the ``#``.
    """
    found: dict[str, str] = {}
    key = ""
    for line in comment.splitlines():
        if entry := re.match(r"(\w+) {2,}(\S.*)", line):
            key = entry[1]
            found[key] = entry[2]
        elif key and line.startswith("   "):
            found[key] += f" {line.strip()}"
        else:
            key = ""
    return found


def sections(values: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The groups of a run's configuration, each with its keys and their values; "" has those beside the groups."""
    yield "", {key: value for key, value in values.items() if key not in _GROUPS}
    for group in sorted(_GROUPS):
        top, _, rest = group.partition(".")
        keys = values.get(top)
        if isinstance(keys, Mapping):
            inner = keys[rest] if rest else {k: v for k, v in keys.items() if f"{group}.{k}" not in _GROUPS}
            yield group, inner
