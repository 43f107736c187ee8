"""Observations of what is saved, of restarts, and of what a training leaves set in torch."""

import os
import threading
from contextlib import suppress
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

from rl_core.config import Config
from tests.rl_core.config.lab import Observation, place, training


def saved(config: Config) -> Observation:
    """In which threads checkpoints are written, and whether torch takes deterministic algorithms only."""
    import torch

    from rl_core.checkpoint.steps import Checkpoints

    save, threads = Checkpoints.save, set[str]()

    def noted(self: Checkpoints, *what: Any) -> Any:
        threads.add(threading.current_thread().name)
        return save(self, *what)

    try:
        with patch.object(Checkpoints, "save", noted):
            training(config, saves=True)
        return {"threads": sorted(threads), "deterministic": torch.are_deterministic_algorithms_enabled()}
    finally:
        torch.use_deterministic_algorithms(False)


def restarted(config: Config) -> Observation:
    """How often the supervisor of a training's ranks is told to start them again; it is not started here."""
    from rl_core.errors import PpoflowError
    from tasks import train_policy
    from tasks.runs import Run
    from tests.tasks.settings import inputs

    told: Observation = {}
    with (
        patch.dict(os.environ, {"PPOFLOW_HOME": mkdtemp(dir=place(), prefix="home-")}),
        patch.object(train_policy, "run_ranks", lambda *_, max_restarts, **__: told.update(restarts=max_restarts)),
        suppress(PpoflowError),  # it ended without a policy
    ):
        dataset, base = inputs()
        train_policy._launch(Run.of(config, dataset, base), [], config, dataset, base)
    return told
