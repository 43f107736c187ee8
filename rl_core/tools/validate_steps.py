"""The four steps of one role, on the ranks that hold it: load, wrap, forward, gradient. Each says what it found, or raises."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rl_core.batching import BatchPlan
from rl_core.config import Config
from rl_core.config.roles import TrainedRoleConfig
from rl_core.config.schema import Role as RoleName
from rl_core.errors import ConfigError, ModelError, NonFiniteError
from rl_core.groups import Group
from rl_core.learner import Learner
from rl_core.models import lora
from rl_core.models.build import build_critic, build_policy, empty_model
from rl_core.models.dtypes import usable_dtype
from rl_core.models.reward_model import RewardModel, build_reward_model, check_reward_model
from rl_core.phases import inputs, portion
from rl_core.role import Role
from rl_core.rollout.engine import RolloutEngine
from rl_core.rollout.stop_ids import stop_ids_of
from rl_core.rollout.sync import sync_weights
from rl_core.tools.validate_files import Files, sample_batch
from rl_core.tools.validate_modules import gradients, layers, let_gradients_through, not_finite
from rl_core.tools.validate_report import Step

TRAINED: tuple[RoleName, ...] = ("actor", "critic")
ROWS = 4
"""Responses for each data-parallel rank."""
NEW_TOKENS = 4
MOST_APART = 0.5
"""Nats per token by which rollout and training may differ on the average; rounding to 16 bits makes a tenth of it."""
FIRST = 10
"""So many names are said of a list."""


class Trial:
    """One role, step by step in their order; each is a collective over the role's ranks.

    Args:
        config: settled.
    """

    def __init__(self, name: RoleName, config: Config, files: Files, group: Group, device: torch.device) -> None:
        self._name, self._config, self._files, self._group, self._device = name, config, files, group, device
        self._plan = BatchPlan.of(config)
        self._field = "reward.name_or_path" if name == "reward" else "model.name_or_path"

    @property
    def takes_part(self) -> bool:
        """Whether this rank is one of the role's."""
        return self._group.rank is not None

    def call(self, step: Step) -> str:
        """Do a step; returns what was found, or raises what is wrong."""
        return {"load": self._load, "wrap": self._wrap, "forward": self._forward, "gradient": self._gradient}[step]()

    def _load(self) -> str:
        """Files, configuration, class, tokenizer, adapters; no weights yet."""
        config, own = self._config, self._config.role(self._name)
        self._batch = sample_batch(self._files, ROWS * self._group.data_parallel, self._device)
        if self._name == "reward":
            check_reward_model(config, self._device, self._files.tokenizer)
            return f"files, head and tokenizer of {getattr(own, 'name_or_path', 'the reward model')}"
        if isinstance(own, TrainedRoleConfig) and own.lora is not None:
            lora.add_adapters(empty_model(self._files.directory, config.model), own.lora, self._name)
        return self._files.found

    def _wrap(self) -> str:
        """Sharded and given its weights as in a training, which logs how it is spread; no layer may be left out."""
        name, config, group, device, directory = self._name, self._config, self._group, self._device, self._files.directory
        if name == "critic":
            module: torch.nn.Module = build_critic(directory, config, group, device)
        elif name == "reward":
            module = build_reward_model(config, group, device, self._files.tokenizer)
        else:
            module = build_policy(directory, config, name, group, device, trainable=name == "actor")
        policy = config.fsdp_of(name).wrap_policy
        wrapped, missed = layers(module)
        listed = policy.transformer_layer_cls_to_wrap
        if policy.auto_wrap == "TRANSFORMER_BASED_WRAP" and missed and (listed or not policy.min_num_params):
            said = ", ".join(f"{count} {kind}" for kind, count in missed.items())
            field = f"{'reward.' if name == 'reward' else ''}fsdp.wrap_policy.transformer_layer_cls_to_wrap"
            raise ConfigError(
                f"{field} misses {said}: they are no FSDP units, but stay gathered from the beginning of a forward to its end. "
                f"Set it to [{', '.join(sorted(wrapped | missed.keys()))}]."
            )
        if name in TRAINED:
            self._role: Role = Learner(name, module, group, config, device, optimizer_steps=1)
        else:
            self._role = Role(name, module, group, config, device)
        return ""

    @torch.no_grad()
    def _forward(self) -> str:
        """Through the calls that a training makes; what comes out must be finite, and the rollout must agree with it."""
        what = {"critic": "values", "reward": "scores"}.get(self._name, "log-probabilities")
        with self._role.loaded():
            results = torch.cat([result.flatten() for result, _ in self._results(entropy=False)])
            if not results.isfinite().all():
                raise NonFiniteError(f"{self._field}: {what} are not finite. {self._why_not_finite()}")
            counted = results if self._name == "reward" else results[results != 0]
            said = f"{what} of {len(self._batch)} responses, on the average {counted.mean() if len(counted) else 0.0:.3f}"
            return said + (self._rollout() if self._name == "actor" else "")

    def _gradient(self) -> str:
        """Of the mean over all response tokens: each trained parameter has one, they are finite and not all zero."""
        learner, name = self._role, self._name
        assert isinstance(learner, Learner)
        learner.scale = None  # that is for small gradients: zeros that come of it do no harm here, infinite ones would
        let_gradients_through(learner.module)
        tokens = int(self._batch.response_length.sum())
        with learner.loaded():
            for result, last in self._results(entropy=True):
                if not result.requires_grad:
                    raise ModelError(
                        f"{self._field}: no gradient reaches a trained parameter of the {name}: its forward runs without "
                        "(torch.no_grad, detach()). Mend the model's code."
                    )
                learner.backward(result.sum() / tokens, last)
            found = gradients(learner.module, self._group.process_group)
        count = len(found.trained)
        if found.infinite:
            raise NonFiniteError(
                f"{self._field}: the gradients of {len(found.infinite)} of {count} trained parameters are not finite: "
                f"{_first(found.infinite)}. Compute in float32 or bfloat16 ({name}.torch_dtype), or mend the model's code."
            )
        if found.missing:
            raise ModelError(
                f"{self._field}: {len(found.missing)} of {count} trained parameters get no gradient: {_first(found.missing)}. "
                "The forward does not use them, or detaches what comes of them (torch.no_grad, detach()). Mend the model's code."
            )
        if len(found.zero) + len(found.idle) == count:
            raise ModelError(f"{self._field}: the gradients of all {count} trained parameters are 0. Mend the model's code.")
        said = [f"{count - len(found.zero) - len(found.idle)} of {count} trained parameters have a gradient"]
        said += [f"only zeros, at this batch: {_first(found.zero)}"] if found.zero else []
        said += [f"none, as experts without tokens in this batch: {_first(found.idle)}"] if found.idle else []
        return "; ".join(said)

    def _results(self, entropy: bool) -> Iterator[tuple[Tensor, bool]]:
        """What the model says of this rank's micro-batches, and whether one is the last."""
        group, model, temperature = self._group, self._role.module, self._config.rollout.temperature
        portions = self._plan.portions(self._batch, group.data_parallel, group.part)
        for number, rows in enumerate(portions, start=1):
            part = portion(self._batch, rows)
            if isinstance(model, RewardModel):
                result = model(*model.encode(part.prompts, part.responses))
            elif self._name == "critic":
                result = model(*inputs(part))
            else:
                result = model(*inputs(part), temperature, entropy=entropy)[0]
            yield result[: len(rows)], number == len(portions)

    def _rollout(self) -> str:
        """A few tokens drawn by a training's engine with the actor's weights; how far their log-probabilities are from these."""
        config, files, model, device = self._config, self._files, self._role.module, self._device
        engine = RolloutEngine(files.directory, usable_dtype(config, "actor", device), device, config.model)
        sync_weights(model, engine)
        batch = engine.generate(
            self._batch.prompts[:ROWS],  # the same on ranks that share sequences
            list(range(ROWS)),
            max_new_tokens=NEW_TOKENS,
            temperature=config.rollout.temperature,
            seed=config.trainer.seed,
            step=0,
            stop_ids=stop_ids_of(files.directory, files.tokenizer, config.model.trust_remote_code),
            batch_size=min(ROWS, config.rollout.batch_size),
        )
        logprobs, _ = model(*inputs(batch), config.rollout.temperature, entropy=False)
        apart = float((logprobs - batch.logprobs).abs()[batch.mask].mean())
        if not apart <= MOST_APART:
            raise ModelError(
                f"{self._field}: the log-probabilities of what the rollout drew are {apart:.2f} nats per token from those of the "
                "training's forward, more than rounding makes. With a cache (past_key_values) the model computes something else "
                "than without: mend its code."
            )
        return f"; the rollout's are {apart:.1g} from these"

    def _why_not_finite(self) -> str:
        culprit = not_finite(self._role.module)
        if culprit is not None:
            return f"{culprit} is the first of the weights that are not finite. Bring the model again."
        dtype = str(usable_dtype(self._config, self._name, self._device)).removeprefix("torch.")
        return (
            f"The weights are: it overflows in {dtype}. Compute in float32 or bfloat16 (torch_dtype), or mend the model's code."
        )


def _first(names: list[str]) -> str:
    return ", ".join(names[:FIRST]) + (f", and {len(names) - FIRST} more" if len(names) > FIRST else "")
