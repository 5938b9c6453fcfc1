"""The module that a sentence-transformers folder names where no module of that library does the same."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from embedlab.encoders.base import Encoder
from embedlab.encoders.loading import load

try:
    from sentence_transformers.base.modules import InputModule
except ImportError:  # before 6.0
    from sentence_transformers.models import InputModule  # type: ignore[no-redef]


class EmbedlabModule(InputModule):  # type: ignore[misc]
    """A whole encoder as the first and only module."""

    save_in_root = True

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    @property
    def tokenizer(self) -> Any:  # type: ignore[override]
        """Hugging Face's."""
        return self.encoder.tokenizer

    @property
    def max_seq_length(self) -> int | None:
        """Tokens of a row at most, as far as the tokenization limits them."""
        return self.encoder.tokenization.row_limit

    def get_embedding_dimension(self) -> int:
        """Width of the vectors."""
        return self.encoder.dim

    get_sentence_embedding_dimension = get_embedding_dimension

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Texts to padded ids and mask, through the encoder's own tokenization."""
        tokenization = self.encoder.tokenization
        features: dict[str, Any] = tokenization.pad(
            tokenization.ids([(prompt or "") + text for text in inputs])
        )
        if prompt and not self.encoder.usage.include_prompt:
            features["prompt_length"] = tokenization.tokens_before(prompt)
        return features

    def tokenize(self, texts: list[str], **kwargs: Any) -> dict[str, Any]:
        """`preprocess` by the name that sentence-transformers before 6.0 calls."""
        return self.preprocess(texts)

    def forward(self, features: dict[str, Tensor | Any], **kwargs: Any) -> dict[str, Tensor | Any]:
        """Adds ``sentence_embedding`` [B, D]."""
        skip = {"skip": int(features["prompt_length"])} if "prompt_length" in features else {}
        features["sentence_embedding"] = self.encoder(
            features["input_ids"], features["attention_mask"], **skip
        )
        return features

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Write the encoder beside the files of sentence-transformers."""
        self.encoder.write(Path(output_path))

    @classmethod
    def load(  # type: ignore[override]
        cls, model_name_or_path: str, subfolder: str = "", **keywords: Any
    ) -> EmbedlabModule:
        """Read it from a folder, or from the hub by the keywords of `load_dir_path`; the others are of no use here."""
        names = inspect.signature(cls.load_dir_path).parameters
        where = {key: value for key, value in keywords.items() if key in names}
        return cls(load(str(cls.load_dir_path(model_name_or_path, subfolder, **where))))
