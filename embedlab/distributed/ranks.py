"""Which of a run's processes this one is, before they have met: as torchrun or `srun` say it."""

from __future__ import annotations

import os


def under_slurm_tasks() -> bool:
    """Whether `srun` started this process as one of several tasks (an interactive shell in a job is none)."""
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


def local_rank() -> int:
    """Among the processes of this machine."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return int(os.environ.get("SLURM_LOCALID", 0)) if under_slurm_tasks() else 0
