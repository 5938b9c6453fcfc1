"""The sentence encoder: tokenization, backbone and pooling; to a folder and back."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from embedlab.backbones.adapter_files import read_adapter, write_adapter
from embedlab.backbones.adapters import WEIGHTS, merged, plain_weights
from embedlab.backbones.load import load_backbone, write_model
from embedlab.backbones.weight_files import corruption
from embedlab.config.backbone import Attention, BackboneConfig, Dtype
from embedlab.encoders.base import DTYPES, Encoder
from embedlab.encoders.folder import CARD, POOLING_WEIGHTS, EncoderFile, whole_folder
from embedlab.encoders.grad_cache import cached
from embedlab.encoders.pipeline import Reader
from embedlab.encoders.sentence_transformers import write_modules
from embedlab.encoders.tokenization import Tokenization
from embedlab.encoders.usage import Usage
from embedlab.errors import UserError
from embedlab.files import scratch_folder
from embedlab.kernels import inference
from embedlab.kernels.available import has_foreign_hooks
from embedlab.kernels.packed_rows import PackedRows
from embedlab.pooling import build_pooling

if TYPE_CHECKING:
    from embedlab.backbones import Backbone
    from embedlab.config.pooling import PoolingConfig
    from embedlab.pooling import Pooling

log = logging.getLogger(__name__)


class SentenceEncoder(Encoder):
    """Tokenization, backbone and pooling.

    Args:
        backbone: token ids to hidden states.
        pooling: hidden states to a vector.
        tokenization: text to token ids, with template and length limit.
        card: where the encoder comes from; plain values, saved with it.
        usage: prompts, kept width and similarity.
    """

    def __init__(
        self,
        backbone: Backbone,
        pooling: Pooling,
        tokenization: Tokenization,
        card: dict[str, Any] | None = None,
        usage: Usage | None = None,
    ) -> None:
        super().__init__(card, usage)
        self.backbone = backbone
        self.pooling = pooling
        self.tokenization = tokenization
        if pooling.needs_all_layers:
            backbone.prepare_all_layers()

    @property
    def towers(self) -> Sequence[SentenceEncoder]:  # type: ignore[override]
        """Itself."""
        return (self,)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, capacity: int | None = None, skip: int = 0
    ) -> Tensor:
        """Token ids and mask, [B, L], to vectors [B, width of the pooling] in fp32, not normalised.

        With a `capacity` the backbone computes that many tokens instead of B x L (`Backbone.forward`). The pooling
        leaves the first `skip` real tokens of each row out.
        """
        if capacity is not None or skip:
            return self._vectors(input_ids, attention_mask, capacity, skip)
        return cached(self._vectors, input_ids, attention_mask, chunk=self.chunk)

    def _vectors(
        self, input_ids: Tensor, attention_mask: Tensor, capacity: int | None = None, skip: int = 0
    ) -> Tensor:
        position = None
        pooled = attention_mask * (attention_mask.cumsum(dim=1) > skip) if skip else attention_mask
        if self.backbone.reads_one(input_ids.device, capacity is not None):
            position = self.pooling.position(pooled, self.tokenization.marks)
        hidden = self.backbone(
            input_ids,
            attention_mask,
            all_layers=self.pooling.needs_all_layers,
            capacity=capacity,
            position=position,
        )
        vectors: Tensor = self.pooling(hidden, pooled, self.tokenization.marks)
        if (
            skip and self.pooling.config.stock_mode == "lasttoken"
        ):  # of nothing: zeros, as in sentence-transformers
            vectors = vectors.where(pooled.any(dim=1, keepdim=True), 0.0)
        return vectors

    def reader(self, skip: int) -> Reader | None:
        backbone, device = self.backbone, self.device
        watched = any(has_foreign_hooks(module) for module in (self, backbone, self.pooling))
        own = type(self).forward is not SentenceEncoder.forward
        if watched or own or self.pooling.config.counts_padding or not inference.applies(backbone, device):
            return None
        dtype = backbone.model.embeddings.word_embeddings.weight.dtype
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        weights = inference.Weights(backbone, dtype)

        def vectors(rows: PackedRows) -> Tensor:
            pooling, marks = self.pooling, self.tokenization.marks
            mask = rows.mask()
            position = pooling.position(mask, marks)
            if position is None:
                states = weights.states(rows, every=pooling.needs_all_layers)
                return pooling.packed(tuple(states), rows, marks)
            # Behind the last row's end there is a slot for an empty one too.
            slot = (rows.bounds[:-1] + position).clamp(max=len(rows.ids) - 1)
            state = weights.states(rows, slot=slot)[-1]
            one: Tensor = pooling((torch.where(mask.any(1)[:, None], state, 0.0)[:, None],), mask, marks)
            return one

        return Reader(vectors, weights.longest, backbone.position_offset)

    def read_by(self, config: PoolingConfig) -> None:
        """Read the hidden states by another pooling, in place.

        Raises:
            UserError: one that has no meaning here, or has weights.
        """
        config.check(self.backbone.info, self.tokenization.template, "")
        other = build_pooling(config, self.backbone.info)
        if any(True for _ in other.parameters()):
            raise UserError(
                "has weights, which this checkpoint does not hold",
                key="pooling",
                value=config.name,
                fix="a pooling without weights, such as cls, mean, last, last_n or rep1",
            )
        self.pooling = other.to(self.device)
        if other.needs_all_layers:
            self.backbone.prepare_all_layers()

    def reading(self, tokenization: Tokenization) -> SentenceEncoder:
        """An encoder of the same modules that reads text in another way."""
        return SentenceEncoder(self.backbone, self.pooling, tokenization, self.card, self.usage)

    def _digest(self) -> str:
        digest = hashlib.sha256()
        weights = [(f"model.{n}", v) for n, v in plain_weights(self.backbone)]
        weights += sorted((f"pooling.{n}", v) for n, v in self.pooling.state_dict().items())
        for name, weight in weights:
            value = weight.detach().cpu().contiguous()
            if value.is_floating_point():  # as a loaded folder has them, in whatever the weights are held now
                value = value.float()
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
        settings = {"pooling": asdict(self.pooling.config), "tokenization": self.tokenization.fingerprint}
        if usage := self.usage.to_dict():
            settings["usage"] = usage
        digest.update(json.dumps(settings, sort_keys=True).encode())
        return digest.hexdigest()[:16]

    def merged(self) -> SentenceEncoder:
        if self.backbone.adapter is None:
            return self
        plain = merged(self.backbone).to(self.device)
        return SentenceEncoder(plain, self.pooling, self.tokenization, self.card, self.usage).eval()

    def write(self, folder: Path, dtype: str | None = None, merge: bool = True) -> None:
        if merge or self.backbone.adapter is None:
            write_model(self.backbone, folder, DTYPES[dtype] if dtype is not None else None)
        else:
            write_adapter(self.backbone, folder)
        self.tokenizer.save_pretrained(folder)
        state = {k: v.detach().cpu().contiguous() for k, v in self.pooling.state_dict().items()}
        if state:
            save_file(state, folder / POOLING_WEIGHTS)
        (folder / CARD).write_text(self._description(merge).text(), encoding="utf-8")

    def _description(self, merge: bool) -> EncoderFile:
        """Where an adapter is not merged, also what it belongs to."""
        adapter = None if merge else self.backbone.adapter
        return self.description(adapter=adapter.card if adapter is not None else None)

    def manifest(self) -> dict[str, dict[str, str]]:
        with scratch_folder() as folder:
            if self.backbone.adapter is None:
                self.backbone.model.config.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
            texts = {p.name: p.read_text(encoding="utf-8") for p in folder.iterdir() if p.is_file()}
        texts[CARD] = self._description(merge=False).text()
        model = "model.safetensors" if self.backbone.adapter is None else WEIGHTS
        weights = {model: "backbone.model."}
        if self.pooling.state_dict():
            weights[POOLING_WEIGHTS] = "pooling."
        return {"files": texts, "weights": weights}

    def to_sentence_transformers(self, folder: str | os.PathLike[str]) -> None:
        with whole_folder(folder) as fresh:
            self.write(fresh)
            write_modules(fresh, self.pooling, self.tokenization, self.backbone.info.layers, self.usage)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        attention: Attention | None = None,
        dtype: Dtype = "float32",
        trust_remote_code: bool = False,
    ) -> SentenceEncoder:
        """Read what `save` wrote, in evaluation mode.

        Args:
            folder: of an encoder.
            attention: another kernel than it was saved with.
            dtype: of the weights (an adapter's base has its own).
            trust_remote_code: run code that comes with the backbone; what the files say of it does not count.

        Raises:
            UserError: no encoder, one of a newer format, or files that are broken or do not fit each other.
        """
        folder = Path(folder)
        saved = EncoderFile.read(folder)
        if saved.towers is not None:
            raise UserError("is a twin, of several encoders", file=folder, fix="embedlab.load(folder)")
        kernel = attention or _available(saved.backbone.get("attention", "sdpa"))
        if saved.adapter is not None:
            backbone, tokenizer = read_adapter(saved.adapter, folder, kernel, trust_remote_code)
        else:
            config = BackboneConfig(
                "local",
                folder.name,
                str(folder),
                attention=kernel,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
            )
            backbone, tokenizer = load_backbone(config)
        pooling = build_pooling(saved.pooling, backbone.info)
        weights = folder / POOLING_WEIGHTS
        try:
            pooling.load_state_dict(load_file(weights) if weights.is_file() else {})
        except (SafetensorError, RuntimeError, OSError) as error:
            raise UserError(
                f"the pooling's weights do not fit: {corruption(error) or error}",
                file=weights,
                fix="another copy of the encoder",
            ) from error
        backbone.commit = backbone.commit or saved.backbone.get("commit")
        tokenization = Tokenization.from_dict(tokenizer, saved.tokenization)
        usage = Usage.from_dict(saved.usage)
        return cls(backbone, pooling, tokenization, saved.card, usage).eval()


def _available(attention: Attention) -> Attention:
    if attention == "flash_attention_2":
        from transformers.utils.import_utils import is_flash_attn_2_available

        if not (torch.cuda.is_available() and is_flash_attn_2_available()):
            log.warning("flash_attention_2 is not available here: using sdpa.")
            return "sdpa"
    return attention
