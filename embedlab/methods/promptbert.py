"""PromptBERT (Jiang et al. 2022): a sentence in two templates, less what the templates say by themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from embedlab.backbones.architecture import position_offset
from embedlab.backbones.body import token_positions
from embedlab.config.backbone import BackboneInfo
from embedlab.config.build import from_dict
from embedlab.config.data import kind_name
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.run import MethodConfig, RunConfig
from embedlab.config.template import Template
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.encoders.tokenization import Tokenization
from embedlab.engine.module import Batch, Fields, LossOutput, Method
from embedlab.errors import UserError
from embedlab.methods.contrast import ContrastConfig, contrast
from embedlab.methods.heads import mlp_head
from embedlab.methods.simcse import joint_token_budget, widened

Preparation = Literal["raw", "closed", "stopped"]


@dataclass(frozen=True)
class PromptBERTConfig(ContrastConfig):
    can_unpad: ClassVar[bool] = True

    name: str = "promptbert"
    second_template: Template | None = None
    """Of a sentence's second view (single sentences only); None: the encoder's, which the first view has."""
    denoise: Literal["auto"] | bool = "auto"
    """Subtract a template's own vector, at the sentence's length, in training. ``auto``: where the pooling
    reads one token, and not for a mean over all."""
    denoise_dev: bool = False
    """Subtract it in scoring while training too, as released. The encoder that is kept does not."""
    denoise_lengths: int = 33
    """Sentence lengths 0, 1, … whose template vectors are computed in each step; more if a batch has longer
    sentences. (Released: 50, of which those beyond the longest sentence are not used.)"""
    mlp: Literal["train", "none"] = "train"
    """``train``: Linear + tanh after the subtraction, in training only."""
    hard_negative_weight: float = 0.0
    """Added to the logit of a sentence's own hard negative."""
    eval_text: Preparation = "stopped"
    """Text to encode after training: ``stopped`` ends it with a full stop, as released for the final test; ``raw`` as
    it is. Training text is always as it is."""
    dev_text: Preparation = "raw"
    """The same for scoring while training, which the release does without the full stop."""

    def __post_init__(self) -> None:
        second: Any = self.second_template
        if isinstance(second, dict):
            empty = second.get("text") is None and set(second) <= {"text", "join"}
            try:
                second = None if empty else from_dict(Template, second, "method.second_template")
            except UserError as error:  # of a template by itself
                if error.key and error.key.startswith("template"):
                    error.key = f"method.second_{error.key}"
                raise
            object.__setattr__(self, "second_template", second)

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        warnings, template = super().check(info, run), run.template
        if self.denoise_lengths < 1:
            raise UserError(
                "must be at least 1", key="method.denoise_lengths", value=self.denoise_lengths, fix="33"
            )
        if template is None:
            raise UserError(
                "PromptBERT needs a template around the sentence",
                key="template",
                value="none",
                fix="template=promptbert_bert pooling=mask (RoBERTa: template=promptbert_roberta)",
            )
        for key, each in (("template", template), ("method.second_template", self.second_template)):
            if each is not None and each.between is not None:
                raise UserError(
                    "a sentence stands in it twice",
                    key=f"{key}.text",
                    value=each.text,
                    fix="a template without {again}, or method=simcse",
                )
            if each is not None and each.join != "ids":
                raise UserError(
                    "the template's own positions are known only if it is tokenised apart",
                    key=f"{key}.join",
                    value=each.join,
                    fix=f"{key}.join=ids",
                )
        single = kind_name(run.data.name) == "sentences"
        if self.second_template is not None and single:
            run.pooling.check(info, self.second_template, self.name)
        if single and info.dropout == 0 and self.second_template in (None, template):
            raise UserError(
                "with one template the two views differ by dropout alone, and this backbone has none",
                key="method.second_template",
                fix="another template there, or backbone.dropout=0.1",
            )
        return warnings


class Rows(NamedTuple):
    """Rows of which each template has an equal share."""

    ids: Tensor
    """``[R, L]``."""
    mask: Tensor
    """``[R, L]``."""
    positions: Tensor | None
    """``[R, L]``; None: counted from the mask."""
    templates: Sequence[Tokenization]


class PromptBERT(Method):
    """h(x) - delta(|x|) in one template against the same in the other.

    delta(t) is the vector of the template without a sentence, its tokens after the slot at the positions that
    t sentence tokens would give them: of the same step and network, with gradient and dropout.
    """

    config_class = PromptBERTConfig
    config: PromptBERTConfig

    def __init__(
        self, encoder: SentenceEncoder, config: PromptBERTConfig, optimizer: OptimizerConfig
    ) -> None:
        super().__init__(encoder, config, optimizer)
        self.head = mlp_head(encoder.dim) if config.mlp == "train" else nn.Identity()
        self.templates = [encoder.tokenization]
        """The first is that of scoring and of every view but ``second``."""
        if config.second_template not in (None, encoder.tokenization.template):
            self.templates.append(Tokenization(encoder.tokenizer, config.second_template))
        auto = not encoder.pooling.config.averages_tokens
        self.denoise = auto if config.denoise == "auto" else config.denoise
        self.bare = BareTemplates(self.templates, position_offset(encoder.backbone.model.config))
        most = encoder.backbone.info.max_positions
        room = math.inf if most is None else most - max(t.overhead for t in self.templates) + 1
        self.most_lengths = room
        """Sentence lengths for which the model has positions; rows may be padded to more."""
        self.lengths = int(min(config.denoise_lengths, room))

    @classmethod
    def fields(cls, config: MethodConfig, roles: tuple[str, ...], template: Template | None) -> Fields:
        assert isinstance(config, PromptBERTConfig)
        if roles == ("sentence",):
            second = config.second_template or template
            return {"first": ("sentence", template), "second": ("sentence", second)}
        return {role: (role, template) for role in roles}

    def losses(self, batch: Batch) -> LossOutput:
        config = self.config
        views = [
            v for v in ("first", "anchor", "source", "second", "positive", "target", "negative") if v in batch
        ]
        which = [len(self.templates) - 1 if v == "second" else 0 for v in views]
        tokens = [batch[v][part] for v in views for part in ("input_ids", "attention_mask")]
        token_budget = joint_token_budget(batch[v] for v in views)
        masks, lengths = tokens[1::2], 0
        if self.denoise:
            longest = max(m.shape[1] - self.templates[w].overhead for w, m in zip(which, masks, strict=True))
            lengths = int(max(self.lengths, min(longest + 1, self.most_lengths)))
        if self.denoise and token_budget is not None:
            vectors, noise = self.pooled_beside(which, tokens, lengths, token_budget)
        else:
            vectors = self.by_chunks(lambda *rows: self.pooled(which, rows, token_budget), *tokens)
            noise = self.template_vectors(1 + max(which), lengths) if self.denoise else ()
        if self.denoise:
            vectors = tuple(
                v - noise[w][(m.sum(1) - self.templates[w].overhead).clamp(min=0, max=lengths - 1)]
                for v, w, m in zip(vectors, which, masks, strict=True)
            )
        hashes = [config.in_batch.text_hashes(batch[v]) for v in views]
        result = contrast([self.head(v) for v in vectors], hashes, config, config.hard_negative_weight)
        return LossOutput({"info_nce": result.loss}, result.stats)

    def pooled(
        self, which: Sequence[int], rows: Sequence[Tensor], token_budget: int | None = None
    ) -> tuple[Tensor, ...]:
        """Vectors ``[B, D]`` of several views by one forward pass.

        Args:
            which: of the templates each view has.
            rows: ids and mask ``[B, L]`` of each view in turn.
            token_budget: tokens to compute of all views together (`Backbone.forward`).
        """
        views = self._stacked(which, rows)
        return self._pool(self._hidden([views], token_budget), views)

    def pooled_beside(
        self, which: Sequence[int], rows: Sequence[Tensor], lengths: int, token_budget: int
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """`pooled` and `template_vectors` by one forward pass: few and short rows have no pass of their own."""
        views, bare = self._stacked(which, rows), self._bare(1 + max(which), lengths)
        budget = token_budget + lengths * sum(t.overhead for t in bare.templates)
        hidden, n = self._hidden([views, bare], budget), len(views.ids)
        return self._pool(tuple(h[:n] for h in hidden), views), self._pool(tuple(h[n:] for h in hidden), bare)

    def template_vectors(self, templates: int, lengths: int) -> tuple[Tensor, ...]:
        """delta of the first templates, ``[lengths, D]`` each: row t is for sentences of t tokens."""
        bare = self._bare(templates, lengths)
        return self._pool(self._hidden([bare]), bare)

    def _stacked(self, which: Sequence[int], rows: Sequence[Tensor]) -> Rows:
        ids, mask = (
            widened(list(rows[i::2]), value) for i, value in enumerate((self.templates[0].pad_id, 0))
        )
        return Rows(ids, mask, None, [self.templates[w] for w in which])

    def _bare(self, templates: int, lengths: int) -> Rows:
        ids, mask, positions = self.bare(templates, lengths)
        return Rows(ids, mask, positions, self.templates[:templates])

    def _hidden(self, parts: Sequence[Rows], token_budget: int | None = None) -> tuple[Tensor, ...]:
        """Hidden states of all rows of the parts, by one forward pass."""
        pooling, backbone = self.encoder.pooling, self.encoder.backbone
        ids = widened([p.ids for p in parts], self.templates[0].pad_id)
        mask = widened([p.mask for p in parts], 0)
        positions = position = None
        if any(p.positions is not None for p in parts):
            offset = backbone.position_offset
            told = [token_positions(p.mask, offset) if p.positions is None else p.positions for p in parts]
            positions = widened(told, offset)
        if (positions is None or token_budget is not None) and backbone.reads_one(
            ids.device, token_budget is not None, positions is not None
        ):
            read = [
                pooling.position(m, t.marks)
                for p in parts
                for m, t in zip(p.mask.chunk(len(p.templates)), p.templates, strict=True)
            ]
            position = None if None in read else torch.cat([r for r in read if r is not None])
        every = pooling.needs_all_layers
        return backbone(ids, mask, positions, all_layers=every, capacity=token_budget, position=position)

    def _pool(self, hidden: tuple[Tensor, ...], rows: Rows) -> tuple[Tensor, ...]:
        """Equal shares of the rows, each by its template's marks."""
        templates = rows.templates
        width = rows.mask.shape[1]
        states = zip(*(h[:, :width].chunk(len(templates)) for h in hidden), strict=True)
        masks = rows.mask.chunk(len(templates))
        return tuple(
            self.encoder.pooling(h, m, t.marks) for h, m, t in zip(states, masks, templates, strict=True)
        )

    # ---- scoring while training -----------------------------------------------------------------------------------

    def dev_rows(self, sentences: Sequence[str]) -> list[list[int]]:
        final = self.encoder.tokenization
        return Tokenization(final.tokenizer, final.template, final.max_length, self.config.dev_text).ids(
            sentences
        )

    def dev_vectors(self, vectors: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        if not (self.denoise and self.config.denoise_dev) or not rows:
            return vectors
        overhead = self.templates[0].overhead
        lengths = torch.tensor([max(0, len(row) - overhead) for row in rows], device=vectors.device)
        with self.encoder.evaluating(None):
            noise = self.template_vectors(1, int(lengths.max()) + 1)[0]
        return vectors - noise[lengths]


class BareTemplates(nn.Module):
    """Templates without a sentence, at the positions that sentences of any length give them.

    Their rows are made on the device, with shapes that do not depend on values.

    Args:
        templates: with the same tokenizer.
        offset: position id of a row's first token (RoBERTa: 2).
    """

    ids: Tensor
    length: Tensor
    slot: Tensor

    def __init__(self, templates: Sequence[Tokenization], offset: int) -> None:
        super().__init__()
        self.offset = offset
        width = max(t.overhead for t in templates)
        rows = [t.prefix_ids + t.suffix_ids for t in templates]
        filled = [row + [templates[0].pad_id] * (width - len(row)) for row in rows]
        self.register_buffer("ids", torch.tensor(filled), persistent=False)
        self.register_buffer("length", torch.tensor([[len(row)] for row in rows]), persistent=False)
        self.register_buffer("slot", torch.tensor([[len(t.prefix_ids)] for t in templates]), persistent=False)

    def forward(self, templates: int, lengths: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, mask and position ids of the first templates, ``[templates * lengths, W]``, padded right.

        Row ``lengths * i + t`` is template i with every token after the slot moved on by t.
        """
        position = torch.arange(self.ids.shape[1], device=self.ids.device)
        real = position < self.length[:templates]
        moved = real & (position >= self.slot[:templates])
        by = torch.arange(lengths, device=position.device)[:, None]
        positions = self.offset + torch.where(real, position, 0)[:, None] + by * moved[:, None]

        def repeated(x: Tensor) -> Tensor:
            return x[:, None].expand(-1, lengths, -1).flatten(0, 1)

        return repeated(self.ids[:templates]), repeated(real.long()), positions.flatten(0, 1)
