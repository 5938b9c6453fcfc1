"""Which devices of this machine a run uses, in what precision, and which of its processes this one is."""

from __future__ import annotations

import os

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


def under_slurm_tasks() -> bool:
    """Whether `srun` started this process as one of several tasks (an interactive shell in a job is none);
    it is asked before they have met, as `launched` and the ranks are."""
    interactive = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return not interactive and int(os.environ.get("SLURM_NTASKS", 1)) > 1 and "SLURM_PROCID" in os.environ


def launched() -> bool:
    """Whether a launcher has started this process as one rank of several, so that it must start none itself."""
    return "LOCAL_RANK" in os.environ or under_slurm_tasks()


def global_rank() -> int:
    """0 for a process that runs alone."""
    if "RANK" in os.environ:
        return int(os.environ["RANK"])
    return int(os.environ["SLURM_PROCID"]) if under_slurm_tasks() else 0


def world_size() -> int:
    """Processes that work together: 1 where this one runs alone."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return int(os.environ["SLURM_NTASKS"]) if under_slurm_tasks() else 1


def local_rank() -> int:
    """Among the processes of this machine."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return int(os.environ.get("SLURM_LOCALID", 0)) if under_slurm_tasks() else 0
