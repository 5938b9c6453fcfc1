"""ESimCSE (Wu et al. 2022): a sentence against itself with words repeated, and past sentences as more negatives.

    L = -mean_i log e(z1_i, z2_i) / (sum_j e(z1_i, z2_j) + sum_m e(z1_i, q_m)),  e(a, b) = exp(cos(a, b) / tau)   (1)

z1 is of x, z2 of repeat(x); q are vectors of the batches before, by a moving average of the encoder and the present
head. (The number is this file's.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from embedlab.config.backbone import BackboneInfo
from embedlab.config.build import within
from embedlab.config.optimizer import OptimizerConfig
from embedlab.config.run import RunConfig
from embedlab.distributed.devices import device_count
from embedlab.distributed.gather import batch_order, gather, gather_integers
from embedlab.encoders.encoder import SentenceEncoder
from embedlab.engine.module import Batch, LossOutput
from embedlab.errors import UserError
from embedlab.kernels.packing import row_capacity
from embedlab.methods.augmentation import Redraw, Rule, check_growth, most_repeats, repeat_tokens
from embedlab.methods.averages import Averaging, moving_average
from embedlab.methods.contrast import ContrastConfig, check_dropout
from embedlab.methods.heads import Head, new_head
from embedlab.methods.simcse import encode_views
from embedlab.objectives.more_negatives import queue_nce
from embedlab.objectives.softmax import Contrast
from embedlab.pooling.blocks import inner_tokens

_LONGEST_QUEUE = 10_000
"""Batches; more are a slip of the pen, which no device holds."""


@dataclass(frozen=True)
class ESimCSEConfig(ContrastConfig):
    kinds: ClassVar[tuple[str, ...]] = ("wikipedia",)
    can_unpad: ClassVar[bool] = True
    shardable: ClassVar[bool] = False

    name: str = "esimcse"
    rate: float = within(0.32, least=0, most=1)
    """r, the largest share of a sentence's tokens that are repeated; 0: none (0.32 for BERT, 0.30 for RoBERTa)."""
    repetition: Rule = "paper"
    """How many: even from 0 to max(2, r n); ``released``: from 0 to min(10, r n) - 1."""
    redraw: Redraw = "step"
    """``once``: which of a sentence's tokens is drawn once for a run, as released; ``step``: whenever it comes."""
    queue: float = within(2.5, least=0, most=_LONGEST_QUEUE)
    """Past sentences, in batches of all devices; 0: none."""
    momentum: float = within(0.995, above=0, below=1)
    """Of the moving average's weights, what an update keeps."""
    mlp: Head = "train"

    def rows(self, run: RunConfig) -> int:
        """Of the queue."""
        devices = device_count(run.trainer) * run.trainer.num_nodes
        return round(self.queue * run.data.batch_size * devices)

    def check(self, info: BackboneInfo, run: RunConfig) -> list[str]:
        if self.queue and not self.rows(run):
            raise UserError(
                "so small a share of a batch is no sentence", key="method.queue", value=self.queue,
                fix="method.queue=2.5, or 0 for no queue",
            )  # fmt: skip
        if self.mlp == "bn2" and self.queue and (run.data.batch_size == 1 or not run.data.drop_last):
            raise UserError(
                "the queue's vectors are normalised over a batch, and a row by itself cannot be", key="method.mlp",
                value=self.mlp, fix="data.batch_size=64 data.drop_last=true, or method.mlp=train",
            )  # fmt: skip
        if not self.rate:
            check_dropout(self.name, info)
        else:
            check_growth(info, run, self.rate, lambda n: most_repeats(n, self.rate, self.repetition))
        return super().check(info, run)


class ESimCSE(Averaging):
    """(1), with the queue in the checkpoint; it is empty when an epoch begins, as released."""

    config_class = ESimCSEConfig
    config: ESimCSEConfig
    queue: Tensor
    queue_hashes: Tensor
    filled: Tensor

    def __init__(
        self, encoder: SentenceEncoder, config: ESimCSEConfig, optimizer: OptimizerConfig, rows: int = 0,
        seed: int = 0,
    ) -> None:  # fmt: skip
        """As any method's; ``rows`` of the queue, and the run's ``seed``."""
        super().__init__(encoder, config, optimizer)
        self.seed = seed
        self.head = new_head(config.mlp, encoder.dim)
        self.target = moving_average(encoder) if rows else None
        self.register_buffer("queue", torch.zeros(rows, encoder.dim))
        self.register_buffer("queue_hashes", torch.zeros(rows, dtype=torch.int64))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))

    @classmethod
    def from_run(cls, run: RunConfig, tokenizer: Any = None) -> ESimCSE:
        config = run.method
        assert isinstance(config, ESimCSEConfig)
        encoder = cls.make_encoder(run, tokenizer)
        assert isinstance(encoder, SentenceEncoder)
        return cls(encoder, config, run.optimizer, config.rows(run), run.seed)

    @property
    def keep(self) -> float:
        return self.config.momentum

    @property
    def forward_passes(self) -> float:
        return 2.0

    def longest(self, lengths: dict[str, int]) -> int:
        longest = row_capacity(max(lengths.values()))  # which rows have where padding is left out
        return longest + self._more(longest)

    def _more(self, length: int) -> int:
        return most_repeats(length, self.config.rate, self.config.repetition) if self.config.rate else 0

    def on_train_epoch_start(self) -> None:
        self.filled.zero_()

    def losses(self, batch: Batch) -> LossOutput:
        config, view = self.config, batch["sentence"]
        z1, z2 = encode_views(self.encoder, [view, self.repeated(view, batch["rows"])], self.head)
        hashes, batches = config.in_batch.text_hashes(view), config.in_batch
        # Copies: the backward pass may read them, and comes after the next rows have been pushed.
        queue, texts, filled = self.queue.clone(), self.queue_hashes.clone(), self.filled.clone()
        candidate_texts, offset = batches.candidates(hashes), batches.offset(z1)

        def objective(anchors: Tensor, candidates: Tensor, past: Tensor) -> Contrast:
            return queue_nce(
                anchors, candidates, past, filled, config.tau, offset=offset,
                anchor_hashes=hashes, candidate_hashes=candidate_texts, queue_hashes=texts,
            )  # fmt: skip

        result = config.matryoshka(objective, z1, batches.candidates(z2), queue)
        stats = dict(result.stats)
        if self.target is not None:
            stats["queue"] = filled.float()
            if self.training:
                self._push(view)
        return LossOutput({"queue_nce": result.loss}, stats)

    def repeated(self, view: dict[str, Any], rows: Tensor) -> dict[str, Any]:
        """The view with tokens repeated, its token budget as large as it may become."""
        config, encoder = self.config, self.encoder
        if not config.rate:
            return view
        ids, mask = view["input_ids"], view["attention_mask"]
        frame = encoder.tokenization.marks.frame
        inner = inner_tokens(mask, frame.before, frame.after)
        numbers = rows if config.redraw == "once" else None
        new = repeat_tokens(
            ids,
            mask,
            inner,
            config.rate,
            config.repetition,
            encoder.tokenization.pad_id,
            numbers,
            self.seed,
        )
        found = {**view, "input_ids": new.ids, "attention_mask": new.mask}
        if (budget := view.get("token_budget")) is not None:
            most = len(ids) * self._more(ids.shape[1])
            found["token_budget"] = budget + min(most, 2 * len(ids) + int(config.rate * budget))
        return found

    @torch.no_grad()
    def _push(self, view: dict[str, Any]) -> None:
        """The batch of all devices into the queue, the newest first, by the moving average and without dropout.

        Of a batch that the queue's end cuts the first rows stay, where the release keeps the last: all are drawn alike.
        """
        assert self.target is not None
        vectors = self.head(self.target(view["input_ids"], view["attention_mask"], view.get("token_budget")))
        new, hashes = gather(vectors.to(self.queue.dtype)), gather_integers(view["hash"])
        # A queue may end within a batch.
        order, rows = batch_order(len(new), new.device), len(self.queue)
        new, hashes = new[order], hashes[order]
        self.queue.copy_(torch.cat([new, self.queue])[:rows])
        self.queue_hashes.copy_(torch.cat([hashes, self.queue_hashes])[:rows])
        self.filled.add_(len(new)).clamp_(max=rows)
