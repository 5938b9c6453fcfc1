"""Which devices of this machine a run uses, and in what precision."""

from __future__ import annotations

from embedlab.config.trainer import TrainerConfig
from embedlab.errors import UserError


def on_cuda(trainer: TrainerConfig) -> bool:
    """Whether a run uses CUDA.

    Raises:
        UserError: it asks for a device that is not there.
    """
    import torch

    available = torch.cuda.is_available()
    if trainer.accelerator in ("cuda", "gpu") and not available:
        raise UserError(
            "this machine has no CUDA device",
            key="trainer.accelerator",
            value=trainer.accelerator,
            fix="trainer=cpu",
        )
    return available and trainer.accelerator in ("auto", "cuda", "gpu")


def device_count(trainer: TrainerConfig) -> int:
    """Processes that a run wants on this node."""
    if isinstance(trainer.devices, tuple):
        return len(trainer.devices)
    if trainer.devices in ("auto", -1, "-1"):
        import torch

        return torch.cuda.device_count() if on_cuda(trainer) else 1
    return int(trainer.devices)


def precision_of(trainer: TrainerConfig) -> str:
    """The precision by Lightning's name; ``auto``: bf16-mixed on a CUDA device that has it, else 32-true.

    Raises:
        UserError: loss scaling without a CUDA device.
    """
    if trainer.precision == "16-mixed" and not on_cuda(trainer):
        raise UserError(
            "half precision with loss scaling needs a CUDA device",
            key="trainer.precision",
            value=trainer.precision,
            fix="trainer.precision=bf16-mixed or 32-true",
        )
    if trainer.precision != "auto":
        return trainer.precision
    import torch

    return "bf16-mixed" if on_cuda(trainer) and torch.cuda.is_bf16_supported() else "32-true"
