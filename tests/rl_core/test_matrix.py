"""One PPO step is the same however it is spread: strategies, wrapping, recomputation, sequences, placement, batches, ranks.

Each case runs the real loop on real ranks, from the same artifacts, and is compared with one rank under `single` in float32:
losses, gradient norms and the weights after two optimizer steps of each model. AdamW's ε is large, so that an update is nearly
proportional to the gradient; with a small one the first update is the gradient's sign, and rounding decides where it is 0.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_core.artifacts import commit, fresh_scratch, open_artifact
from rl_core.config import Config, parse_config
from tests.ranks import run_ranks
from tests.tiny import tiny_model, tiny_prompts

METRICS = (
    "actor/loss", "actor/pg_loss", "actor/entropy", "actor/ppo_kl", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm",
    "critic/score/mean", "critic/advantages/mean", "critic/returns/mean", "actor/reference_kl", "response_length/mean",
)  # fmt: skip
MAPPED = {"model_mapping.actor": [0, 1], "model_mapping.critic": [2, 3]}
CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "fsdp on one rank": {"fsdp.strategy": "fsdp"},
        "micro-batches of one": {"trainer.per_device_train_batch_size": 1},
        "a token budget": {"trainer.max_tokens_per_micro_batch": 24},
        "recomputation": {"fsdp.activation_checkpointing": True},
    },
    2: {
        "fsdp": {},
        "fsdp, micro-batches of one": {"trainer.per_device_train_batch_size": 1},
        "fsdp, a token budget": {"trainer.max_tokens_per_micro_batch": 24},
        "fsdp, kept gathered, recomputed": {"fsdp.reshard_after_forward": False, "fsdp.activation_checkpointing": True},
        "fsdp, prefetch": {"fsdp.forward_prefetch": 1},
        "fsdp, by size": {"fsdp.wrap_policy": {"auto_wrap": "SIZE_BASED_WRAP", "min_num_params": 2000}},
        "fsdp, by class and size": {
            "fsdp.wrap_policy": {"transformer_layer_cls_to_wrap": ["LlamaMLP"], "min_num_params": 2000}
        },
        "fsdp, one unit": {"fsdp.wrap_policy.auto_wrap": "NO_WRAP"},
        "ddp": {"fsdp.strategy": "ddp"},
        "offload is nothing on a CPU": {"fsdp.param_offload": True, "fsdp.optimizer_offload": True},
        "two ranks a sequence": {"fsdp.ulysses_sequence_parallel_size": 2},
        "actor alone, critic alone": {
            "model_mapping.actor": [0], "model_mapping.critic": [1], "fsdp.strategy": "single",
        },
    },
    4: {
        "fsdp": {},
        "hsdp, kept gathered": {"fsdp.strategy": "hsdp", "fsdp.hsdp_group_size": 2, "fsdp.reshard_after_forward": False},
        "ddp, micro-batches of one": {"fsdp.strategy": "ddp", "trainer.per_device_train_batch_size": 1},
        "two ranks a sequence": {"fsdp.ulysses_sequence_parallel_size": 2, "trainer.per_device_train_batch_size": 2},
        "four ranks a sequence, by size": {
            "fsdp.ulysses_sequence_parallel_size": 4, "fsdp.wrap_policy.min_num_params": 2000,
        },
        "two and two": MAPPED,
        "two and two, sequences, replicas": MAPPED
        | {"actor.fsdp.ulysses_sequence_parallel_size": 2, "critic.fsdp.strategy": "ddp", "fsdp.activation_checkpointing": True},
        "overlapping roles": {"model_mapping.actor": [0, 1, 2], "model_mapping.critic": [1, 2, 3], "model_mapping.ref": [3]},
    },
}  # fmt: skip
LOW: dict[str, dict[str, Any]] = {
    "one rank": {"fsdp.strategy": "single", "trainer.per_device_train_batch_size": 5},
    "fsdp": {},
    "ddp, bfloat16 sums": {"fsdp.strategy": "ddp", "fsdp.mixed_precision.reduce_dtype": "bf16"},
    "two ranks a sequence": {"fsdp.ulysses_sequence_parallel_size": 2},
    "float16": {"model.torch_dtype": "float16"},
    "the critic in float32": {"critic.torch_dtype": "float32", "ref_model.disable_half_cast": True},
}
"""In bfloat16 unless said otherwise; the first on one rank, the others on two."""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return len(set(solution_str)) / 8
"""


def config_for(directory: Path, overrides: dict[str, Any]) -> Config:
    values = {
        "model": {"name_or_path": str(directory / "model")},
        "data": {"source": {"kind": "files", "path": str(directory / "prompts.jsonl")}, "eval_fraction": 0.2},
        "reward": {"kind": "function", "path": str(directory / "reward.py")},
        "rollout": {"max_new_tokens": 8, "n": 2},
        "algorithm": {"kl_coef": 0.1, "entropy_coeff": 0.01},
        "trainer": {"max_steps": 1, "train_batch_size": 5, "ppo_mini_batch_size": 5, "per_device_train_batch_size": 3},
        "actor": {"learning_rate": 1e-2, "adam_epsilon": 1.0},
        "critic": {"learning_rate": 1e-2, "adam_epsilon": 1.0},
        "launch": {"device": "cpu"},
    }
    return parse_config(values, overrides)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a dataset and a base model."""
    from rl_core.checkpoint.convert import convert
    from rl_core.data.tokenize import tokenize
    from rl_core.models.source import load_tokenizer, resolve

    directory = tmp_path_factory.mktemp("matrix")
    patch = pytest.MonkeyPatch()
    patch.setenv("PPOFLOW_HOME", str(directory / "home"))
    tiny_model(directory / "model", initializer_range=0.2)
    tiny_prompts(directory / "prompts.jsonl", 40)
    (directory / "reward.py").write_text(REWARD)
    config = config_for(directory, {})
    source = resolve(config.model)
    tokenizer = load_tokenizer(source)
    for name, write in {
        "dataset": lambda scratch: tokenize(config.data, tokenizer, scratch),
        "base": lambda scratch: convert(source, tokenizer, scratch),
    }.items():
        scratch = fresh_scratch(directory / name)
        commit(scratch, directory / name, kind=name, key=name, results=write(scratch))
    yield directory
    patch.undo()


def one_step(rank: int, directory: Path, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of each case the metrics and the weights after the step (all of them, on the ranks that hold them)."""
    import json

    from rl_core.distributed import World
    from rl_core.models.tensors import model_tensors
    from rl_core.ppo import train
    from rl_core.train import build

    world = World(rank, torch.distributed.get_world_size(), torch.device("cpu"))
    dataset, base = (open_artifact(directory / name) for name in ("dataset", "base"))
    done = {}
    for name, overrides in cases.items():
        output = directory / f"run-{world.size}-{name.replace(' ', '-')}"
        output.mkdir(exist_ok=True)
        run = build(config_for(directory, overrides).settled(world.size), dataset, base, output, world, lambda: False)
        train(run)
        weights = {
            f"{learner.name}.{name}": tensor.full_tensor()
            for learner in (run.actor, run.critic)
            if learner.module is not None
            for name, tensor in model_tensors(learner.module).items()
        }
        rows = (output / "metrics.jsonl").read_text().splitlines() if rank == 0 else ["{}"]
        done[name] = (json.loads(rows[-1]), weights)
    return done


@pytest.fixture(scope="module")
def single(inputs: Path) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    [done] = run_ranks(one_step, 1, inputs, {"single": {"fsdp.strategy": "single", "trainer.per_device_train_batch_size": 5}})
    return done["single"]


@pytest.mark.parametrize("ranks", list(CASES))
def test_a_step_does_not_depend_on_how_it_is_spread(ranks: int, inputs: Path, single: Any) -> None:
    metrics, weights = single
    by_rank = run_ranks(one_step, ranks, inputs, CASES[ranks])
    original = original_weights(inputs)
    for name in CASES[ranks]:
        ours = by_rank[0][name][0]
        for metric in METRICS:
            assert ours[metric] == pytest.approx(metrics[metric], rel=2e-4, abs=2e-6), f"{name}: {metric}"
        seen: set[str] = set()
        for _, held in (rank[name] for rank in by_rank):
            seen |= held.keys()
            for key, tensor in held.items():
                assert (tensor - weights[key]).abs().max() <= 2e-6, f"{name}: {key}"
        assert seen == weights.keys(), name
    moved = [key for key, tensor in original.items() if (weights[f"actor.{key}"] - tensor).abs().max() > 1e-4]
    assert len(moved) == len(original), "all weights of the actor have moved by far more than the tolerance"


def test_a_step_in_low_precision_is_that_in_float32_within_its_rounding(inputs: Path, single: Any) -> None:
    """bfloat16 has 8 bits: a loss of many terms agrees to some percent. Rollouts are drawn in it too, so they may differ."""
    low = {name: {"model.torch_dtype": "bfloat16", **overrides} for name, overrides in LOW.items()}
    first = next(iter(low))
    done = run_ranks(one_step, 1, inputs, {first: low.pop(first)})[0] | run_ranks(one_step, 2, inputs, low)[0]
    for name, (metrics, weights) in done.items():
        for metric in ("actor/grad_norm", "critic/grad_norm", "critic/vf_loss", "actor/entropy"):
            assert metrics[metric] == pytest.approx(single[0][metric], rel=0.05), f"{name}: {metric}"
        assert all((tensor - single[1][key]).abs().max() < 1e-3 for key, tensor in weights.items()), name
        assert any(not torch.equal(tensor, single[1][key]) for key, tensor in weights.items()), name


def original_weights(inputs: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(inputs / "model" / "model.safetensors")
