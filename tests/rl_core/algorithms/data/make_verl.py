"""Writes verl.json: what verl's own functions give for `inputs.py`. Needs verl (README.md); not run by the tests."""

from typing import Any

import numpy as np
import torch
import verl
from inputs import inputs, write
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos as verl_core
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils import torch_functional
from verl.workers.config import ActorConfig, PolicyLossConfig

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
SCALE = 5
GIVEN = inputs()
MASK = GIVEN["mask"].double()


def advantages() -> dict[str, Any]:
    common = {"token_level_rewards": GIVEN["rewards"], "response_mask": MASK}
    index = {"index": np.array(GIVEN["group"].tolist())}
    config = AlgoConfig(gamma=0.9)
    calls: dict[str, dict[str, Any]] = {
        "gae": {"values": GIVEN["values"], "gamma": 0.9, "lam": 0.8},
        "grpo": {**index},
        "grpo without std": {**index, "norm_adv_by_std_in_grpo": False},
        "rloo": {**index},
        "opo": {**index},
        "reinforce_plus_plus": {"config": config},
        "reinforce_plus_plus_baseline": {**index},
        "remax": {"reward_baselines": GIVEN["baseline"]},
    }
    made = {}
    for name, extra in calls.items():
        function = verl_core.get_adv_estimator_fn(name.split(" ")[0])
        cloned = {key: value.clone() if isinstance(value, Tensor) else value for key, value in (common | extra).items()}
        result = function(**cloned)
        made[name] = {"advantages": result[0], "returns": result[1]}
    return made


def policy_losses() -> dict[str, Any]:
    made: dict[str, Any] = {}
    names = {"ppo": "vanilla", "gspo": "gspo", "cispo": "cispo", "gpg": "gpg", "clip_cov": "clip_cov", "kl_cov": "kl_cov"}
    for ours, theirs in names.items():
        for mode in ["seq-mean-token-mean"] if ours == "gspo" else MODES:
            logprobs = GIVEN["logprobs"].clone().requires_grad_()
            config = ActorConfig(
                strategy="fsdp",
                rollout_n=1,
                ppo_micro_batch_size_per_gpu=1,
                clip_ratio_low=0.2,
                clip_ratio_high=0.28,
                clip_ratio_c=3.0,
                policy_loss=PolicyLossConfig(
                    loss_mode=theirs, clip_cov_ratio=1.0, clip_cov_lb=0.05, clip_cov_ub=1.5, kl_cov_ratio=0.2, ppo_kl_coef=0.7
                ),
            )
            config.global_batch_info["loss_scale_factor"] = SCALE
            loss, metrics = verl_core.get_policy_loss_fn(theirs)(
                old_log_prob=GIVEN["old_logprobs"],
                log_prob=logprobs,
                advantages=GIVEN["advantages"],
                response_mask=MASK,
                loss_agg_mode=mode,
                config=config,
            )
            loss.backward()
            made[f"{ours} {mode}"] = {"loss": loss.item(), "metrics": metrics, "gradient": logprobs.grad}
    return made


def value_losses() -> dict[str, Any]:
    made = {}
    for mode in MODES:
        values = GIVEN["new_values"].clone().requires_grad_()
        loss, share = verl_core.compute_value_loss(
            values, GIVEN["returns"], GIVEN["values"], MASK, 0.4, mode, loss_scale_factor=SCALE
        )
        loss.backward()
        made[mode] = {"loss": loss.item(), "vf_clipfrac": share.item(), "gradient": values.grad}
    return made


def kl() -> dict[str, Any]:
    made = {}
    for name in ("k1", "k2", "k3", "abs"):
        logprobs = GIVEN["logprobs"].clone().requires_grad_()
        value = verl_core.kl_penalty(logprobs, GIVEN["ref_logprobs"], name)
        (value * MASK).sum().backward()
        made[name] = {"value": value.detach(), "gradient": logprobs.grad}
    return made


def controller() -> list[dict[str, float]]:
    made = []
    for coef, seen, responses in [(0.1, 0.5, 64), (0.2, 0.01, 100), (0.05, 0.11, 32), (0.3, 0.1, 1000), (0.3, -1.0, 5000)]:
        their = verl_core.AdaptiveKLController(coef, 0.1, 10000)
        their.update(seen, responses)
        made.append({"coef": coef, "kl": seen, "responses": responses, "next": their.value})
    return made


def corrections() -> dict[str, Any]:
    made = {}
    for level in ("token", "sequence"):
        weights, _, metrics = compute_rollout_correction_and_rejection_mask(
            GIVEN["old_logprobs"], GIVEN["rollout_logprobs"], MASK, rollout_is=level, rollout_is_threshold=2.0
        )
        made[level] = {"weights": weights.batch["rollout_is_weights"], "metrics": metrics}
    return made


if __name__ == "__main__":
    torch.manual_seed(0)
    outputs: dict[str, Any] = {f"advantages {name}": value for name, value in advantages().items()}
    outputs |= {f"policy_loss {name}": value for name, value in policy_losses().items()}
    outputs |= {f"value_loss {name}": value for name, value in value_losses().items()}
    outputs |= {f"kl {name}": value for name, value in kl().items()}
    outputs |= {f"rollout {name}": value for name, value in corrections().items()}
    outputs["controller"] = controller()
    outputs["whitened"] = torch_functional.masked_whiten(GIVEN["advantages"], MASK) * MASK
    write("verl.json", {"library": "verl", "version": verl.__version__, "torch": torch.__version__}, outputs)
