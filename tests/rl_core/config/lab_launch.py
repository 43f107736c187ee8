"""Observations of evaluations and of the launch."""

import json
import os
import socket
import threading
from contextlib import closing, suppress
from pathlib import Path
from tempfile import mkdtemp
from unittest.mock import patch

import yaml

from rl_core.config import Config
from tests.rl_core.config.lab import Observation, dataset_of, one_rank, place


def evaluation(config: Config) -> Observation:
    """The files that an evaluation writes."""
    from rl_core import evaluate

    output = Path(mkdtemp(dir=place(), prefix="evaluation-"))
    (output / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    dataset = dataset_of(config.model.model_dump_json(), config.data.model_dump_json())
    paths = {"config_path": output / "config.yaml", "dataset": dataset.path, "output_dir": output}
    models = {"reference": place() / "model", "model": place() / "model"}
    evaluate.main([f"--{name}={path}" for name, path in (paths | models).items()])
    samples = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    return {"result": json.loads((output / "result.json").read_text()), "samples": samples}


def launch(config: Config) -> Observation:
    """How many ranks and threads are started, how long a process group waits, and whether a thread looks after stalls."""
    import torch
    from torch.distributed import distributed_c10d

    from rl_core import stall
    from tasks.devices import rank_count, threads_per_rank

    with one_rank(config) as world, stall.watch(world, config.launch):
        group = distributed_c10d._get_default_group()
        waits = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        watched = "stall" in {thread.name for thread in threading.enumerate()}
    return {"ranks": rank_count(config.launch), "threads": threads_per_rank(config.launch), "waits": waits, "watched": watched}


def lonely_launch(config: Config) -> Observation:
    """What the first of two ranks says when the other one does not come."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with patch.dict(os.environ, ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}), one_rank(config):
        return {}


def supervised(config: Config) -> Observation:
    """What the supervisor of a training's ranks is told, which is not started here."""
    from rl_core.errors import PpoflowError
    from tasks import train_policy
    from tasks.runs import Run
    from tests.tasks.settings import inputs

    told: Observation = {}
    with (
        patch.dict(os.environ, {"PPOFLOW_HOME": mkdtemp(dir=place(), prefix="home-")}),
        patch.object(train_policy, "run_ranks", lambda *_, grace_seconds, **__: told.update(grace=grace_seconds)),
        suppress(PpoflowError),  # it ended without a policy
    ):
        dataset, base = inputs()
        train_policy._launch(Run.of(config, dataset, base), [], config, dataset, base)
    return told
