"""What runs are observed for: each function runs real code with a configuration and returns what came of it, as plain values.

An observation never looks at the configuration itself, nor at keys made of it: two that differ show that the code behaves
differently. All run in this process, as a world of one rank.
"""

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from rl_core.config import Config, parse_config
from rl_core.digests import digest_json
from rl_core.errors import PpoflowError

Observation = dict[str, Any]
OTHER_TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}<a>"
CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return len(set(solution_str)) / 8

def other(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str) / 8

def listed(completions, **columns):
    return [len(completion) / 8 for completion in completions]

def fails(solution_str):
    raise ValueError("no")
"""
OWN_ALGORITHMS = """
def advantages(signals, algorithm):
    score = signals.rewards.sum(dim=1, keepdim=True).expand_as(signals.rewards) * signals.mask
    return score, score

def doubled(signals, algorithm):
    score, _ = advantages(signals, algorithm)
    return 2 * score, score

def loss(update, algorithm):
    return -(update.logprobs * update.advantages), {}

def doubled_loss(update, algorithm):
    return -2 * (update.logprobs * update.advantages), {}
"""


@cache
def place() -> Path:
    """A directory with models, prompts and rewards, made once for this process."""
    from tests.tiny import tiny_model, tiny_prompts

    directory = Path(mkdtemp(prefix="every-key-"))
    tiny_model(directory / "model", initializer_range=0.2, num_hidden_layers=1)
    tiny_model(directory / "deep", initializer_range=0.2)
    tiny_model(directory / "judge", initializer_range=0.2, seed=2)
    own = tiny_model(directory / "own", initializer_range=0.2)
    settings = json.loads((own / "config.json").read_text())
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (own / "config.json").write_text(json.dumps(settings | {"model_type": "own", "auto_map": names}))
    (own / "own.py").write_text(CODE)
    tiny_prompts(directory / "prompts.jsonl", 30)
    rows = [json.loads(line) for line in (directory / "prompts.jsonl").read_text().splitlines()]
    more = [row | {"question": f"what is {row['prompt']}", "half": "5", "origin": "here"} for row in rows]
    (directory / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in more))
    long = {"prompt": "1+1+1+1+1=", "answer": "5"}
    (directory / "ragged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, long]))
    shutil.copy(directory / "more.jsonl", directory / "rows.txt")
    (directory / "other.jinja").write_text(OTHER_TEMPLATE)
    (directory / "reward.py").write_text(REWARD)
    (directory / "other_reward.py").write_text(REWARD.replace("/ 8", "/ 4"))
    (directory / "algorithms.py").write_text(OWN_ALGORITHMS)
    (directory / "others.py").write_text(OWN_ALGORITHMS.replace("signals.mask", "signals.mask / 2").replace("-(", "-3 * ("))
    return directory


def configured(overrides: dict[str, Any]) -> Config:
    """A configuration of a short run: two steps of four optimizer steps each, in which all of PPO has something to do.
    In values, HERE stands for `place()`, SERVICE for the address of a service that judges."""
    values = {
        "model": {"name_or_path": "HERE/model"},
        "data": {"source": {"kind": "files", "path": "HERE/prompts.jsonl"}, "eval_fraction": 0.2, "max_prompt_length": 32},
        "reward": {"kind": "function", "path": "HERE/reward.py", "timeout_s": None},
        "rollout": {"max_new_tokens": 6},
        "algorithm": {"kl_coef": 0.1, "ppo_epochs": 2},
        "trainer": {"max_steps": 2, "train_batch_size": 8, "ppo_mini_batch_size": 4, "per_device_train_batch_size": 4},
        "actor": {"learning_rate": 1e-2},
        "critic": {"learning_rate": 1e-2},
        "checkpoint": {"save_steps": 10},
        "evaluation": {"prompts": 4},
        "launch": {"device": "cpu"},
    }
    text = json.dumps([values, overrides]).replace("HERE", str(place()))
    if "SERVICE" in text:
        from tests.rl_core.config.lab_rewards import service

        text = text.replace("SERVICE", service())
    return parse_config(*json.loads(text))


@contextlib.contextmanager
def one_rank(config: Config) -> Iterator[Any]:
    """The world of one rank, left in any case."""
    import torch.distributed as dist

    from rl_core.distributed import joined

    try:
        with joined(config.launch) as world:
            yield world
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@cache
def dataset_of(source: str, data: str) -> Any:
    """The tokenized prompts of a configuration (JSON of its model and data sections)."""
    from rl_core.artifacts import commit, fresh_scratch
    from rl_core.config.data import DataConfig
    from rl_core.config.model import ModelConfig
    from rl_core.data.tokenize import tokenize
    from rl_core.models.source import load_tokenizer, resolve

    model = ModelConfig.model_validate_json(source)
    tokenizer = load_tokenizer(resolve(model), model.chat_template)
    target = place() / f"dataset-{digest_json([source, data])[:8]}"
    scratch = fresh_scratch(target)
    return commit(
        scratch, target, kind="dataset", key="d", results=tokenize(DataConfig.model_validate_json(data), tokenizer, scratch)
    )


def training(config: Config, saves: bool = False) -> Observation:
    """A whole training: metrics, trained weights, what the models were given, what was printed and (if it `saves`) kept."""
    from rl_core.artifacts import Artifact
    from rl_core.ppo import train
    from rl_core.train import build

    output = Path(mkdtemp(dir=place(), prefix="run-"))
    printed = io.StringIO()
    with one_rank(config) as world, contextlib.redirect_stdout(printed):
        dataset = dataset_of(config.model.model_dump_json(), config.data.model_dump_json())
        base = Artifact(Path(config.model.name_or_path), {"digest": "base"})
        run = build(config.settled(world.size), dataset, base, output, world, stopping=lambda: False)
        if not saves:
            run.save = lambda steps_done: None  # a third of the time
        seen: dict[str, list[Any]] = {"actor": [], "engine": []}
        run.actor.module.register_forward_pre_hook(lambda _, given: seen["actor"].append(list(given[0].shape)))
        run.engine.model.register_forward_pre_hook(
            lambda _, __, given: seen["engine"].append(len(given["input_ids"])), with_kwargs=True
        )
        train(run)
        weights = {learner.name: fingerprint(learner.module) for learner in run.learners}
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: value for name, value in row.items() if not name.startswith(("timing", "perf"))} for row in rows]
    return {
        "metrics": metrics,
        "weights": weights,
        "shapes": seen,
        "progress": "░" in printed.getvalue() or "█" in printed.getvalue(),
        "kept": sorted(path.name for path in (output / "checkpoints").glob("step_*")),
    }


def fingerprint(module: Any) -> dict[str, Any]:
    """Names, shapes, types and sums of a module's parameters."""
    from rl_core.models.local import local

    return {
        name: (list(parameter.shape), str(parameter.dtype), float(local(parameter).detach().double().abs().sum()))
        for name, parameter in module.named_parameters()
    }


def refused(observe: Any, config: Config) -> Observation:
    """What an observation gives, or the message with which the configuration is refused."""
    try:
        return observe(config)
    except PpoflowError as error:
        return {"refused": str(error)}


def prompts(config: Config) -> Observation:
    """The tokenized prompts of both sides, and the files that hold them."""
    from rl_core.data.prompts import Prompts

    dataset = dataset_of(config.model.model_dump_json(), config.data.model_dump_json())
    sides = {side: Prompts(dataset.path, side) for side in ("train", "eval")}
    return {side: [asdict(held[row]) for row in range(len(held))] for side, held in sides.items()} | {
        "files": sorted(str(path.relative_to(dataset.path)) for path in dataset.path.rglob("shard-*"))
    }
