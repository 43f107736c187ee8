"""One PPO step is the same however it is spread: strategies, wrapping, recomputation, sequences, placement, batches, ranks.

Each case runs the real loop on real ranks, from the same artifacts, and is compared with one rank under `single`: losses,
gradient norms and the weights after two optimizer steps of each model. AdamW's ε is large, so that an update is nearly
proportional to the gradient; with a small one the first update is the gradient's sign, and rounding decides where it is 0.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_core.artifacts import commit, fresh_scratch, open_artifact
from tests.ranks import run_ranks
from tests.rl_core.models.cases import family
from tests.rl_core.tiny_runs import REWARD, config_for
from tests.tiny import tiny_model, tiny_prompts, tiny_tokenizer

METRICS = (
    "actor/loss", "actor/pg_loss", "actor/entropy", "actor/ppo_kl", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm",
    "critic/score/mean", "critic/advantages/mean", "critic/returns/mean", "actor/reference_kl", "response_length/mean",
)  # fmt: skip
FAMILIES = ("deepseek-v2", "gpt2")
ADAPTERS = {"rank": 4, "alpha": 8.0}
KINDS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "lora": {
        "actor.lora": ADAPTERS,
        "actor.learning_rate": 1.0,
        "critic.lora": ADAPTERS,
        "critic.learning_rate": 0.1,
    },
    "adamw8bit": {"actor.optimizer": "adamw8bit", "critic.optimizer": "adamw8bit"},
    "kl in the reward": {"trainer.max_steps": 2, "algorithm.kl_coef": 5.0},
    "kl in the loss": {"trainer.max_steps": 2, "algorithm.kl_coef": 5.0, "algorithm.kl_in": "loss"},
    "reward model": {},
    "grpo": {"algorithm.adv_estimator": "grpo", "algorithm.loss_agg_mode": "seq-mean-token-mean"},
    "remax, gspo": {"algorithm.adv_estimator": "remax", "algorithm.policy_loss": "gspo", "trainer.max_steps": 2},
    "clip_cov": {
        "algorithm.policy_loss": "clip_cov",
        "algorithm.clip_cov_ratio": 0.3,
        "algorithm.clip_cov_lb": -10.0,
        "algorithm.rollout_is": "sequence",
        "algorithm.critic_warmup": 1,
        "trainer.max_steps": 2,
    },
    **{family: {} for family in FAMILIES},
    "low": {"model.torch_dtype": "bfloat16"},
}
"""Trainings that come to different results: of a Llama, unless named after another family. A case is compared with its kind on
one rank, those of `low` with `ppo`. (In the first step the policy is the reference.)"""
ONE_RANK = {"fsdp.strategy": "single", "trainer.per_device_train_batch_size": 5}
MAPPED = {"model_mapping.actor": [0, 1], "model_mapping.critic": [2, 3]}
CASES: dict[int, dict[str, dict[str, dict[str, Any]]]] = {
    1: {
        "ppo": {
            "one rank": ONE_RANK,
            "fsdp on one rank": {"fsdp.strategy": "fsdp"},
            "micro-batches of one": {"trainer.per_device_train_batch_size": 1},
            "a token budget": {"trainer.max_tokens_per_micro_batch": 24},
            "recomputation": {"fsdp.activation_checkpointing": True},
        },
        **{kind: {"one rank": ONE_RANK} for kind in list(KINDS)[1:]},
    },
    2: {
        "ppo": {
            "fsdp": {},
            "micro-batches of one": {"trainer.per_device_train_batch_size": 1},
            "a token budget": {"trainer.max_tokens_per_micro_batch": 24},
            "kept gathered, recomputed": {"fsdp.reshard_after_forward": False, "fsdp.activation_checkpointing": True},
            "prefetch": {"fsdp.forward_prefetch": 1},
            "by size": {"fsdp.wrap_policy": {"auto_wrap": "SIZE_BASED_WRAP", "min_num_params": 2000}},
            "by class and size": {
                "fsdp.wrap_policy": {"transformer_layer_cls_to_wrap": ["LlamaMLP"], "min_num_params": 2000}
            },
            "one unit": {"fsdp.wrap_policy.auto_wrap": "NO_WRAP"},
            "ddp": {"fsdp.strategy": "ddp"},
            "offload is nothing on a CPU": {"fsdp.param_offload": True, "fsdp.optimizer_offload": True},
            "two ranks a sequence": {"fsdp.ulysses_sequence_parallel_size": 2},
            "actor alone, critic alone": {
                "model_mapping.actor": [0], "model_mapping.critic": [1], "fsdp.strategy": "single",
            },
        },
        "lora": {"fsdp": {}},
        "adamw8bit": {"fsdp": {}},
        "kl in the reward": {
            "reference alone": {"model_mapping.actor": [0], "model_mapping.ref": [1], "actor.fsdp.strategy": "single"},
        },
        "kl in the loss": {"two ranks a sequence": {"fsdp.ulysses_sequence_parallel_size": 2}},
        "reward model": {
            "alone": {
                "model_mapping.actor": [0], "model_mapping.critic": [0], "model_mapping.reward": [1],
                "fsdp.strategy": "single",
            },
        },
        "grpo": {"two ranks a sequence": {"fsdp.ulysses_sequence_parallel_size": 2}},
        "remax, gspo": {"fsdp": {}},
        "clip_cov": {
            "roles apart": {"model_mapping.actor": [0], "model_mapping.critic": [1], "fsdp.strategy": "single"},
        },
        "deepseek-v2": {"fsdp": {}},
        "gpt2": {"fsdp": {}},
        "low": {
            "fsdp": {},
            "ddp, bfloat16 sums": {"fsdp.strategy": "ddp", "fsdp.mixed_precision.reduce_dtype": "bf16"},
            "two ranks a sequence": {"fsdp.ulysses_sequence_parallel_size": 2},
            "float16, the actor alone": {  # on two ranks its first gradients are too large for the first loss scale
                "model.torch_dtype": "float16", "model_mapping.actor": [0], "actor.fsdp.strategy": "single",
            },
            "the critic in float32": {"critic.torch_dtype": "float32", "ref_model.disable_half_cast": True},
        },
    },
    4: {
        "ppo": {
            "fsdp": {},
            "hsdp, kept gathered": {
                "fsdp.strategy": "hsdp", "fsdp.hsdp_group_size": 2, "fsdp.reshard_after_forward": False,
            },
            "ddp, micro-batches of one": {"fsdp.strategy": "ddp", "trainer.per_device_train_batch_size": 1},
            "two ranks a sequence": {
                "fsdp.ulysses_sequence_parallel_size": 2, "trainer.per_device_train_batch_size": 2,
            },
            "hsdp, two ranks a sequence": {
                "fsdp.strategy": "hsdp", "fsdp.hsdp_group_size": 2, "fsdp.ulysses_sequence_parallel_size": 2,
            },
            "four ranks a sequence, by size": {
                "fsdp.ulysses_sequence_parallel_size": 4, "fsdp.wrap_policy.min_num_params": 2000,
            },
            "two and two": MAPPED,
            "two and two, sequences, replicas": MAPPED | {
                "actor.fsdp.ulysses_sequence_parallel_size": 2, "critic.fsdp.strategy": "ddp",
                "fsdp.activation_checkpointing": True,
            },
            "overlapping roles": {
                "model_mapping.actor": [0, 1, 2], "model_mapping.critic": [1, 2, 3], "model_mapping.ref": [3],
            },
        },
        "lora": {"hsdp": {"fsdp.strategy": "hsdp", "fsdp.hsdp_group_size": 2, "fsdp.activation_checkpointing": True}},
        "reward model": {"three and one": {"model_mapping.actor": [0, 1, 2], "model_mapping.reward": [3]}},
    },
}  # fmt: skip
"""By number of ranks and kind."""
Result = tuple[dict[str, float], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a dataset, a base artifact of each family, and a reward model."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from rl_core.checkpoint.convert import convert
    from rl_core.data.tokenize import tokenize
    from rl_core.models.source import load_tokenizer, resolve

    directory = tmp_path_factory.mktemp("matrix")
    patch = pytest.MonkeyPatch()
    patch.setenv("PPOFLOW_HOME", str(directory / "home"))
    tiny_prompts(directory / "prompts.jsonl", 40)
    (directory / "reward.py").write_text(REWARD)
    # 128 × 32 weights are the fewest of which an 8-bit optimizer codes the moments.
    tiny_model(directory / "model", initializer_range=0.2, intermediate_size=128)
    torch.manual_seed(1)
    judge = LlamaConfig.from_pretrained(directory / "model", num_labels=1)
    LlamaForSequenceClassification(judge).save_pretrained(tiny_tokenizer(directory / "judge"))
    models = {"base": directory / "model"} | {
        name: tiny_tokenizer(family(directory / f"{name}-model", name)) for name in FAMILIES
    }

    def made(name: str, kind: str, write: Callable[[Path], dict[str, Any]]) -> None:
        scratch = fresh_scratch(directory / name)
        commit(scratch, directory / name, kind=kind, key=name, results=write(scratch))

    for name, model in models.items():
        config = config_for(directory, {"model.name_or_path": str(model)})
        source = resolve(config.model)
        tokenizer = load_tokenizer(source)
        made(name, "base", functools.partial(convert, source, tokenizer))
    made("dataset", "dataset", functools.partial(tokenize, config.data, tokenizer))
    yield directory
    patch.undo()


def one_step(rank: int, directory: Path, kinds: dict[str, dict[str, dict[str, Any]]]) -> dict[tuple[str, str], Result]:
    """Of each case the metrics and the weights after the step (all of them, on the ranks that hold them)."""
    import json

    from rl_core.distributed import World
    from rl_core.models.tensors import model_tensors, trained_tensors
    from rl_core.ppo import train
    from rl_core.train import build

    world = World(rank, torch.distributed.get_world_size(), torch.device("cpu"))
    dataset = open_artifact(directory / "dataset")
    judge = {"reward": {"kind": "model", "name_or_path": str(directory / "judge")}}
    done: dict[tuple[str, str], Result] = {}
    for kind, name, overrides in ((kind, name, case) for kind, cases in kinds.items() for name, case in cases.items()):
        output = directory / f"run-{world.size}-{kind}-{name}".replace(" ", "-")
        output.mkdir(exist_ok=True)
        settings = KINDS[kind] | overrides | (judge if kind == "reward model" else {})
        base = open_artifact(directory / (kind if kind in FAMILIES else "base"))
        config = config_for(directory, settings).settled(world.size)
        run = build(config, dataset, base, output, world, lambda: False)
        train(run)
        weights: dict[str, Any] = {
            f"{learner.name}.{key}": tensor
            for learner in run.learners
            if learner.module is not None
            for key, tensor in (model_tensors(learner.module) | trained_tensors(learner.module)).items()
        }
        rows = (output / "metrics.jsonl").read_text().splitlines() if rank == 0 else ["{}"]
        done[kind, name] = (json.loads(rows[-1]), {key: tensor.full_tensor() for key, tensor in weights.items()})
    return done


@pytest.fixture(scope="module")
def ran(inputs: Path) -> Callable[[int], list[dict[tuple[str, str], Result]]]:
    """What each of so many ranks came to; they start once for all cases."""
    return functools.cache(lambda ranks: run_ranks(one_step, ranks, inputs, CASES[ranks]))


@pytest.mark.parametrize("ranks", list(CASES))
def test_a_step_does_not_depend_on_how_it_is_spread(ranks: int, ran: Any) -> None:
    alone, by_rank = ran(1)[0], ran(ranks)
    for kind, name in (key for key in by_rank[0] if key[0] != "low"):
        metrics, weights = alone[kind, "one rank"]
        ours, where = by_rank[0][kind, name][0], f"{kind}: {name}"
        assert metrics.keys() & set(METRICS) == ours.keys() & set(METRICS), where
        for metric in metrics.keys() & set(METRICS):
            assert ours[metric] == pytest.approx(metrics[metric], rel=2e-4, abs=2e-6), f"{where}: {metric}"
        seen: set[str] = set()
        for _, held in (rank[kind, name] for rank in by_rank):
            seen |= held.keys()
            for key, tensor in held.items():
                assert (tensor - weights[key]).abs().max() <= 2e-6, f"{where}: {key}"
        assert seen == weights.keys(), where


def test_each_kind_of_training_does_what_it_is_called_for(inputs: Path, ran: Any) -> None:
    from transformers import AutoModelForCausalLM

    done = {kind: result for (kind, name), result in ran(1)[0].items() if name == "one rank"}

    def moved(kind: str, model: str = "model") -> list[float]:
        """How far each weight of the actor has gone, adapters left out."""
        original = AutoModelForCausalLM.from_pretrained(inputs / model, dtype=torch.float32).named_parameters()
        return [float((done[kind][1][f"actor.{key}"] - tensor.detach()).abs().max()) for key, tensor in original]

    def apart(kind: str, other: str) -> float:
        ours, theirs = done[kind][1], done[other][1]
        return max(float((tensor - theirs[key]).abs().max()) for key, tensor in ours.items())

    far = 5e-5  # much more than the tolerance
    assert min(moved("ppo") + moved("deepseek-v2", "deepseek-v2-model") + moved("gpt2", "gpt2-model")) > far
    assert max(moved("lora")) == 0
    assert {kind for kind, result in done.items() if any("lora" in key for key in result[1])} == {"lora"}
    assert min(float(tensor.abs().max()) for key, tensor in done["lora"][1].items() if "lora_B" in key) > far
    assert 2e-7 < apart("adamw8bit", "ppo") < 2e-6, "what 8 bits make of the first step's moments"
    assert {kind for kind, result in done.items() if "actor/kl_loss" in result[0]} == {"kl in the loss"}
    for kind, metric in (("kl in the loss", "actor/kl_loss"), ("kl in the reward", "actor/reference_kl")):
        assert done[kind][0][metric] > far
    assert apart("kl in the loss", "kl in the reward") > far
    assert done["reward model"][0]["critic/score/min"] < 0, "as the function's scores never are"


def test_a_step_in_low_precision_is_that_in_float32_within_its_rounding(ran: Any) -> None:
    """bfloat16 has 8 bits: a loss of many terms agrees to some percent. Rollouts are drawn in it too, so they may differ."""
    exact, exact_weights = ran(1)[0]["ppo", "one rank"]
    low = [(name, result) for ranks in (1, 2) for (kind, name), result in ran(ranks)[0].items() if kind == "low"]
    assert len(low) == 6
    for name, (metrics, weights) in low:
        assert metrics["actor/skipped"] == metrics["critic/skipped"] == 0, name
        for metric in ("actor/grad_norm", "critic/grad_norm", "critic/vf_loss", "actor/entropy"):
            assert metrics[metric] == pytest.approx(exact[metric], rel=0.05), f"{name}: {metric}"
        assert all((tensor - exact_weights[key]).abs().max() < 1e-3 for key, tensor in weights.items()), name
        assert any(not torch.equal(tensor, exact_weights[key]) for key, tensor in weights.items()), name
