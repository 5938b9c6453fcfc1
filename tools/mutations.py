"""Small faults that can be written into a source file: for ``tools/mutants.py``.

The operators are mutmut's (constants, comparisons, arithmetic, boolean words, keyword arguments left out, arms of
conditional expressions), and calls left out that keep type and shape, ``x.detach()`` to ``x``. Not touched: text,
annotations, decorators, imports, assertions (``strict=`` too), what is raised, logged or drawn.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation import mutators

_KEEP_SHAPE = (
    *(
        "abs",
        "ceil",
        "clamp",
        "clip",
        "contiguous",
        "detach",
        "double",
        "exp",
        "float",
        "flip",
        "floor",
        "half",
    ),
    *(
        "log",
        "log1p",
        "long",
        "lower",
        "masked_fill",
        "nan_to_num",
        "neg",
        "normalize",
        "relu",
        "round",
        "sigmoid",
    ),
    *("softmax", "sort", "sorted", "sqrt", "square", "strip", "t", "tanh", "to", "type_as", "where", "zero_"),
)
_MODULES = ("F", "functional", "math", "np", "torch")
_SKIPPED = (
    m.Annotation()
    | m.Decorator()
    | m.Import()
    | m.ImportFrom()
    | m.Raise()
    | m.Assert()
    | m.FormattedString()
    | m.Arg(keyword=m.Name("strict"))
    | m.If(test=m.Name("TYPE_CHECKING"))
    | m.Call(func=m.Name("print") | m.Name("Metric") | m.Name("Table") | m.Attribute(attr=m.Name("describe")))
    | m.Call(func=m.Attribute(value=m.Name("log") | m.Name("warnings") | m.Name("console")))
    | m.Call(func=m.Attribute(value=m.Name("self"), attr=m.Name("log")))
)


@dataclass(frozen=True)
class Site:
    """A place where a fault can stand.

    Args:
        path: of the file, below the checkout.
        first, last: lines of the statement that is changed.
        operator: that makes it.
        inside: whether it is in a function, so that only tests that run these lines can see it.
        module, node, mutated: the file's tree, the node in it, and what comes in its place.
    """

    path: str
    first: int
    last: int
    operator: str
    inside: bool
    module: cst.Module
    node: cst.CSTNode
    mutated: cst.CSTNode

    def source(self) -> str | None:
        """The whole file with the fault; None where that is no other program."""
        changed = self.module.deep_replace(self.node, self.mutated).code  # type: ignore[arg-type]
        try:
            another = ast.dump(ast.parse(changed)) != ast.dump(ast.parse(self.module.code))
        except SyntaxError:
            return None
        return changed if another else None


def sites(root: Path, path: str) -> list[Site]:
    """Every fault of one file.

    Args:
        root: the checkout.
        path: of the file below it.
    """
    wrapper = MetadataWrapper(cst.parse_module((root / path).read_text(encoding="utf-8")))
    finder = _Finder(path, wrapper)
    wrapper.module.visit(finder)
    return finder.found


def difference(source: str, changed: str) -> tuple[str, str]:
    """The lines that differ, without their indentation."""
    old, new = ([line.strip() for line in text.splitlines()] for text in (source, changed))
    while old and new and old[0] == new[0]:
        del old[0], new[0]
    while old and new and old[-1] == new[-1]:
        del old[-1], new[-1]
    return " ".join(old), " ".join(new)


def _drop_call(node: cst.Call) -> Iterator[cst.BaseExpression]:
    """``x.name(…)`` to ``x``; ``module.name(x, …)`` and ``name(x)`` to ``x``."""
    name = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
    if not isinstance(name, cst.Name) or name.value not in _KEEP_SHAPE:
        return
    of_module = m.Name() | m.Attribute(value=m.OneOf(*(m.Name(module) for module in _MODULES)))
    if not m.matches(node.func, of_module):
        yield cst.ensure_type(node.func, cst.Attribute).value
    elif node.args and node.args[0].keyword is None and not node.args[0].star:
        yield node.args[0].value


def _drop_keyword(node: cst.Call) -> Iterator[cst.Call]:
    """mutmut's removal of arguments, without positions, where it is a TypeError nearly always."""
    for i, arg in enumerate(node.args):
        if len(node.args) > 1 and arg.keyword is not None and arg.keyword.value != "strict":
            yield node.with_changes(args=[*node.args[:i], *node.args[i + 1 :]])


_OPERATORS: tuple[tuple[type[cst.CSTNode], str, Callable[..., Iterable[cst.CSTNode]]], ...] = (
    (cst.BaseNumber, "number", mutators.operator_number),
    (cst.Name, "constant", mutators.operator_name),
    (cst.AugAssign, "augmented", mutators.operator_augmented_assignment),
    (cst.UnaryOperation, "unary", mutators.operator_remove_unary_ops),
    (cst.CSTNode, "keyword", mutators.operator_keywords),
    (cst.CSTNode, "swapped", mutators.operator_swap_op),
    (cst.IfExp, "arm", mutators.operator_if_exp),
    (cst.Call, "argument", _drop_keyword),
    (cst.Call, "call", _drop_call),
)


class _Finder(cst.CSTVisitor):
    def __init__(self, path: str, wrapper: MetadataWrapper) -> None:
        super().__init__()
        self.path, self.module = path, wrapper.module
        self.lines = wrapper.resolve(PositionProvider)
        self.found: list[Site] = []
        self.functions: list[cst.CSTNode] = []
        self.statement: cst.CSTNode | None = None

    def on_visit(self, node: cst.CSTNode) -> bool:
        if m.matches(node, _SKIPPED):
            return False
        if isinstance(node, cst.FunctionDef):
            self.functions.append(node)
        if isinstance(node, cst.SimpleStatementLine):
            self.statement = node
        elif isinstance(node, cst.Parameters) and self.statement is None:
            self.statement = self.functions[-1]  # its body shows a default, not the line of the default
        for kind, operator, mutate in _OPERATORS:
            for mutated in mutate(node) if isinstance(node, kind) else ():
                lines = self.lines[self.statement or node]
                site = (lines.start.line, lines.end.line, operator, bool(self.functions))
                self.found.append(Site(self.path, *site, self.module, node, mutated))
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        # A skipped node is left too; none of them is a function.
        if isinstance(original_node, cst.FunctionDef):
            self.functions.pop()
        of_function = isinstance(original_node, cst.Parameters) and self.statement in self.functions
        if of_function or original_node is self.statement:
            self.statement = None
