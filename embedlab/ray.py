"""Encoding on a Ray cluster: `RayEncoder` is what `ray.data.Dataset.map_batches` runs on each of its workers.

    import ray
    from embedlab.ray import RayEncoder

    texts = ray.data.read_parquet("in/")
    vectors = texts.map_batches(
        RayEncoder,
        fn_constructor_kwargs={"ckpt": "ORG/NAME", "prompt_name": "document"},
        compute=ray.data.ActorPoolStrategy(size=8),
        num_gpus=1,
        batch_size=8192,
    )
    vectors.write_parquet("out/")

Ray is not imported here: a worker needs it, and this package, but not the other way round.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from embedlab.corpus.quantize import calibration
from embedlab.corpus.vector_files import stored
from embedlab.encoders.codes import Codes, Store
from embedlab.encoders.loading import load
from embedlab.errors import UserError


class RayEncoder:
    """A column of texts gets a column of vectors; all other columns stay as they are.

    Args:
        ckpt: a path that every worker sees, or a hub id.
        column: with the texts.
        output: the column that is added: fp32 [D], or the codes of `store`.
        store: float32, float16, int8, uint8, binary or ubinary.
        ranges: for int8 and uint8, a file of vectors or its ranges.npy.
        settings: of `Encoder.encode`: batch_size, normalize, dtype, prompt, prompt_name, dim.

    Raises:
        UserError: no such encoder, an unknown store, dtype or prompt.
    """

    def __init__(
        self,
        ckpt: str,
        column: str = "text",
        output: str = "vector",
        store: Store = "float32",
        ranges: str | None = None,
        **settings: Any,
    ) -> None:
        device = (
            "cuda" if torch.cuda.is_available() else "cpu"
        )  # Ray shows a worker those GPUs alone that are its own
        self.encoder = load(ckpt).to(device)
        self.column, self.output, self.settings = column, output, settings
        self.store: Store = store
        self.ranges = None if ranges is None else calibration(Path(ranges))
        self._encode(["a text"])  # what is wrong with the settings is said before a row is read

    def __call__(self, batch: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """A batch with the vectors of its texts.

        Raises:
            UserError: a column that is not there, a row that is no text or an empty one, a vector that is not finite or
                cannot be stored.
        """
        if self.column not in batch:
            raise UserError(
                f"has the columns {', '.join(batch)}", key="column", value=self.column, fix="column=NAME"
            )
        texts = batch[self.column].tolist()
        for i, text in enumerate(texts):
            if not isinstance(text, str) or not text.strip():
                problem = f"{text!r:.60} in row {i + 1} of a batch is no text"
                raise UserError(problem, key="column", value=self.column, fix="filter such rows out", index=i)
        return batch | {self.output: self._encode(texts)}

    def _encode(self, texts: list[str]) -> NDArray[Any]:
        vectors = self.encoder.encode(texts, **self.settings)
        return stored(vectors, Codes(self.store, vectors.shape[1], self.ranges))
