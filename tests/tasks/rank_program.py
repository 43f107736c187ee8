"""Stands where `rl_core.train` stands, so that the supervision can be tried without a model: real torchrun, real processes.

`python -m tests.tasks.rank_program MODE DIRECTORY`
"""

from rl_core.process import die_with_parent

die_with_parent()

import os  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402


def main(mode: str, directory: Path) -> int:
    """Behave as `mode` says; rank N leaves its pid in `pid-N`."""
    rank = int(os.environ["RANK"])
    stop = []
    signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "deaf" else lambda *_: stop.append(1))
    if mode == "grandchild":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        (directory / f"pid-{rank}-grandchild").write_text(str(child.pid))
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} threads {os.environ['OMP_NUM_THREADS']}")
    (directory / f"pid-{rank}.tmp").write_text(str(os.getpid()))
    (directory / f"pid-{rank}.tmp").rename(directory / f"pid-{rank}")
    if mode == "done":
        return 0
    if mode == "crash":
        raise RuntimeError("the reward is on fire")
    if mode == "user":
        print("ppoflow: error: reward.path = nowhere.py: there is no such file.")
        return 2
    if mode in ("user-and-straggler", "done-and-straggler"):
        if rank == 0:
            while True:  # until it is killed, as in a collective; it does not heed SIGTERM
                time.sleep(0.05)
        if mode == "done-and-straggler":
            return 0
        print("ppoflow: error: trainer.seed: nobody likes it.\n" + "afterwards\n" * 100)
        return 2
    if mode == "peer-dies" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while mode == "peer-dies" or not stop:
        time.sleep(0.05)
    (directory / f"saved-{rank}").touch()
    return 75


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
