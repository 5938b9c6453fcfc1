"""Stands in for `embedlab worker` in the tests of the search: logs `quality` as its score, without torch."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path


def main(argv: list[str]) -> int:
    config, folder = Path(argv[0]).read_text(), Path(argv[1])
    (folder / "runs").open("a").write("x")
    quality = next(line.split("'")[1] for line in config.splitlines() if line.startswith("quality"))
    if quality == "0":
        print("it broke")
        return 1

    def stop(*_: object) -> None:
        (folder / "stopped").touch()
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    with (folder / "metrics.csv").open("w") as file:
        file.write("step,dev/spearman\n")
        for step in range(1, 4):
            file.write(f"{step},{quality}\n")
            file.flush()
            time.sleep(20 if "slow: '1'" in config and step == 3 else 0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
