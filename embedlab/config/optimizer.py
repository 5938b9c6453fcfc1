"""How weights are updated: AdamW and its schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from embedlab.config.build import Record, within
from embedlab.errors import UserError

Schedule = Literal["linear", "constant", "cosine"]


@dataclass(frozen=True)
class OptimizerConfig(Record):
    """AdamW with clipping; the defaults are those of Hugging Face's trainer, which SimCSE's recipe relies on."""

    section = "optimizer"

    lr: float = within(3e-5, above=0)
    """Learning rate, the highest of the schedule."""
    weight_decay: float = within(0.0, least=0)
    """AdamW's, of the weights that decay_norms_and_biases says."""
    decay_norms_and_biases: bool | None = None
    """Whether weight decay also acts on norms and biases; None: as the method's release has it
    (`MethodConfig.decays_norms_and_biases`)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's shares of the moving averages of the gradient and its square that an update keeps."""
    eps: float = within(1e-8, above=0)
    """AdamW's constant in the denominator."""
    schedule: Schedule = "linear"
    """Of the learning rate after the warm-up: ``linear`` and ``cosine`` fall to 0 at the last step."""
    warmup_steps: int = within(0, least=0)
    """Updates in which the learning rate rises from 0."""
    clip: float | None = within(1.0, above=0)
    """Largest norm of the whole gradient; None does not clip."""
    accumulate: int = within(1, least=1)
    """Batches added up before an update. This adds no in-batch negatives."""
    reduce_dtype: Literal["bf16", "fp32"] = "bf16"
    """In which captured steps in bf16-mixed on several devices add up the gradients of matrices that are multiplied in
    bf16; all other gradients, and accumulated ones, are added in fp32."""
    chunk: int | None = within(None, least=1)
    """Rows that are encoded at once: a contrastive batch of any size in the memory of one chunk, with the
    gradients of the whole (GradCache), for one more forward pass. None: all at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(
                "must be two numbers from 0 up to 1",
                key="optimizer.betas",
                value=list(self.betas),
                fix="[0.9,0.999]",
            )
        object.__setattr__(self, "betas", (float(self.betas[0]), float(self.betas[1])))
