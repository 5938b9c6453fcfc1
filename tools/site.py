"""What mkdocs asks of this project (`hooks` in mkdocs.yml): pages made from code and configuration, and links that
lead out of the documentation.

A page a method is docs/methods/NAME.md, or where there is none the head of its module, and below it the commands of
its experiments, its keys and its results. Formulas become MathML, which browsers draw by themselves.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path, PurePosixPath
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT))

from embedlab.cli import main as cli  # noqa: E402
from embedlab.cli.compose import compose, leading_comment  # noqa: E402
from embedlab.cli.keys import Meaning, listed_keys, meanings, sections  # noqa: E402
from embedlab.files import conf_dir  # noqa: E402
from embedlab.parts import part_names  # noqa: E402
from tools.experiments import experiments  # noqa: E402

REPOSITORY = os.environ.get("EMBEDLAB_REPOSITORY", "")
"""Where the files are that the site does not have, such as https://github.com/OWNER/NAME/blob/main; "": links to them
become plain text."""
RESULTS = {
    "promptbert": "simcse",
    "tncse": "jtcse",
    "distil": "jtcse",
    "ensemble": "jtcse",
    "prompteol": "csesfp",
}
"""Methods whose results stand on another one's page."""
TITLES = {
    "simcse": "SimCSE", "promptbert": "PromptBERT", "prompteol": "PromptEOL", "jtcse": "JTCSE", "tncse": "TNCSE",
    "csesfp": "CSE-SFP", "bepa": "BEPA", "s2sent": "S2Sent", "masked_lm": "Masked language modelling",
    "esimcse": "ESimCSE", "mixcse": "MixCSE", "rankcse": "RankCSE", "sncse": "SNCSE", "diffcse": "DiffCSE",
    "infocse": "InfoCSE", "metaeol": "MetaEOL", "mntp": "MNTP", "whitening": "Whitening", "whitenedcse": "WhitenedCSE",
    "supervised": "Your own data", "causal_lm": "Next-token prediction", "distil": "Distillation",
    "ensemble": "Ensembles", "pcl": "PCL",
}  # fmt: skip
LIGHTNING = dict.fromkeys(
    ("fit", "validate", "test", "predict"),
    "LightningCLI: `--config FILE`, and `--model.KEY`, `--data.KEY`, … with the [keys of a run](keys.md); "
    "`--trainer.KEY` are Lightning's own. [Clusters](../clusters.md) has the file.",
)
_MATH: list[str] = []
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FILE_NAME = re.compile(r"\A(```\w+) ([\w./-]+)$", re.MULTILINE)
"""Of a block of code, as README's tests read it; the site shows it above the block."""
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def methods() -> list[str]:
    """Pages of methods; S2Sent, which is a pooling, has one too."""
    return ["s2sent", *sorted(part_names("methods"))]


def on_config(config: Any) -> Any:
    """Puts the pages of the methods into the navigation."""
    for entry in config.nav:
        if entry.get("Methods") == "methods":
            entry["Methods"] = [{TITLES.get(name, name): f"methods/{name}.md"} for name in methods()]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that nobody wrote."""
    made = {"reference/commands.md": commands_page(), "reference/keys.md": keys_page()}
    for name in methods():
        if not (DOCS / "methods" / f"{name}.md").is_file():
            made[f"methods/{name}.md"] = head_of_module(name)
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page with its generated parts, its links and its formulas."""
    place = page.file.src_uri
    if place.startswith("methods/"):
        markdown += method_parts(PurePosixPath(place).stem)
    parts = _CODE.split(markdown)
    parts[::2] = [_formulas(_links(text, place, files)) for text in parts[::2]]
    parts[1::2] = [_FILE_NAME.sub(r'\1 title="\2"', code) for code in parts[1::2]]
    return "".join(parts)


def _links(text: str, place: str, files: Files) -> str:
    def turned(found: re.Match[str]) -> str:
        picture, label, target = found.groups()
        path, sign, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target) or not path:
            return found[0]
        at = os.path.normpath(PurePosixPath("docs", place).parent / path)
        if not (ROOT / at).exists() and files.get_file_from_path(at.removeprefix("docs/")) is None:
            raise PluginError(f"{place}: {target} is not there")
        inner = at.removeprefix("docs/")
        result = re.fullmatch(r"docs/results/(\w+)\.md", at)
        if result and result[1] in methods():  # others have a page of their own
            inner, sign, anchor = f"methods/{result[1]}.md", "#", anchor or "results"
        if at.startswith("docs/") and files.get_file_from_path(inner) is not None:
            return f"{picture}[{label}]({os.path.relpath(inner, PurePosixPath(place).parent)}{sign}{anchor})"
        return f"[{label}]({REPOSITORY}/{at})" if REPOSITORY else label

    return _LINK.sub(turned, text)


def _formulas(text: str) -> str:
    """A mark in place of each formula: LaTeX between dollar signs, as GitHub reads it."""

    def marked(latex: str, display: str) -> str:
        _MATH.append(convert(latex.strip(), display=display))
        return f"embedlab-formula-{len(_MATH) - 1}-"

    text = re.sub(r"\$\$(.+?)\$\$", lambda m: marked(m[1], "block"), text, flags=re.DOTALL)
    return re.sub(r"(?<![\\$\w])\$(?! )([^$\n]+?)(?<! )\$(?![\d$])", lambda m: marked(m[1], "inline"), text)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """The page with its formulas as MathML, which Markdown would take for blocks of HTML."""
    return re.sub(r"embedlab-formula-(\d+)-", lambda m: _MATH[int(m[1])], html)


def head_of_module(name: str) -> str:
    """The beginning of a page: what the method's module says of itself."""
    spec = importlib.util.find_spec(part_names("methods")[name])
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text(encoding="utf-8").split('"""')[1]
    first, _, rest = text.partition("\n")
    more = f"\n```text\n{rest.strip()}\n```\n" if rest.strip() else ""
    return f"# {TITLES.get(name, name)}\n\n{first}\n{more}"


def method_parts(name: str) -> str:
    """Below what is written of a method: commands, keys, results."""
    group = "pooling" if name == "s2sent" else "method"
    return "\n".join(["", *_commands(name), *_keys(group, name), *_results(RESULTS.get(name, name))])


def _commands(name: str) -> Iterator[str]:
    own = [e for e in experiments() if e.name.partition("_")[0] == name and "Command" in e.fields]
    if own:
        yield "## Experiments\n\nWhat each differs in from its paper: [experiments](../experiments.md).\n"
        yield "| `experiment=` | table | published |\n|---|---|---|"
        for e in own:
            cells = [
                " ".join(e.fields.get(key, []))
                for key in ("Table" if "Table" in e.fields else "Paper", "Published")
            ]
            yield f"| `{e.name}` | {' | '.join(cell.replace('|', '/') for cell in cells)} |"
        yield ""


def _keys(group: str, name: str) -> Iterator[str]:
    values = compose("train", [f"{group}={name}"])[group]
    yield f"## Keys\n\nOf `{group}={name}`, as `embedlab train {group}={name} --help` shows them.\n"
    yield from key_table(group, values, name)


def key_table(group: str, values: Mapping[str, Any], name: str = "") -> Iterator[str]:
    """A row a key: default, meaning, choices."""
    said = meanings(group, name)
    yield "| key | default | meaning |\n|---|---|---|"
    for key, value in values.items():
        meaning = str(said.get(key, Meaning())).replace("|", "\\|").replace("<", "&lt;").replace("$", "\\$")
        meaning = re.sub(r"\](?= ?\[)", r"\\]", meaning)  # [SEP] [CLS] would be a reference
        shown = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
        default = shown.replace("|", "\\|")
        yield f"| `{group + '.' if group else ''}{key}` | `{default}` | {meaning} |"
    yield ""


def _results(name: str) -> Iterator[str]:
    place = DOCS / "results" / f"{name}.md"
    if not place.is_file():
        return
    lines = place.read_text(encoding="utf-8").splitlines()
    yield "## Results\n"
    for line in lines:
        if not line.startswith(("# ", "<!--")):
            yield re.sub(r"^#(#+ )", r"##\1", line)


def commands_page() -> str:
    """reference/commands.md: every command with its help."""
    parts = [
        "# Commands\n\n`embedlab COMMAND --help` shows the same. Arguments are `key=value`; the exit status is 0, "
        "2 for bad input (one line that names the key and the fix), 1 for a failure, 130 after Ctrl-C.\n"
    ]
    for name, line in cli.COMMANDS.items():
        parts.append(f"## {name}\n\n{line[:1].upper()}{line[1:]}.\n")
        if name in ("train", *LIGHTNING):
            parts.append(f"{LIGHTNING.get(name, 'Its keys have [a page](keys.md) of their own.')}\n")
            continue
        comments = sorted(f.stem for f in conf_dir().glob("*.yaml") if f.stem.partition("_")[0] == name)
        for file in comments:
            parts += _command_keys(file)
        if not comments:
            parts.append(f"```text\n{_help(name)}\n```\n")
    return "\n".join(parts)


def _command_keys(file: str) -> Iterator[str]:
    comment = leading_comment(conf_dir() / f"{file}.yaml")
    listed = listed_keys(comment)
    about = comment[: comment.index(f"\n{next(iter(listed))} ")] if listed else comment
    if "_" in file:
        yield f"### {file.replace('_', ' ')}\n"
    prose, _, examples = about.partition("\n\n")
    yield " ".join(prose.split()) + "\n"
    if examples.strip():
        lines = "\n".join(line.strip() for line in examples.strip().splitlines())
        yield f"```text\n{lines}\n```\n"
    yield "| key | meaning |\n|---|---|"
    yield from (f"| `{key}` | {text} |".replace("<", "&lt;") for key, text in listed.items())
    yield ""


def _help(name: str) -> str:
    shown = io.StringIO()
    try:
        with redirect_stdout(shown):
            cli.main([name, "--help"])
    except SystemExit:
        pass
    return shown.getvalue().strip()


def keys_page() -> str:
    """reference/keys.md: every key of a run."""
    parts = [
        "# Keys of a run\n\nEvery key of `embedlab train`, with its default and what it means; "
        "`embedlab train --help` shows the same for the configuration that its other arguments compose. Keys of "
        "methods stand on [their pages](../methods/simcse.md).\n"
    ]
    values = compose("train", [])
    groups = {group for group, _ in sections(values)}
    for group, keys in sections(values):
        if group in ("method", "pooling", "data"):
            continue
        choices = (
            sorted(file.stem for file in (conf_dir() / group).glob("*.yaml"))
            if group and "." not in group
            else []
        )
        parts.append(f"## {group or 'Beside the groups'}\n")
        if len(choices) > 1:
            parts.append(f"`{group}=` {', '.join(f'`{choice}`' for choice in choices)}\n")
        shown = {key: value for key, value in keys.items() if f"{group}.{key}" not in groups}
        parts += key_table(group, shown, str(keys.get("name", "")))
    for group in ("data", "pooling"):
        for file in sorted((conf_dir() / group).glob("*.yaml")):
            found = compose("train", [f"{group}={file.stem}"])[group]
            parts.append(f"## {group}={file.stem}\n")
            parts += key_table(group, found, str(found["name"]))
    return "\n".join(parts)
