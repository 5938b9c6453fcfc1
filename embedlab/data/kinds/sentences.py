"""Unlabelled sentences, one a row."""

from __future__ import annotations

from typing import ClassVar

from embedlab.data.kinds import DataKind


class Sentences(DataKind):
    """``data=sentences`` (or ``wikipedia``): any text with one sentence a row."""

    name = "sentences"
    roles = ("sentence",)
    usual: ClassVar = {"sentence": ("sentence", "text")}
    packages = ("gensim-wikipedia", "gensim-lee", "emoji-phrases")
