"""After a scheduler's signal: the checkpoint is written, now ask for the job again."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess

from embedlab.distributed.devices import global_rank

log = logging.getLogger(__name__)


def requeue(number: int) -> bool:
    """Ask SLURM to run this job again, or hand the signal on to submitit, which does so itself.

    The job runs the same command again, so that command must resume by itself: ``ckpt_path=auto``.

    Args:
        number: of the signal that ended the run; Ctrl-C asks for nothing.

    Returns:
        Whether the job was asked for again.
    """
    if number == signal.SIGINT or global_rank() != 0:
        return False
    if "SUBMITIT_EXECUTOR" in os.environ:
        # Its handler, which the run had put aside, submits the job again and exits. It lets SIGTERM pass.
        own = signal.Signals[f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"]
        if callable(signal.getsignal(own)):
            os.kill(os.getpid(), own)
            return True
        return False
    job = os.environ.get("SLURM_JOB_ID")
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if job is None or not re.fullmatch(r"[0-9_]+", job):
        return False
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    except OSError as error:
        log.warning("Job %s is not queued again: scontrol cannot be run (%s).", job, error)
        return False
    if done.returncode != 0:
        log.warning("Job %s is not queued again: %s", job, done.stderr.strip() or f"exit {done.returncode}")
        return False
    log.info("Job %s is queued again.", job)
    return True
