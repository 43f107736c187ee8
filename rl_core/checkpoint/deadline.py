"""The wall-clock limit of a run: `checkpoint.must_save_by`, else what SLURM says of the job's end."""

import time
from collections import deque
from collections.abc import Mapping
from datetime import datetime

from rl_core.errors import ConfigError

SLURM_END = "SLURM_JOB_END_TIME"
"""Seconds since 1970; sbatch and srun of SLURM 22.05 and later set it."""
MARGIN_S = 30.0
"""To end processes, beside what steps and saves have been seen to take."""
SLOWER = 1.25
"""By so much the next step or save may be slower than the slowest of those seen."""


class Deadline:
    """Tells when there is no time for another step.

    The limit is read from the clock once: a clock that is set while the run goes on changes nothing.

    Raises:
        ConfigError: it is over already.
    """

    def __init__(self, by: datetime | None, environment: Mapping[str, str]) -> None:
        self._at: float | None = None
        self._steps: deque[float] = deque(maxlen=10)
        end = environment.get(SLURM_END)
        if by is None and end is None:
            return
        left = (by.timestamp() if by is not None else float(end or 0)) - time.time()
        if by is not None and left <= 0:
            raise ConfigError(f"checkpoint.must_save_by = {by.isoformat()} is over already. Give a later time, or null.")
        self._at = time.monotonic() + left

    def too_near(self, step_seconds: float, save_seconds: float) -> bool:
        """Whether the next step might not be saved in time.

        Args:
            step_seconds: what the step that ends now took.
            save_seconds: what a save takes.
        """
        self._steps.append(step_seconds)
        if self._at is None:
            return False
        return time.monotonic() + SLOWER * (max(self._steps) + save_seconds) + MARGIN_S > self._at
