"""Our encoders as mteb wants them. Imports mteb: import this only where it is wanted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from mteb.models.abs_encoder import AbsEncoder, get_prompt_name
from mteb.models.model_meta import ModelMeta, ScoringFunction

from embedlab.evaluation.core.vectors import Encoder, Prompted, embed


class MTEBEncoder(AbsEncoder):  # type: ignore[misc]  # mteb is untyped here
    """Anything with `encode(list[str]) -> [n, D]` as an mteb model, compared by cosine.

    prompts: texts put before the input, by mteb's keys (a task, a task type, query, document, or one of the
    former with -query or -document); mteb picks the most special one. `used` collects what was picked, by
    task. name and revision identify the model in mteb's result cache.
    """

    def __init__(
        self, encoder: Encoder, name: str, revision: str, prompts: Mapping[str, str] | None = None
    ) -> None:
        self.model = encoder
        self.model_prompts = self.validate_task_to_prompt_name(dict(prompts or {}))
        self.used: dict[str, dict[str, str]] = {}
        self.mteb_model_meta = ModelMeta.create_empty(
            {
                "name": name,
                "revision": revision,
                "similarity_fn_name": ScoringFunction.COSINE,
                "use_instructions": bool(prompts),
            }
        )

    def encode(
        self,
        inputs: Iterable[Mapping[str, Any]],
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: Any = None,
        **kwargs: Any,
    ) -> np.ndarray:
        """Vectors [n, D], float32, of the texts in `inputs` (a data loader of batches with a field
        "text").
        """
        prompt = self._prompt(task_metadata, prompt_type)
        model = self.model if prompt is None else Prompted(self.model, "query", prompt)
        vectors = embed(model, [text for batch in inputs for text in batch["text"]])
        return np.asarray(vectors.numpy())

    def _prompt(self, task_metadata: Any, prompt_type: Any) -> str | None:
        key = get_prompt_name(self.model_prompts, task_metadata, prompt_type)
        if key is None or self.model_prompts is None:
            return None
        self.used.setdefault(task_metadata.name, {})[key] = self.model_prompts[key]
        return str(self.model_prompts[key])
