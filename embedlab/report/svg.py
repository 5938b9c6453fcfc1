"""A figure of matplotlib's as part of a page: text that can be read and searched, in the page's colours."""

from __future__ import annotations

import re
from io import StringIO
from typing import TYPE_CHECKING

from embedlab.evaluation.core.figures import PALETTE
from embedlab.report.figures import INK, LINE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_THEMED = {color: f"var(--s{i})" for i, color in enumerate(PALETTE)} | {
    INK: "var(--ink)",
    LINE: "var(--line)",
}
_COLOR = re.compile("|".join(_THEMED))
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def inline_svg(figure: Figure, prefix: str, label: str) -> str:
    """The ``<svg>`` element of a figure.

    Args:
        figure: drawn inside `embedlab.report.figures.drawing`; no text of it is taken for mark-up.
        prefix: of its ids, another one for each figure of a page.
        label: what it shows, in plain words without mark-up.

    Returns: mark-up whose colours are the page's variables (``--s0`` on, ``--ink``, ``--line``).
    """
    file = StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata=_NO_METADATA)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = _outside_text(text)
    used = set(re.findall(r'(?:url\(|href=")#([\w.-]+)', text))
    text = re.sub(
        r' id="([^"]*)"', lambda found: f' id="{prefix}{found[1]}"' if found[1] in used else "", text
    )
    text = re.sub(r'(url\(|href=")#', rf"\g<1>#{prefix}", text)
    size = re.search(r'<svg[^>]*? width="([\d.]+)pt"', text)
    width = round(float(size[1]) * 4 / 3) if size else 700
    text = re.sub(r'(<svg[^>]*?) width="[\d.]+pt"', rf'\1 style="width:{width}px"', text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[\d.]+pt"', r"\1", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def _outside_text(text: str) -> str:
    """The mark-up with the page's colours; what stands between tags stays as it is."""
    return re.sub(r"<[^>]*>", lambda tag: _COLOR.sub(lambda found: _THEMED[found[0]], tag[0]), text)
