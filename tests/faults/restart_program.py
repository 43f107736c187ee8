"""Stands where `rl_core.train` stands, to be started again: `python -m tests.faults.restart_program MODE DIRECTORY`."""

from rl_core.process import die_with_parent

die_with_parent()

import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402


def main(mode: str, directory: Path) -> int:
    """Behave as `mode` says; each start leaves a line in `starts-RANK`."""
    rank = os.environ["RANK"]
    with (directory / f"starts-{rank}").open("a") as file:
        file.write(f"{os.getpid()}\n")
    start = len((directory / f"starts-{rank}").read_text().splitlines())
    if mode == "killed twice":
        if rank == "1" and start <= 2:
            os.kill(os.getpid(), signal.SIGKILL)
        (directory / f"going-{rank}").touch()
        while not (directory / "going-1").exists():
            time.sleep(0.02)  # as in a collective, until it is ended
    if mode == "killed for ever":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode in ("same error", "other errors"):
        number = start if mode == "other errors" else 0
        print(f"ppoflow: rank {rank} on here in gen of step 1 ended by ValueError {number}.")
        return 1
    if mode == "user":
        print("ppoflow: error: trainer.seed: nobody likes it.")
        return 2
    if mode == "serve":
        stop: list[int] = []
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        (directory / f"ready-{rank}").touch()
        while not stop:
            time.sleep(0.02)
        (directory / f"saved-{rank}").touch()
        return 75
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
