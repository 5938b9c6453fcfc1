"""Stands in for `embedlab worker` in the launcher's tests: does what `config["do"]` says, without torch."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from embedlab.run.processes import end_with_starter
from embedlab.run.run_folder import owned


def main(argv: list[str]) -> int:
    end_with_starter()
    with owned(Path(argv[1]), "hydra.sweep.dir"):
        return trial(argv)


def trial(argv: list[str]) -> int:
    config, folder = Path(argv[0]).read_text(), Path(argv[1])
    (folder / "runs").open("a").write("x")
    (folder / "device").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "none"))
    (folder / "group").write_text(json.dumps(os.environ.get("WANDB_RUN_GROUP")))
    if "do: fail" in config:
        print("it broke")
        return 1
    if "do: wait" in config:

        def stop(*_: object) -> None:
            (folder / "last.ckpt").write_text("state")
            sys.exit(128 + signal.SIGTERM)

        signal.signal(signal.SIGTERM, stop)
        (folder / "ready").touch()
        time.sleep(60)
    if "ckpt_path: last" in config:
        (folder / "resumed").touch()
    (folder / "scores.json").write_text(json.dumps({}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
