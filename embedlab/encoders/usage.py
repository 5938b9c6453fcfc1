"""How an encoder is meant to be used: its prompts, the width that is kept, and how its vectors are compared."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from embedlab.config.build import from_dict
from embedlab.errors import UserError, one_of

log = logging.getLogger(__name__)

Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
SIMILARITIES: tuple[Similarity, ...] = get_args(Similarity)
_ROLES = {
    "query": ("anchor",),
    "document": ("positive",),
    "text": ("sentence", "text", "first", "second", "source", "target"),
}
"""Names of prompts, and the roles of training data (`embedlab.data.kinds`) whose they are."""
DOCUMENT = ("document", "passage", "corpus")
"""Names of the prompt for documents, in the order in which they are looked for."""


@dataclass(frozen=True)
class Usage:
    """Settings that `Encoder.encode` obeys, saved with the encoder; training ignores them.

    Args:
        prompts: texts that go before the sentence, by name.
        default_prompt: name of the one that is used where none is named.
        include_prompt: whether the pooling reads the prompt's tokens.
        truncate_dim: the first features that are kept; None: all.
        similarity: the measure that the encoder was trained for; a note for whoever compares its vectors.

    Raises:
        UserError: a default that is no prompt's name, or a width below 1.
    """

    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    include_prompt: bool = True
    truncate_dim: int | None = None
    similarity: Similarity = "cosine"

    def __post_init__(self) -> None:
        if self.default_prompt is not None:
            self.text(None, self.default_prompt)
        if self.truncate_dim is not None and not self.truncate_dim >= 1:
            fix = "null, or a number of features"
            raise UserError("must be at least 1", key="truncate_dim", value=self.truncate_dim, fix=fix)

    def text(self, prompt: str | None = None, name: str | None = None) -> str:
        """What goes before each sentence.

        Args:
            prompt: the text itself; "" for none.
            name: of one of `prompts`; None: the default one, if there is one.

        Raises:
            UserError: an unknown name, or both.
        """
        if prompt is not None and name is not None:
            told = "the prompt and its name are both given"
            raise UserError(
                told, key="prompt_name", value=name, fix="leave one of prompt and prompt_name out"
            )
        if prompt is not None:
            if not isinstance(prompt, str):
                raise UserError("not text", key="prompt", value=prompt, fix=f"quoted: \"prompt='{prompt}'\"")
            return prompt
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            none = "this encoder has none; prompt='TEXT: ' gives one"
            fix = one_of(name, sorted(self.prompts)) if self.prompts else none
            raise UserError("no such prompt", key="prompt_name", value=name, fix=fix)
        return self.prompts[name]

    def role(self, role: Literal["query", "document"]) -> str:
        """What goes before a query or before a document: the prompt of that name, else the default one."""
        names = ("query",) if role == "query" else DOCUMENT
        return self.text(name=next((n for n in names if n in self.prompts), None))

    @classmethod
    def of_training(cls, sets: Iterable[Mapping[str, str | None]]) -> Usage:
        """The prompts that texts were trained with, by the names that they are asked for with.

        An anchor is a query and a positive a document; the one prompt of sentences is the default.

        Args:
            sets: of each set of data the prompt of each role, where it has one.
        """
        sets = list(sets)
        prompts, default = {}, None
        for name, roles in _ROLES.items():
            given = {one[role] or "" for one in sets for role in roles if role in one} - {""}
            if len(given) > 1:
                told = f"{name}: texts were trained with the prompts {sorted(given)}, and none is saved"
                log.warning("%s; encode(prompt=…) asks for one", told)
            elif given:
                prompts[name] = given.pop()
                default = name if name == "text" else default
        return cls(prompts, default)

    def to_dict(self) -> dict[str, Any]:
        """What differs from the defaults, as plain values."""
        plain = asdict(Usage())
        return {key: value for key, value in asdict(self).items() if value != plain[key]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Usage:
        """The counterpart of `to_dict`.

        Raises:
            UserError: an unknown key, or a value of another type.
        """
        return from_dict(cls, dict(values), "usage")
