"""A twin encoder as one folder of sentence-transformers, made of its own modules only.

It has no module that adds two encoders, and refuses modules of other packages unless they are trusted. So the sum
is spelled in what it has: the first tower's vector waits in the feature that `Pooling` takes for the first token
(`cls_token_embeddings`), the second tower's is pooled beside it, and a `Dense` layer of two weighted identities adds
the two. A third tower follows in the same way.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embedlab.backbones.resolve import quiet
from embedlab.export.sentence_transformers import CUSTOM

if TYPE_CHECKING:
    from embedlab.encoders.encoder import SentenceEncoder
    from embedlab.encoders.twin import TwinEncoder

_MODES = {"cls": "cls", "mean": "mean", "last": "lasttoken"}


def write_sentence_transformers(twin: TwinEncoder, folder: Path) -> None:
    """Write the folder.

    A pooling other than cls, mean and last, a template or a preparation make it one module of this package, as
    for a single encoder (`embedlab.export.sentence_transformers`). With cls, a sentence that spells the first
    special token out as text (``[CLS]``) gets other vectors there.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, WordWeights

    pooling = twin.pooling.config.name
    if (
        pooling not in _MODES
        or twin.tokenization.template is not None
        or twin.tokenization.preparation != "raw"
    ):
        twin.write(folder)
        index = [{"idx": 0, "name": "0", "path": "", "type": CUSTOM}]
        (folder / "modules.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return
    width = twin.dim
    towers: list[SentenceEncoder] = list(twin.towers)  # type: ignore[arg-type]
    modules: list[nn.Module] = [_transformer(towers[0]), Pooling(width, _MODES[pooling])]
    sum_so_far = twin.weights[0]
    for tower, weight in zip(towers[1:], twin.weights[1:], strict=True):
        modules.append(_dense(torch.eye(width), "sentence_embedding", "cls_token_embeddings"))
        modules.append(_transformer(tower))
        beside = _MODES[pooling]
        if pooling == "cls":
            # "cls" now names the waiting vector; this tower's first token is the mean over it alone.
            tokenizer = twin.tokenizer
            vocabulary = [
                token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
            ]
            modules.append(WordWeights(vocabulary, {_first_token(tower): 1.0}, unknown_word_weight=0.0))
            beside = "mean"
        modules.append(Pooling(width, ("cls", beside)))
        both = torch.cat([sum_so_far * torch.eye(width), weight * torch.eye(width)], 1)
        modules.append(_dense(both, "sentence_embedding", "sentence_embedding"))
        sum_so_far = 1.0
    SentenceTransformer(modules=modules, device="cpu").save(str(folder), create_model_card=False)


def _first_token(tower: SentenceEncoder) -> str:
    ids = tower.tokenization.ids([""])[0]
    return str(tower.tokenizer.convert_ids_to_tokens(ids[0]))


def _transformer(tower: SentenceEncoder) -> Any:
    from sentence_transformers.sentence_transformer.modules import Transformer

    limit = tower.tokenization.max_length or tower.tokenization.model_limit
    with tempfile.TemporaryDirectory() as name, quiet():
        tower.write(Path(name))
        return Transformer(name, max_seq_length=limit)


def _dense(weight: Tensor, source: str, target: str) -> Any:
    from sentence_transformers.sentence_transformer.modules import Dense

    return Dense(
        weight.shape[1],
        weight.shape[0],
        bias=False,
        activation_function=nn.Identity(),
        init_weight=weight,
        module_input_name=source,
        module_output_name=target,
    )
