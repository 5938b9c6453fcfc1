"""PCL (Wu et al., EMNLP 2022): two encoders that begin as one, each with several views of a sentence as positives.

    L = N_f + N_g + BCE_f + BCE_g + KL(gf | fg) + KL(gg | ff)                                           (1)
    list ab of sentence i: cos(a(x_i), b(v)) of its K other views v, and cos(a(x_i), b(x_j)) of all others, over tau

N is SimCSE's loss of x and its second dropout view; BCE takes a list's softmax for logits, 1 for positives; KL is the
mean over entries, its gradient to both lists. K is the second view and the augmentations. f is kept. (The number is
this file's.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from embedlab.config.backbone import BackboneInfo
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.run import RunConfig
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.engine.module import Batch, LossOutput, Method
from embedlab.errors import UserError
from embedlab.kernels.packing import row_capacity
from embedlab.methods.augmentation import Augmentation, augmented, check_growth, most_more
from embedlab.methods.averages import copied
from embedlab.methods.contrast import ContrastConfig, check_dropout, contrast
from embedlab.methods.heads import Head, new_head
from embedlab.methods.simcse import joint_token_budget, stacked
from embedlab.methods.towers import tower_pooler
from embedlab.objectives.peer_contrast import list_divergence, peer_logits, positives_bce
from embedlab.pooling.blocks import inner_tokens


@dataclass(frozen=True)
class PCLConfig(ContrastConfig):
    kinds: ClassVar[tuple[str, ...]] = ("wikipedia",)
    can_unpad: ClassVar[bool] = True
    shardable: ClassVar[bool] = False

    name: str = "pcl"
    augmentations: tuple[Augmentation, ...] = ("shuffle", "reverse", "delete", "repeat") * 2
    """Views of a sentence beside its two: each one of shuffle, reverse, delete, repeat, none."""
    share: float = 0.2
    """Share of a sentence's tokens that are deleted or repeated."""
    form: Literal["paper", "released"] = "paper"
    """``released``: the second encoder reads padding too, and its vector has Hugging Face's pooler before the head."""
    mlp: Head = "train"

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        if not 0 <= self.share < 1:
            raise UserError("a share lies between 0 and 1", key="method.share", value=self.share, fix="0.2")
        if run.template is not None and run.template.between is not None:
            raise UserError(
                "a sentence stands in it twice", key="template", value=run.template.text,
                fix="a template without {again}",
            )  # fmt: skip
        check_dropout(self.name, info)
        if not {"delete", "repeat"} & {*self.augmentations}:
            fix = "delete or repeat among method.augmentations"
            self.refuse_unread("share", "no augmentation deletes or repeats tokens", fix)
        if "repeat" in self.augmentations:
            check_growth(info, run, self.share, lambda n: most_more(n, "repeat", self.share))
        return super().check(info, run)


class PCL(Method):
    """(1); both encoders read the same views, and share the head."""

    config_class = PCLConfig
    config: PCLConfig

    def __init__(
        self,
        encoder: SentenceEncoder,
        config: PCLConfig,
        optimizer: OptimizerConfig,
        pooler: nn.Module | None = None,
    ) -> None:
        """As any method's; ``pooler`` of the second encoder."""
        super().__init__(encoder, config, optimizer)
        self.head = new_head(config.mlp, encoder.dim)
        self.peer = copied(encoder)
        self.peer.chunk = optimizer.chunk
        self.pooler = nn.Identity() if pooler is None else pooler

    @classmethod
    def from_run(cls, run: RunConfig, tokenizer: Any = None) -> PCL:
        config = run.method
        assert isinstance(config, PCLConfig)
        encoder = cls.make_encoder(run, tokenizer)
        assert isinstance(encoder, SentenceEncoder)
        released = config.form == "released"
        pooler = tower_pooler([run.backbone], encoder.dim, run.seed) if released else None
        return cls(encoder, config, run.optimizer, pooler)

    @property
    def forward_passes(self) -> float:
        return 2.0 * (2 + len(self.config.augmentations))

    def longest(self, lengths: dict[str, int]) -> int:
        longest = row_capacity(max(lengths.values()))  # which rows have where padding is left out
        return longest + max([most_more(longest, kind, self.config.share) for kind in self._kinds])

    @property
    def _kinds(self) -> tuple[Augmentation, ...]:
        """Of the views: a sentence twice, and its augmentations."""
        return ("none", "none", *self.config.augmentations)

    def losses(self, batch: Batch) -> LossOutput:
        config, view = self.config, batch["sentence"]
        views = [self.augmented(view, kind) for kind in self._kinds]
        ids, mask = stacked(views, self.encoder.tokenization.pad_id)
        budget = joint_token_budget(views)
        f = self.head(self.encoder(ids, mask, budget)).chunk(len(views))
        if config.form == "released":
            mask, budget = torch.ones_like(mask), None
        g = self.head(self.pooler(self.peer(ids, mask, budget))).chunk(len(views))
        hashes = config.in_batch.text_hashes(view)
        first, second = (contrast(z[:2], [hashes] * 2, config) for z in (f, g))
        ff, gg, fg, gf = (self._list(a, b, hashes) for a, b in ((f, f), (g, g), (f, g), (g, f)))
        positives = len(views) - 1
        losses = {
            "info_nce": first.loss,
            "info_nce_peer": second.loss,
            "positives": positives_bce(ff, positives),
            "positives_peer": positives_bce(gg, positives),
            "cross": list_divergence(gf, fg),
            "symmetric": list_divergence(gg, ff),
        }  # (1)
        return LossOutput(losses, first.stats)

    def _list(self, a: Sequence[Tensor], b: Sequence[Tensor], hashes: Tensor | None) -> Tensor:
        """List ab of (1), ``[B, K + M]``, of the views ``[B, D]`` by each encoder."""
        candidates, offset = self.config.in_batch.candidates, self.config.in_batch.offset(a[0])
        return peer_logits(
            a[0], torch.stack(list(b[1:])), candidates(b[0]), self.config.tau, offset=offset,
            anchor_hashes=hashes, other_hashes=candidates(hashes),
        )  # fmt: skip

    def augmented(self, view: dict[str, Any], kind: Augmentation) -> dict[str, Any]:
        """The view with its tokens changed, its token budget as large as it may become."""
        share, tokenization = self.config.share, self.encoder.tokenization
        ids, mask, frame = view["input_ids"], view["attention_mask"], tokenization.marks.frame
        inner = inner_tokens(mask, frame.before, frame.after)
        ids, mask = augmented(ids, mask, inner, kind, share, tokenization.pad_id)
        found = {**view, "input_ids": ids, "attention_mask": mask}
        if kind == "repeat" and (budget := view.get("token_budget")) is not None:
            most = len(ids) * most_more(view["input_ids"].shape[1], kind, share)
            found["token_budget"] = budget + min(most, len(ids) + int(share * budget))
        return found
