"""The reward model: a frozen backbone with a head to one number, which scores prompt and response at their last token."""

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl_core.config import Config
from rl_core.config.reward import model_of
from rl_core.errors import ModelError
from rl_core.groups import Group
from rl_core.models import build, reward_weights
from rl_core.models.auto import model_config
from rl_core.models.dtypes import usable_dtype
from rl_core.models.source import ModelSource, load_tokenizer
from rl_core.models.tensors import model_tensors
from rl_core.models.value import ValueModel
from rl_core.rewards import model as reward_files
from rl_core.rewards.tokens import RewardTokens
from rl_core.rollout.batch import PAD_ID
from rl_core.together import together

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

LANGUAGE_MODEL, CLASSIFIER = "AutoModelForCausalLM", "AutoModelForSequenceClassification"


class RewardModel(ValueModel):
    """Wraps a transformers backbone (`.backbone`); the head (`.value_head`, [*, hidden] → [*, 1]) computes in float32.

    Attributes:
        tokens: makes the model's ids of the policy's, and counts the rows that were too long.
    """

    def __init__(
        self, backbone: "PreTrainedModel", head: nn.Module | None, tokens: RewardTokens, group: Group, device: torch.device
    ) -> None:
        """`head` None takes a linear one without bias."""
        super().__init__(backbone, group)
        hidden_size = backbone.config.get_text_config().hidden_size
        linear = nn.Linear(hidden_size, 1, bias=False, dtype=torch.float32, device="meta")
        self.value_head = linear if head is None else head  # type: ignore[assignment]
        self.tokens = tokens
        self._device = device

    def encode(self, prompt_ids: list[list[int]], response_ids: list[list[int]]) -> tuple[Tensor, Tensor]:
        """What `forward` takes, of at least one row in the policy's ids (see `RewardTokens.encode`, also for its error).

        Returns:
            Ids [B, T], padded on the right, and lengths [B], both long.
        """
        rows = self.tokens.encode(prompt_ids, response_ids)
        width = max(map(len, rows))
        ids = torch.tensor([row + [PAD_ID] * (width - len(row)) for row in rows], dtype=torch.long, device=self._device)
        return ids, torch.tensor([len(row) for row in rows], dtype=torch.long, device=self._device)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        """Score each row at its last token.

        Args:
            input_ids: [B, T] the model's own ids, padded on the right with any valid id.
            lengths: [B], at least 1.

        Returns:
            [B] float32.
        """
        # The state in which a "response" of one token behind the row would be chosen is that of the row's last token.
        return super().forward(input_ids, lengths, torch.ones_like(lengths), 1).squeeze(1)


def build_reward_model(
    config: Config, group: Group, device: torch.device, policy_tokenizer: "PreTrainedTokenizerBase"
) -> RewardModel:
    """The reward model that `reward` names, frozen. Collective over the group.

    Args:
        policy_tokenizer: of the ids that it will be given.

    Raises:
        ModelError: there is no such model, it has no head to one number, or its weights or tokenizer do not fit it.
        ConfigError: `reward.fsdp` does not fit the model.
    """
    source, kind, model, head, tokens = together(lambda: _read(config, device, policy_tokenizer), group.process_group)
    module = RewardModel(model.base_model, head, tokens, group, device)  # type: ignore[arg-type]
    build.spread(module, model, config, "reward", group, device, trainable=False)
    prefix = f"{model.base_model_prefix}."
    tensors = {
        name.replace("backbone.", prefix, 1).replace("value_head.", "score.", 1): tensor
        for name, tensor in model_tensors(module).items()
    }
    if head is None:
        reward_weights.fill_at_random(tensors.pop("score.weight"))
        if group.rank == 0:
            log.warning(
                "random reward head: %s in %s has no head that gives a score, so it gets one of random values. Its rewards mean "
                "nothing: good for trials only.",
                type(model).__name__,
                source.directory,
            )
    reward_weights.load(tensors, source, model, kind, group)
    return build.finish(module, trainable=False)


def check_reward_model(config: Config, device: torch.device, policy_tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise what `build_reward_model` would raise of files, head and tokenizer, before anything is loaded. Not collective."""
    _read(config, device, policy_tokenizer)


def _read(
    config: Config, device: torch.device, policy_tokenizer: "PreTrainedTokenizerBase"
) -> tuple[ModelSource, str, "PreTrainedModel", nn.Module | None, RewardTokens]:
    """Where the model is, its Auto class, the model on the meta device, its head (None: it has none) and the way to its ids."""
    settings = model_of(config.reward)
    assert settings is not None
    source = reward_files.files(settings)
    described = model_config(source.directory, settings.trust_remote_code, section="reward")
    if getattr(described, "quantization_config", None) is not None:
        raise ModelError(f"reward.name_or_path: {source.directory} holds quantized weights. Give the original ones.")
    languages = [name for name in described.architectures or () if name.endswith(("ForCausalLM", "LMHeadModel"))]
    kind = LANGUAGE_MODEL if languages else CLASSIFIER
    model = build.empty_model(source.directory, settings, usable_dtype(config, "reward", device), kind)
    embedding: Any = model.get_input_embeddings()
    tokens = RewardTokens(
        policy_tokenizer,
        load_tokenizer(source),
        embeddings=len(embedding.weight),
        positions=getattr(model.config.get_text_config(), "max_position_embeddings", None),
    )
    return source, kind, model, _head(model, source) if kind == CLASSIFIER else None, tokens


def _head(classifier: "PreTrainedModel", source: ModelSource) -> nn.Module:
    head = getattr(classifier, "score", None)
    if not isinstance(head, nn.Module):
        raise ModelError(
            f"reward.name_or_path: {type(classifier).__name__} in {source.directory} has no head `score`, by which decoders rate "
            "a text at its last token. Give a decoder as AutoModelForSequenceClassification makes it with num_labels=1."
        )
    head.float()
    outputs = head(torch.empty(1, classifier.config.get_text_config().hidden_size, device="meta")).shape[-1]
    if outputs != 1:
        raise ModelError(
            f"reward.name_or_path: the classifier in {source.directory} has {outputs} outputs, but a reward is one number. Give "
            "a model with num_labels = 1."
        )
    return head
