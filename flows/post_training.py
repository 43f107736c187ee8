"""Post-training as a Prefect flow: base model, prompts and a reward in, a registered policy out.

    ppoflow run configs/smollm2-arithmetic.yaml
    python flows/post_training.py configs/smollm2-arithmetic.yaml        # the same
    prefect deployment run 'post-training/smollm2-arithmetic'            # on a worker, see infra/prefect.yaml

Each stage takes committed artifacts and makes one; what exists under its key is reused, and an interrupted training goes on.
The tasks are called, not submitted: only so does a Ctrl-C, a cancel or a timeout reach the training while it runs.
"""

# ruff: noqa: E402 – Prefect reads its settings when it is imported
from tasks.environment import prepare

prepare()

import sys
from pathlib import Path
from typing import Any

from prefect import flow

from flows import logs
from flows.inputs import model_source, settle
from flows.report import Stages
from rl_core.config import Config
from rl_core.home import home, writable
from tasks import convert_checkpoint, evaluate_policy, register_policy, tokenize_dataset, train_policy
from tasks.devices import check_device
from tasks.mlflow_registry import champion

logs.set_up()


@flow(name="post-training")
def post_training(config: Config | Path | str, overrides: dict[str, Any] | None = None, fresh: bool = False) -> dict[str, Any]:
    """Tokenize prompts, convert the base model, train with PPO, evaluate, register.

    Args:
        config: a YAML file, or the whole configuration.
        overrides: dotted keys and their values, e.g. `{"trainer.max_steps": 4}`.
        fresh: make everything again, the training from step 0.

    Returns:
        `{"stages": […], "evaluation": {…}, "registered": {…}}`, see `flows.report`.
    """
    writable(home())
    config = settle(config, overrides)
    check_device(config.launch)
    source = model_source(config)
    stages = Stages(fresh)

    dataset = stages.run(tokenize_dataset, config, source)
    base = stages.run(convert_checkpoint, config, source)
    policy = stages.run(train_policy, config, dataset, base)
    best = champion(config.registry.name, policy.digest)
    evaluation = stages.run(evaluate_policy, config, dataset, base, policy, best)
    registered = stages.register(register_policy.register_policy, config, dataset, base, policy, evaluation)

    return stages.report(evaluation, registered)


if __name__ == "__main__":
    from flows.cli import main

    main(["run", *sys.argv[1:]])
