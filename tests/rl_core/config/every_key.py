"""How each key of the schema shows: which observation (lab*.py) differs when only that key is changed, and where."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rl_core.config.keys import leaves
from tests.rl_core.config.lab import Observation, prompts, training
from tests.rl_core.config.lab_launch import evaluation, launch, lonely_launch, supervised
from tests.rl_core.config.lab_models import base_model, layout, learning, structure
from tests.rl_core.config.lab_rewards import judged
from tests.rl_core.config.lab_saving import restarted, saved

JUDGE = {"reward": {"kind": "model", "name_or_path": "HERE/judge"}}
GYM = {"data.source": {"kind": "reasoning_gym", "dataset": "chain_sum", "size": 40}, "data.max_prompt_length": 512}
VERIFIED = GYM | {"reward": {"kind": "reasoning_gym", "timeout_s": None}}
REGEX = {"reward": {"kind": "regex", "pattern": "is (\\d)", "group": 1, "timeout_s": None}}
SPACED = {"reward": {"kind": "regex", "pattern": " \\d+", "timeout_s": None}}
NEVER_ENDS = {"reward": {"kind": "regex", "pattern": "(.|.|.)*=", "timeout_s": 0.5}}
MATHS = {"reward": {"kind": "math", "timeout_s": None}}
NO_ANSWER = MATHS | {"data.answer_column": None}
FAILS = {"reward.name": "fails"}
COUNTED = {"reward.on_error": "value"}
FUNCTION = {"kind": "function", "path": "HERE/reward.py", "timeout_s": None}
WEIGHTED = {"kind": "weighted", "parts": [{"weight": 2.0, "reward": FUNCTION}]}


SERVICE, SLOW, DOWN = (
    {"reward": {"kind": "http", "url": f"SERVICE/{answer}", "retries": 0}} for answer in ("judge", "slow", "down")
)
MORE = {"data.source.path": "HERE/more.jsonl"}
HALF = {"model.torch_dtype": "bfloat16"}
ACCUMULATED = {"trainer.train_batch_size": None, "trainer.gradient_accumulation_steps": 2}
LINEAR = {"lr_scheduler_type": "linear"}
BEST_FIRST = {"actor.lr_scheduler_type": "linear", "checkpoint.save_steps": 1, "trainer.max_steps": 4}
"""The learning rate is highest at the first step."""
SECTIONS = {"actor": "actor", "critic": "critic", "ref": "ref_model", "reward": "reward[model]"}


@dataclass(frozen=True)
class Shown:
    """`observe` differs `at` a place when the key has the value `changed`, in the mode that the other keys make."""

    observe: Callable[..., Observation]
    changed: Any
    mode: dict[str, Any] = field(default_factory=dict)
    at: str = ""


ACTOR = "weights.actor"
GROUPS = {"rollout.n": 2}
OWN_ADVANTAGES = {"algorithm.adv_estimator": {"path": "HERE/algorithms.py", "name": "advantages"}}
OWN_LOSS = {"algorithm.policy_loss": {"path": "HERE/algorithms.py", "name": "loss"}}
CLIP_COV = {"algorithm.policy_loss": "clip_cov", "algorithm.clip_cov_ratio": 0.5, "algorithm.clip_cov_lb": -10.0}
KL_COV = {"algorithm.policy_loss": "kl_cov", "algorithm.kl_cov_ratio": 0.2}
ADAPTIVE = {"algorithm.kl_controller": "adaptive"}
THIRD_STEP = ADAPTIVE | {"trainer.max_steps": 3}
saving = partial(training, saves=True)
SHAPES = "shapes.actor"
KEYS: dict[str, Shown] = {
    "model.name_or_path": Shown(base_model, "HERE/deep"),
    "model.revision": Shown(base_model, "main"),  # of a directory: refused; of the hub: tests/rl_core/models/test_source.py
    "model.trust_remote_code": Shown(base_model, True, {"model.name_or_path": "HERE/own"}),
    "model.attn_implementation": Shown(base_model, "eager"),
    "model.chat_template": Shown(prompts, "HERE/other.jinja", at="train"),
    "model.torch_dtype": Shown(structure, "bfloat16", at="result"),
    "data.source[reasoning_gym].kind": Shown(prompts, GYM["data.source"], {"data.max_prompt_length": 512}),
    "data.source[reasoning_gym].dataset": Shown(prompts, "products", GYM),
    "data.source[reasoning_gym].size": Shown(prompts, 41, GYM),
    "data.source[reasoning_gym].seed": Shown(prompts, 1, GYM, at="train"),
    "data.source[reasoning_gym].options": Shown(prompts, {"max_terms": 3}, GYM),
    "data.source[files].kind": Shown(prompts, {"kind": "files", "path": "HERE/more.jsonl"}, GYM),
    "data.source[files].path": Shown(prompts, "HERE/more.jsonl"),
    "data.source[files].format": Shown(prompts, "json", {"data.source.path": "HERE/rows.txt"}),
    "data.prompt_column": Shown(prompts, "question", MORE, at="train.0.text"),
    "data.answer_column": Shown(prompts, "half", MORE, at="train.0.ground_truth"),
    "data.data_source_column": Shown(prompts, "origin", MORE, at="train.0.data_source"),
    "data.system_prompt": Shown(prompts, "Add.", at="train.0.text"),
    "data.suffix": Shown(prompts, "?", at="train.0.text"),
    "data.max_prompt_length": Shown(prompts, 6, {"data.truncation": "left"}),
    "data.truncation": Shown(prompts, "right", {"data.truncation": "left", "data.max_prompt_length": 6}),
    "data.max_dropped_share": Shown(
        prompts, 0.5, {"data.source.path": "HERE/ragged.jsonl", "data.truncation": "drop", "data.max_prompt_length": 8}
    ),
    "data.eval_fraction": Shown(prompts, 0.5),
    "data.shard_rows": Shown(prompts, 7, at="files"),
    "reward[reasoning_gym].kind": Shown(judged, VERIFIED["reward"], GYM),
    "reward[reasoning_gym].timeout_s": Shown(judged, 60.0, VERIFIED, at="elsewhere"),
    "reward[reasoning_gym].extract": Shown(judged, "answer_tag", VERIFIED),
    "reward[function].kind": Shown(judged, FUNCTION, VERIFIED),
    "reward[function].path": Shown(judged, "HERE/other_reward.py"),
    "reward[function].module": Shown(judged, "other_reward", {"reward.path": None, "reward.module": "reward"}, at="scores"),
    "reward[function].name": Shown(judged, "other", at="scores"),
    "reward[function].completions": Shown(judged, "messages", {"reward.name": "listed"}, at="scores"),
    "reward[function].timeout_s": Shown(judged, 60.0, at="elsewhere"),
    "reward[function].on_error": Shown(judged, "value", FAILS),
    "reward[function].error_value": Shown(judged, 0.5, FAILS | COUNTED, at="scores"),
    "reward[math].kind": Shown(judged, MATHS["reward"]),
    "reward[math].timeout_s": Shown(judged, 60.0, MATHS, at="elsewhere"),
    "reward[math].on_error": Shown(judged, "value", NO_ANSWER),
    "reward[math].error_value": Shown(judged, 0.5, NO_ANSWER | COUNTED, at="scores"),
    "reward[regex].kind": Shown(judged, REGEX["reward"]),
    "reward[regex].timeout_s": Shown(judged, 60.0, REGEX, at="elsewhere"),
    "reward[regex].on_error": Shown(judged, "value", NEVER_ENDS),
    "reward[regex].error_value": Shown(judged, 0.5, NEVER_ENDS | COUNTED, at="scores"),
    "reward[regex].pattern": Shown(judged, ">(\\d)", REGEX, at="scores"),
    "reward[regex].group": Shown(judged, 0, REGEX, at="scores"),
    "reward[regex].normalise": Shown(judged, False, SPACED, at="scores"),
    "reward[http].kind": Shown(judged, SERVICE["reward"], at="asked"),
    "reward[http].url": Shown(judged, "SERVICE/other", SERVICE, at="scores"),
    "reward[http].headers": Shown(judged, {"X-Key": "$PPOFLOW_HOME"}, SERVICE, at="asked"),
    "reward[http].batch_size": Shown(judged, 2, SERVICE, at="asked"),
    "reward[http].timeout_s": Shown(judged, 0.2, SLOW | COUNTED, at="scores"),
    "reward[http].retries": Shown(judged, 1, DOWN | COUNTED, at="asked"),
    "reward[http].on_error": Shown(judged, "value", DOWN),
    "reward[http].error_value": Shown(judged, 0.5, DOWN | COUNTED, at="scores"),
    "reward[weighted].kind": Shown(judged, WEIGHTED, at="scores"),
    "reward[model].kind": Shown(training, JUDGE["reward"], at="metrics"),
    "reward[model].name_or_path": Shown(partial(structure, role="reward"), "HERE/deep", JUDGE, at="result"),
    "reward[model].revision": Shown(partial(structure, role="reward"), "main", JUDGE),
    "reward[model].trust_remote_code": Shown(
        partial(structure, role="reward"), True, {"reward": {"kind": "model", "name_or_path": "HERE/own"}}
    ),
    "reward[model].attn_implementation": Shown(partial(structure, role="reward"), "eager", JUDGE, at="attention"),
    "rollout.n": Shown(training, 2, at=SHAPES),
    "rollout.max_new_tokens": Shown(training, 3, at="metrics.0.response_length/max"),
    "rollout.temperature": Shown(training, 0.5, at="metrics"),
    "rollout.batch_size": Shown(training, 3, at="shapes.engine"),
    "algorithm.adv_estimator": Shown(training, "rloo", GROUPS, at=ACTOR),
    "algorithm.adv_estimator.path": Shown(training, "HERE/others.py", OWN_ADVANTAGES, at=ACTOR),
    "algorithm.adv_estimator.name": Shown(training, "doubled", OWN_ADVANTAGES, at=ACTOR),
    "algorithm.adv_estimator.critic": Shown(training, True, OWN_ADVANTAGES, at="weights"),
    "algorithm.adv_estimator.greedy": Shown(training, True, OWN_ADVANTAGES, at="shapes.engine"),
    "algorithm.gamma": Shown(training, 0.9, at="metrics.0.critic/returns/mean"),
    "algorithm.lam": Shown(training, 0.5, at=ACTOR),
    "algorithm.norm_adv_by_std_in_grpo": Shown(training, False, GROUPS | {"algorithm.adv_estimator": "grpo"}, at=ACTOR),
    "algorithm.whiten_advantages": Shown(training, False, at="metrics.0.critic/advantages/mean"),
    "algorithm.critic_warmup": Shown(training, 1, at=ACTOR),
    "algorithm.ppo_epochs": Shown(training, 1, at=SHAPES),
    "algorithm.policy_loss": Shown(training, "gpg", at=ACTOR),
    "algorithm.policy_loss.path": Shown(training, "HERE/others.py", OWN_LOSS, at=ACTOR),
    "algorithm.policy_loss.name": Shown(training, "doubled_loss", OWN_LOSS, at=ACTOR),
    "algorithm.loss_agg_mode": Shown(training, "seq-mean-token-sum", at=ACTOR),
    "algorithm.loss_scale_factor": Shown(training, 3.0, {"algorithm.loss_agg_mode": "seq-mean-token-sum-norm"}, at=ACTOR),
    "algorithm.clip_ratio_low": Shown(training, 0.01, at=ACTOR),
    "algorithm.clip_ratio_high": Shown(training, 0.01, at=ACTOR),
    "algorithm.clip_ratio_c": Shown(training, 1.01, at=ACTOR),
    "algorithm.clip_cov_ratio": Shown(training, 0.5, CLIP_COV | {"algorithm.clip_cov_ratio": 0.1}, at=ACTOR),
    "algorithm.clip_cov_lb": Shown(training, 100.0, CLIP_COV | {"algorithm.clip_cov_ub": 200.0}, at=ACTOR),
    "algorithm.clip_cov_ub": Shown(training, -100.0, CLIP_COV | {"algorithm.clip_cov_lb": -200.0}, at=ACTOR),
    "algorithm.kl_cov_ratio": Shown(training, 0.9, KL_COV, at=ACTOR),
    "algorithm.kl_cov_coef": Shown(training, 50.0, KL_COV, at=ACTOR),
    "algorithm.cliprange_value": Shown(training, 0.01, at="weights.critic"),
    "algorithm.entropy_coeff": Shown(training, 0.1, at=ACTOR),
    "algorithm.kl_in": Shown(training, "loss", at=ACTOR),
    "algorithm.kl_coef": Shown(training, 0.5, at="metrics.1.critic/rewards/mean"),
    "algorithm.kl_estimator": Shown(training, "k2", at="metrics.1.critic/rewards/mean"),
    "algorithm.kl_controller": Shown(training, "adaptive", at="metrics.1.actor/kl_coef"),
    "algorithm.kl_target": Shown(training, 1e9, THIRD_STEP | {"algorithm.kl_estimator": "k2"}, at="metrics.2.actor/kl_coef"),
    "algorithm.kl_horizon": Shown(training, 100, ADAPTIVE, at="metrics.1.actor/kl_coef"),
    "algorithm.rollout_is": Shown(training, "token", {"algorithm.rollout_is_threshold": 0.5}, at=ACTOR),
    "algorithm.rollout_is_threshold": Shown(training, 0.5, {"algorithm.rollout_is": "token"}, at=ACTOR),
    "trainer.seed": Shown(training, 1, at="metrics"),
    "trainer.shuffle": Shown(training, False, at="metrics"),
    "trainer.max_steps": Shown(training, 1, at="metrics"),
    "trainer.num_train_epochs": Shown(training, 2, {"trainer.max_steps": None}, at=SHAPES),
    "trainer.train_batch_size": Shown(training, 4, at=SHAPES),
    "trainer.gradient_accumulation_steps": Shown(training, 1, ACCUMULATED, at=SHAPES),
    "trainer.ppo_mini_batch_size": Shown(training, 8, at="weights.actor"),
    "trainer.per_device_train_batch_size": Shown(training, 2, at=SHAPES),
    "trainer.max_tokens_per_micro_batch": Shown(training, 26, at=SHAPES),
    "trainer.deterministic": Shown(saved, True, at="deterministic"),
    "trainer.logger": Shown(training, [], at="progress"),
    "launch.device": Shown(launch, "cuda"),
    "launch.nproc_per_node": Shown(launch, 3, at="ranks"),
    "launch.threads_per_rank": Shown(launch, 9, at="threads"),
    "launch.max_restarts": Shown(restarted, 1, {"trainer.logger": []}, at="restarts"),
    "launch.grace_seconds": Shown(supervised, 3.0, {"trainer.logger": []}, at="grace"),
    "launch.dist_backend": Shown(launch, "nccl"),
    "launch.dist_timeout_s": Shown(launch, 77.0, at="waits"),
    "launch.preflight_timeout_s": Shown(lonely_launch, 0.2, {"launch.preflight_timeout_s": 0.1}),
    "launch.stall_report_s": Shown(launch, 0, at="watched"),
    "checkpoint.save_steps": Shown(saving, 1, at="kept"),
    "checkpoint.keep_best": Shown(saving, "actor/lr", BEST_FIRST, at="kept"),
    "checkpoint.async_save": Shown(saved, False, at="threads"),
    "checkpoint.must_save_by": Shown(saving, "2020-01-01T00:00"),
    "checkpoint.keep": Shown(saving, 3, {"checkpoint.save_steps": 1, "trainer.max_steps": 3}, at="kept"),
    "evaluation.prompts": Shown(evaluation, 3, at="samples"),
    "evaluation.temperature": Shown(evaluation, 1.0, at="samples"),
    "evaluation.max_new_tokens": Shown(evaluation, 3, at="samples"),
    "evaluation.seed": Shown(evaluation, 1, {"evaluation.temperature": 1.0}, at="samples"),
    "evaluation.success_reward": Shown(evaluation, 0.0, at="result.accuracy"),
    "evaluation.every_steps": Shown(training, 1, at="metrics"),
    "ref_model.disable_half_cast": Shown(partial(structure, role="ref"), True, HALF, at="policies"),
}  # fmt: skip
"""Of keys that stand in one section."""

OF_A_TRAINED_ROLE: dict[str, Shown] = {
    "learning_rate": Shown(learning, 0.1, at="weights"),
    "lr_scheduler_type": Shown(learning, "cosine", at="said"),
    "warmup_steps": Shown(learning, 3, at="said"),
    "min_lr_ratio": Shown(learning, 0.5, LINEAR, at="said"),
    "optimizer": Shown(learning, "adamw8bit", at="kind"),
    "weight_decay": Shown(learning, 0.1, at="weights"),
    "adam_beta1": Shown(learning, 0.5, at="weights"),
    "adam_beta2": Shown(learning, 0.5, at="weights"),
    "adam_epsilon": Shown(learning, 1.0, at="weights"),
    "max_grad_norm": Shown(learning, 10.0, at="weights"),
    "lora": Shown(structure, {}, at="trained"),
    "lora.rank": Shown(structure, 3, {"lora": {}}, at="adapters"),
    "lora.alpha": Shown(structure, 3.0, {"lora": {}}, at="scaling"),
    "lora.target_modules": Shown(structure, ["q_proj"], {"lora": {}}, at="adapters"),
}
"""Of `actor` and `critic`, with modes in the same section."""

OF_FSDP: dict[str, Shown] = {
    "strategy": Shown(layout, "ddp"),
    "hsdp_group_size": Shown(layout, 1, {"strategy": "hsdp", "hsdp_group_size": 2}),
    "wrap_policy.auto_wrap": Shown(structure, "NO_WRAP", at="units"),
    "wrap_policy.transformer_layer_cls_to_wrap": Shown(structure, ["LlamaMLP"], at="units"),
    "wrap_policy.min_num_params": Shown(structure, 2000, at="units"),
    "mixed_precision.param_dtype": Shown(structure, "bfloat16", at="result"),
    "mixed_precision.reduce_dtype": Shown(structure, "bfloat16", at="policies"),
    "mixed_precision.buffer_dtype": Shown(structure, "bfloat16", at="buffers"),
    "mixed_precision.cast_forward_inputs": Shown(structure, False, at="policies"),
    "master_dtype": Shown(structure, "bfloat16", at="held"),
    "reshard_after_forward": Shown(structure, False, at="gathered"),
    "forward_prefetch": Shown(structure, 1, at="prefetch"),
    "param_offload": Shown(structure, True, at="leaves"),
    "optimizer_offload": Shown(structure, True, at="leaves"),
    "offload_policy": Shown(structure, True, at="home"),
    "activation_checkpointing": Shown(structure, True, at="layers"),
    "activation_cpu_offload": Shown(structure, True, at="layers"),
    "ulysses_sequence_parallel_size": Shown(structure, 2),  # refused on one rank
}
"""Of `fsdp` and each role's, with modes in the same section."""

OF_TRAINING = {
    "optimizer_offload", "activation_checkpointing", "activation_cpu_offload", "master_dtype", "mixed_precision.reduce_dtype",
}  # fmt: skip
"""Keys of `fsdp` that change nothing for the reference and the reward model; the user is told so."""

ONE_VALUE = {"trainer.type", "fsdp.fsdp_state_dict_type", *(f"{role}.fsdp.fsdp_state_dict_type" for role in SECTIONS.values())}
"""Keys of which any other value is refused."""

ELSEWHERE = {
    "data.source[hub].kind": "tests/rl_core/data/test_hub.py::test_rows_and_commit",
    "data.source[hub].name": "tests/rl_core/data/test_hub.py::test_errors",
    "data.source[hub].subset": "tests/rl_core/data/test_hub.py::test_errors",
    "data.source[hub].split": "tests/rl_core/data/test_hub.py::test_errors",
    "data.source[hub].revision": "tests/rl_core/data/test_hub.py::test_rows_and_commit",
    "reward[reasoning_gym].on_error": "tests/rl_core/rewards/test_isolated.py::test_a_verifier_without_end_is_ended",
    "reward[reasoning_gym].error_value": "tests/rl_core/rewards/test_isolated.py::test_a_verifier_without_end_is_ended",
    "reward[weighted].parts.weight": "tests/rl_core/rewards/test_weighted.py::test_the_weighted_sum_and_its_parts",
    **{
        name: "tests/rl_core/rewards/test_weighted.py::test_a_part_is_read_as_the_reward_alone"
        for name, _ in leaves()
        if name.startswith("reward[weighted].parts.reward")
    },
    "evaluation.samples": "tests/tasks/test_evaluate_policy.py::test_base_and_policy_answer_the_same_prompts",
    "registry.name": "tests/tasks/test_register_policy.py::test_the_version_tells_where_it_came_from_and_why_it_is_champion",
    "registry.experiment": "tests/tasks/test_register_policy.py::test_the_run_that_trained_it_has_the_version_and_the_evaluation",
    "registry.gate.metric": "tests/tasks/test_register_policy.py::test_the_gate_against_a_champion",
    "registry.gate.min_improvement": "tests/tasks/test_register_policy.py::test_the_gate_against_a_champion",
}
"""Tests of their own, where a server, a hub or a database is needed."""
