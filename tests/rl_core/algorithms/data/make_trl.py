"""Writes trl.json: what TRL's own code gives for `inputs.py`. Needs trl (README.md); not run by the tests."""

import inspect
import textwrap
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import trl
from inputs import inputs, write
from torch import Tensor
from trl import GRPOTrainer
from trl.experimental.ppo import ppo_trainer
from trl.trainer import grpo_trainer, rloo_trainer

GIVEN = inputs()
ROWS = [row for row in range(10) if GIVEN["mask"][row].any()]
"""TRL counts empty responses as sequences; they are left out."""
PLAIN = [row for row in ROWS if row not in (2, 3, 9)]
"""Rows without gaps: TRL's GAE steps through them."""
SCORES = [[1.0, 0.0, 0.25, -1.5], [0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 1.0, 0.0]]


def cut(module: ModuleType, start: str, stop: str) -> str:
    """The lines of a module's source from the one with `start` up to the one with `stop`, on the left."""
    lines = inspect.getsource(module).splitlines()
    first = next(number for number, line in enumerate(lines) if start in line)
    last = next(number for number, line in enumerate(lines[first:], start=first) if stop in line)
    return textwrap.dedent("\n".join(lines[first:last]))


def group_advantages() -> dict[str, Any]:
    rewards = torch.tensor(SCORES, dtype=torch.float64).flatten()
    grpo = cut(grpo_trainer, "mean_grouped_rewards = torch.nanmean(rewards.view", "is_std_zero = torch.isclose")
    rloo = cut(rloo_trainer, "grouped_rewards = rewards.view(-1, num_generations)", "# Normalize advantages over the scorable")
    made: dict[str, Any] = {"scores": SCORES}
    for name, code, scale in [("grpo", grpo, "group"), ("grpo without std", grpo, "none"), ("rloo", rloo, None)]:
        names = {"self": SimpleNamespace(scale_rewards=scale), "rewards": rewards, "num_generations": 4, "torch": torch}
        names["nanstd"] = grpo_trainer.nanstd
        exec(code, names)
        made[name] = names["advantages"]
        made["deviations"] = names["std_rewards"] if scale == "group" else made["deviations"]
    return made


def loss_of(level: str, loss_type: str, beta: float = 0.0, delta: float | None = None) -> dict[str, Any]:
    """`GRPOTrainer._compute_loss` where the model is a tensor of log-probabilities, and advantages are of whole responses."""
    logprobs = GIVEN["logprobs"][ROWS].clone().requires_grad_()
    accelerator = SimpleNamespace(num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value)
    this = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logprobs, torch.zeros_like(logprobs), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=1.28 if loss_type == "cispo" else 0.28,
        use_vllm=False,
        max_completion_length=5,
        current_gradient_accumulation_steps=1,
        args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1),
        accelerator=accelerator,
        _metrics={"train": defaultdict(list)},
        model=SimpleNamespace(training=True),
        _entropy_bonus_enabled=False,
    )
    mask = GIVEN["mask"][ROWS].long()
    # TRL's k3 has no bounds; the rollout's log-probabilities stand in for the reference's, since they keep within ours.
    given = {
        "prompt_ids": torch.zeros(len(ROWS), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(ROWS), 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": GIVEN["advantages"][ROWS, 0],
        "old_per_token_logps": GIVEN["old_logprobs"][ROWS],
        "ref_per_token_logps": GIVEN["rollout_logprobs"][ROWS],
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(this, None, given)
    loss.backward()
    return {"loss": loss.item(), "gradient": logprobs.grad}


def losses() -> dict[str, Any]:
    return {
        "ppo seq-mean-token-mean": loss_of("token", "grpo"),
        "ppo token-mean": loss_of("token", "bnpo"),
        "ppo seq-mean-token-sum-norm": loss_of("token", "dr_grpo"),
        "ppo token-mean dual": loss_of("token", "dapo", delta=3.0),
        "gspo seq-mean-token-mean": loss_of("sequence", "grpo"),
        "gspo seq-mean-token-sum": loss_of("sequence", "luspo"),
        "cispo token-mean": loss_of("token", "cispo"),
        "ppo token-mean kl": loss_of("token", "bnpo", beta=0.1),
    }


def importance() -> dict[str, Any]:
    start = "per_token_logps_diff = (old_per_token_logps - sampling_per_token_logps) * mask"
    code = cut(grpo_trainer, start, 'elif self.vllm_importance_sampling_mode in ["sequence_mask", "token_mask"]')
    made = {}
    for level in ("token", "sequence"):
        this = SimpleNamespace(
            vllm_importance_sampling_mode=f"{level}_truncate",
            vllm_importance_sampling_clip_min=None,
            vllm_importance_sampling_clip_max=2.0,
        )
        names: dict[str, Any] = {
            "self": this,
            "torch": torch,
            "mask": GIVEN["mask"].double(),
            "old_per_token_logps": GIVEN["old_logprobs"],
            "sampling_per_token_logps": GIVEN["rollout_logprobs"],
        }
        exec(code, names)
        made[level] = names["vllm_importance_sampling_ratio"]
    return made


def ppo() -> dict[str, Any]:
    mask = GIVEN["mask"][PLAIN]

    def rows(name: str) -> Tensor:
        return GIVEN[name][PLAIN].clone()

    args = SimpleNamespace(gamma=0.9, lam=0.8, cliprange=0.2, cliprange_value=0.4, vf_coef=1.0)
    values = torch.where(mask, rows("values"), 0.0)
    names: dict[str, Any] = {"args": args, "torch": torch, "responses": mask, "values": values, "padding_mask": ~mask}
    names |= {"rewards": rows("rewards"), "masked_whiten": ppo_trainer.masked_whiten}
    exec(cut(ppo_trainer, "lastgaelam = 0", "empty_cache()"), names)
    made = {"advantages": names["advantages"], "returns": torch.where(mask, names["returns"], 0.0)}

    vpred, logprobs = rows("new_values").requires_grad_(), rows("logprobs").requires_grad_()
    indices = slice(None)
    names = {"args": args, "torch": torch, "vpred": vpred, "new_logprobs": logprobs, "micro_batch_inds": indices}
    names |= {"mb_values": rows("values"), "mb_return": rows("returns"), "mb_logprobs": rows("old_logprobs")}
    names |= {"mb_advantage": rows("advantages"), "padding_mask": ~mask, "padding_mask_p1": ~mask}
    names |= {"masked_mean": ppo_trainer.masked_mean}
    exec(cut(ppo_trainer, "vpredclipped = torch.clamp(", "accelerator.backward(loss)"), names)
    names["loss"].backward()
    return made | {
        "pg_loss": names["pg_loss"].item(),
        "vf_loss": names["vf_loss"].item(),
        "vf_clipfrac": names["vf_clipfrac"].item(),
        "policy gradient": logprobs.grad,
        "value gradient": vpred.grad,
    }


if __name__ == "__main__":
    about = {"library": "trl", "version": trl.__version__, "torch": torch.__version__}
    outputs: dict[str, Any] = {"rows": ROWS, "plain rows": PLAIN, "groups": group_advantages()}
    outputs |= {f"loss {name}": value for name, value in losses().items()}
    outputs |= {f"importance {name}": value for name, value in importance().items()}
    outputs["ppo"] = ppo()
    write("trl.json", about, outputs)
