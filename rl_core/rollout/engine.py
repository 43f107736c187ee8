"""Generation of responses with transformers modules: prefill, then one token at a time with a KV cache.

The engine owns a full copy of the model on its device, in the type it computes in; `sync_weights` fills it. It draws its
tokens itself (see `sampling`) and so does not use `generate`, whose draws depend on the composition of a batch.
"""

from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl_core.config.model import PretrainedModel
from rl_core.errors import ConfigError
from rl_core.models.auto import model_config, model_of
from rl_core.models.buffers import restore_buffers
from rl_core.rollout.batch import PAD_ID, RolloutBatch
from rl_core.rollout.sampling import sample


def stop_ids(tokenizer: Any, *configs: Any) -> set[int]:
    """The token ids that end a response: those of the tokenizer and of every given config.

    Args:
        tokenizer: its `eos_token_id` counts, if it has one.
        *configs: the model's config and generation config (or None): their `eos_token_id`, one id or a list. Chat models name
            the end of a turn here and the end of a text there, or the other way round.
    """
    found: set[int] = set()
    for source in (tokenizer, *configs):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return found


class RolloutEngine:
    """Draws responses from its own copy of the policy.

    Attributes:
        model: the transformers module in eval mode, without gradients. Its weights are meaningless until `sync_weights`.
        config: the transformers config.
        device: where it computes.
        synced: whether it has been given weights.
    """

    def __init__(
        self, base_dir: Path, dtype: torch.dtype, device: torch.device | str, settings: PretrainedModel | None = None
    ) -> None:
        """Build the module described by `base_dir`/config.json, with room for its weights but without reading any.

        Args:
            settings: whether code of the model's own may run, and the attention; None: no such code, sdpa.

        Raises:
            ModelError: see `rl_core.models.auto`.
        """
        settings = settings or PretrainedModel(name_or_path=str(base_dir))
        trusted = settings.trust_remote_code
        self.device = torch.device(device)
        self.config = model_config(base_dir, trusted)
        with torch.device("meta"):
            model = model_of(self.config, dtype, attention=settings.attn_implementation, trusted=trusted)
        model.to_empty(device=self.device)
        restore_buffers(model)
        model.tie_weights()
        self.model: nn.Module = model.eval().requires_grad_(False)
        taken = signature(model.forward).parameters
        # transformers 5.24 renamed `past_key_values`; older releases and models with code of their own know only the old name.
        self._cache_argument = "cache" if "cache" in taken else "past_key_values"
        # Models with code of their own may give the logits of all positions only.
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        self.synced = False

    def generate(
        self,
        prompt_ids: list[list[int]],
        sample_index: list[int],
        *,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        step: int,
        stop_ids: set[int],
        batch_size: int,
    ) -> RolloutBatch:
        """Draw one response for each prompt.

        Args:
            prompt_ids: token ids of each prompt, at least one token each; the list may be empty.
            sample_index: number of each sample in its step over all ranks; decides its draws together with `seed` and `step`.
            max_new_tokens: longest response.
            temperature: divides the logits; 0 is greedy.
            seed, step: see `sampling.uniform`.
            stop_ids: a response ends with the first of these (it is part of the response).
            batch_size: prompts generated together. Prompts of similar length are put together.

        Returns:
            The rows in the order of `prompt_ids`, on the engine's device.

        Raises:
            ConfigError: the model has not so many positions.
            NonFiniteError: the policy's logits are not finite.
        """
        assert self.synced, "the engine has no weights yet: call sync_weights first"
        assert len(prompt_ids) == len(sample_index), "an index for each prompt"
        assert all(prompt_ids), "a prompt without tokens"
        if not prompt_ids:
            return RolloutBatch.from_lists([], [], [], [], [], self.device)
        self._check_length(max(map(len, prompt_ids)), max_new_tokens)
        order = sorted(range(len(prompt_ids)), key=lambda row: len(prompt_ids[row]))
        batches = []
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            prompts, indices = [prompt_ids[row] for row in rows], [sample_index[row] for row in rows]
            tokens, logprobs = self._decode(prompts, indices, max_new_tokens, temperature, seed, step, stop_ids)
            lengths = [_response_length(row, stop_ids) for row in tokens]
            batches.append(
                RolloutBatch.from_lists(
                    prompts,
                    [row[:length] for row, length in zip(tokens, lengths, strict=True)],
                    [row[:length] for row, length in zip(logprobs, lengths, strict=True)],
                    [row[length - 1] not in stop_ids for row, length in zip(tokens, lengths, strict=True)],
                    indices,
                    self.device,
                )
            )
        return RolloutBatch.cat(batches).select(torch.tensor(order).argsort())

    @torch.inference_mode()
    def _decode(
        self,
        prompts: list[list[int]],
        sample_index: list[int],
        max_new_tokens: int,
        temperature: float,
        seed: int,
        step: int,
        stop_ids: set[int],
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and log-probabilities of one group of prompts, until every row has ended; what follows a row's end is noise."""
        from transformers import DynamicCache

        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        width = max(map(len, prompts))
        ids = torch.tensor([[PAD_ID] * (width - len(prompt)) + prompt for prompt in prompts], device=self.device)
        places = torch.arange(width + max_new_tokens, device=self.device) - (width - lengths[:, None])
        attended, places = (places >= 0).long(), places.clamp(min=0)
        index = torch.tensor(sample_index, device=self.device)
        stops = torch.tensor(sorted(stop_ids), dtype=torch.long, device=self.device)
        cache = DynamicCache(config=self.config)
        ended = torch.zeros(len(prompts), dtype=torch.bool, device=self.device)
        tokens: list[Tensor] = []
        logprobs: list[Tensor] = []
        for position in range(max_new_tokens):
            seen = width + position
            logits = self.model(
                input_ids=ids,
                attention_mask=attended[:, :seen],
                position_ids=places[:, seen - ids.shape[1] : seen],
                use_cache=True,
                **{self._cache_argument: cache},
                **self._last_only,
            ).logits[:, -1]
            token, logprob = sample(
                logits,
                temperature,
                seed=seed,
                step=step,
                sample_index=index,
                position=torch.full_like(index, position),
            )
            tokens.append(token)
            logprobs.append(logprob)
            ended |= torch.isin(token, stops)
            if ended.all():
                break
            ids = token[:, None]
        return torch.stack(tokens, dim=1).tolist(), torch.stack(logprobs, dim=1).tolist()

    def _check_length(self, prompt: int, response: int) -> None:
        positions = getattr(self.config, "max_position_embeddings", None)
        if positions is not None and prompt + response > positions:
            raise ConfigError(
                f"rollout.max_new_tokens is {response} and the longest prompt of the batch has {prompt} tokens, together more "
                f"than the {positions} positions of the model (max_position_embeddings in its config.json): lower "
                "rollout.max_new_tokens or data.max_prompt_length."
            )


def _response_length(tokens: list[int], stop_ids: set[int]) -> int:
    """Number of tokens up to and with the first end token."""
    return next((place + 1 for place, token in enumerate(tokens) if token in stop_ids), len(tokens))
