"""What one rank of an evaluation runs: one model answers the held-out prompts, with fixed draws, and is scored.

    torchrun --nproc_per_node=N -m rl_core.evaluate --config_path X.yaml --dataset DIR --reference BASE --model MODEL \\
        --output_dir OUT

MODEL is a converted base model or a policy in Hugging Face form. Writes OUT/result.json and OUT/samples.jsonl.
"""

# ruff: noqa: E402 – a rank must be bound to its parent before it spends seconds on imports, and old libraries make these fail
from rl_core.entry import require_libraries, run_program
from rl_core.process import die_with_parent

die_with_parent()
require_libraries()

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from rl_core import algorithms, phases, stall
from rl_core.batching import BatchPlan
from rl_core.config import Config, load_config
from rl_core.config.reward import model_of, with_model
from rl_core.config.roles import MappingConfig, RoleConfig
from rl_core.config.schema import Role as RoleName
from rl_core.data.prompts import Prompts
from rl_core.distributed import World, joined, seed_global_generators, set_timeouts
from rl_core.groups import Group, make_groups
from rl_core.models.build import build_policy
from rl_core.models.dtypes import usable_dtype
from rl_core.models.reward_model import build_reward_model
from rl_core.models.source import load_tokenizer_dir
from rl_core.rewards import build_reward
from rl_core.role import Role
from rl_core.rollout.batch import RolloutBatch
from rl_core.rollout.engine import RolloutEngine
from rl_core.rollout.stop_ids import stop_ids_of
from rl_core.rollout.sync import sync_weights
from rl_core.scoring import Scorer
from rl_core.validation import answers, held_out

R = TypeVar("R", bound=RoleConfig)
Z95 = 1.959964
"""97.5 % quantile of the standard normal distribution."""


def main(arguments: Sequence[str]) -> None:
    """Evaluate as the command line says."""
    parser = argparse.ArgumentParser(prog="rl_core.evaluate", description="One rank of an evaluation; start it with torchrun.")
    parser.add_argument("--config_path", type=Path, required=True, help="the configuration (YAML)")
    parser.add_argument("--dataset", type=Path, required=True, help="tokenized prompts; the split `eval` is used")
    parser.add_argument("--reference", type=Path, required=True, help="converted base model, to which the KL is measured")
    parser.add_argument("--model", type=Path, required=True, help="the model to evaluate")
    parser.add_argument("--output_dir", type=Path, required=True, help="an existing directory")
    options = parser.parse_args(arguments)
    config = load_config(options.config_path)
    with joined(config.launch) as world, stall.watch(world, config.launch):
        config = config.settled(world.size)
        records = evaluate(config, options.model, options.reference, Prompts(options.dataset, "eval"), world)
    if world.is_main:
        with (options.output_dir / "samples.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        result = json.dumps(summarize(records, config.evaluation.success_reward), indent=1)
        (options.output_dir / "result.json").write_text(result, encoding="utf-8")


def evaluate(config: Config, model: Path, reference: Path, prompts: Prompts, world: World) -> list[dict[str, Any]]:
    """One record per prompt, in the order of the prompts. Collective; the same on all ranks."""
    settings, plan = config.evaluation, BatchPlan.of(config)
    chosen = held_out(prompts, settings.prompts)
    seed_global_generators(settings.seed, world.rank)
    config = on_all_ranks(config)
    reward = build_reward(config.reward, config.data.answer_column)
    roles: list[RoleName] = ["actor"] if model_of(config.reward) is None else ["actor", "reward"]
    groups = make_groups(config, roles, world.device.type)
    set_timeouts(config.launch.dist_timeout_s)

    stall.enter("building the model")
    tokenizer = load_tokenizer_dir(model, config.model.trust_remote_code)
    policy = _frozen(model, config, groups["actor"], world)
    engine = RolloutEngine(model, usable_dtype(config, "actor", world.device), world.device, config.model)
    with policy.loaded():
        sync_weights(policy.module, engine)
    stall.enter("answering")
    stop_ids = stop_ids_of(model, tokenizer, config.model.trust_remote_code)
    batch = answers(engine, policy, chosen, config, stop_ids, world.device)
    stall.enter("judging the answers")
    judge = None
    if "reward" in groups:
        module = build_reward_model(config, groups["reward"], world.device, tokenizer)
        judge = Role("reward", module, groups["reward"], config, world.device)
    scores = Scorer(config, tokenizer, world, reward, judge)(chosen, batch, n=1).total
    stall.enter("measuring the KL")
    divergence = torch.zeros(len(batch))
    if model != reference:
        base = _frozen(reference, config, groups["actor"], world)
        divergence = kl_to_reference(policy, base, batch, plan)
    records = phases.records(tokenizer, chosen, batch, scores, n=1)
    for row, record in enumerate(records):
        record["prompt_id"] = chosen[record.pop("sample")].prompt_id
        record["response_tokens"] = int(batch.response_length[row])
        record["truncated"] = bool(batch.truncated[row])
        record["kl"] = float(divergence[row])
    return records


def on_all_ranks(config: Config) -> Config:
    """One model at a time is evaluated, sharded over all ranks alike, wherever and however training places its roles."""
    layout = {"strategy": "fsdp", "hsdp_group_size": None, "ulysses_sequence_parallel_size": 1}
    changes: dict[str, Any] = {"model_mapping": MappingConfig(), "fsdp": config.fsdp.model_copy(update=layout)}

    def alike(role: R) -> R:
        return role.model_copy(update={"fsdp": role.fsdp.model_copy(update=layout)})

    changes["actor"] = alike(config.actor)
    judge = model_of(config.reward)
    if judge is not None:
        changes["reward"] = with_model(config.reward, alike(judge))
    return config.model_copy(update=changes)


def _frozen(directory: Path, config: Config, group: Group, world: World) -> Role:
    module = build_policy(directory, config, "actor", group, world.device, trainable=False)
    return Role("actor", module, group, config, world.device)


def kl_to_reference(policy: Role, reference: Role, batch: RolloutBatch, plan: BatchPlan) -> torch.Tensor:
    """[B] mean over each response's tokens of the k3 estimate of KL(policy ‖ reference), at temperature 1."""
    logprobs, ref_logprobs = (phases.log_probabilities(role, batch, plan, 1.0) for role in (policy, reference))
    divergence = algorithms.kl(logprobs, ref_logprobs, batch.mask, "k3")
    return divergence.sum(dim=1) / batch.response_length.clamp(min=1)


def summarize(records: list[dict[str, Any]], success_reward: float) -> dict[str, Any]:
    """Means with 95 % confidence intervals: normal approximation for the reward, Wilson's for the share of right answers."""
    count = len(records)
    rewards = [record["reward"] for record in records]
    mean = sum(rewards) / count
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (count - 1)) if count > 1 else 0.0
    margin = Z95 * deviation / math.sqrt(count)
    accuracy = sum(reward >= success_reward for reward in rewards) / count
    lengths = [record["response_tokens"] for record in records]
    return {
        "prompts": count,
        "reward": {"mean": mean, "std": deviation, "ci95": [mean - margin, mean + margin]},
        "accuracy": {"mean": accuracy, "ci95": list(wilson_interval(accuracy, count))},
        "kl": {"mean": sum(record["kl"] for record in records) / count},
        "response_length": {"mean": sum(lengths) / count, "max": max(lengths)},
        "truncated": sum(record["truncated"] for record in records) / count,
        "rewards": rewards,
    }


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """95 % score interval of a binomial proportion (Wilson 1927, JASA 22:209)."""
    scale = 1 + Z95**2 / count
    centre = (share + Z95**2 / (2 * count)) / scale
    margin = Z95 / scale * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    return max(0.0, centre - margin), min(1.0, centre + margin)


if __name__ == "__main__":
    run_program(main)
