"""Generation of responses from the policy that is trained, in its own process: no inference server.

The engine owns a full copy of the model on its device, in the type it computes in; `sync_weights` fills it. It draws its
tokens itself (see `sampling`) and so does not use `generate`, whose draws depend on the composition of a batch. Models whose
attention `cache` serves are generated from in slots (`decode`), the others plainly (`plain`).
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rl_core.config.model import PretrainedModel
from rl_core.errors import ConfigError, PpoflowError
from rl_core.models.auto import model_config, model_of
from rl_core.models.buffers import restore_buffers
from rl_core.rollout.batch import RolloutBatch
from rl_core.rollout.cache import Layout, Unsupported, layout_of
from rl_core.rollout.decode import SlotDecoder
from rl_core.rollout.fuse import fuse_projections
from rl_core.rollout.graphs import GraphRunner
from rl_core.rollout.plain import generate_plainly
from rl_core.rollout.requests import Requests
from rl_core.rollout.runner import Runner

log = logging.getLogger(__name__)


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
        self.model: Any = model.eval().requires_grad_(False)
        if self.device.type == "cuda":
            fuse_projections(self.model)
        self.synced = False
        self._decoder: SlotDecoder | None = None
        self._window: int | None = None
        self._plain_because = ""
        self._proven = False
        self.last_seconds: dict[str, float] = {}
        """Of the last `generate` in slots: `prefill_s` and `decode_s`."""

    def generate(
        self,
        prompt_ids: list[list[int]],
        sample_index: list[int],
        *,
        max_new_tokens: int | Sequence[int],
        temperature: float,
        seed: int,
        step: int,
        stop_ids: set[int] | Sequence[set[int]],
        batch_size: int,
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> RolloutBatch:
        """Draw one response for each prompt.

        Args:
            prompt_ids: token ids of each prompt, at least one token each; the list may be empty.
            sample_index: number of each sample in its step over all ranks; decides its draws together with `seed` and `step`.
            max_new_tokens: longest response, of all or of each.
            temperature: divides the logits; 0 is greedy.
            seed, step: see `sampling.uniform`.
            stop_ids: a response ends with the first of these (it is part of the response); for all or for each.
            batch_size: responses generated at a time; the next one begins when one has ended.
            top_k, top_p: see `sampling.allowed`; 0 and 1 allow all tokens.

        Returns:
            The rows in the order of `prompt_ids`, on the engine's device. Their log-probabilities are those among all tokens.

        Raises:
            ConfigError: the model has not so many positions.
            NonFiniteError: the policy's logits are not finite.
        """
        assert self.synced, "the engine has no weights yet: call sync_weights first"
        assert len(prompt_ids) == len(sample_index), "an index for each prompt"
        assert all(prompt_ids), "a prompt without tokens"
        if not prompt_ids:
            return RolloutBatch.from_lists([], [], [], [], [], self.device)
        count = len(prompt_ids)
        limits = [max_new_tokens] * count if isinstance(max_new_tokens, int) else list(max_new_tokens)
        stops = [stop_ids] * count if isinstance(stop_ids, set) else list(stop_ids)
        self._check_length(prompt_ids, limits)
        requests = Requests(
            prompts=prompt_ids,
            numbers=sample_index,
            limits=limits,
            stops=[frozenset(ids) for ids in stops],
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            step=step,
        )
        decoder = self._decoder_for(max(map(len, prompt_ids)) + max(limits))
        if decoder is None:
            return generate_plainly(self.model, requests, batch_size)
        before = self.startup_seconds
        try:
            made = decoder.generate(requests, batch_size)
        except (PpoflowError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self._proven:
                raise
            self._decoder = None
            self._go_plainly(
                f"the fast path failed at its first use ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
            )
            return generate_plainly(self.model, requests, batch_size)
        self._proven = True
        self.last_seconds = decoder.seconds
        if self.startup_seconds - before > 1:
            log.info("rollout: %.1f s for compiling and capturing, once a run.", self.startup_seconds - before)
        return made

    @property
    def startup_seconds(self) -> float:
        """Spent so far on compiling and capturing."""
        return 0.0 if self._decoder is None else self._decoder.runner.seconds

    def release(self) -> None:
        """Give back all memory but that of the weights; the next `generate` takes it again."""
        if self._decoder is not None:
            self._decoder.release()

    def _decoder_for(self, length: int) -> SlotDecoder | None:
        """The fast path, if it serves this model and rows of that many tokens; the first time, it is looked for."""
        if self._decoder is None and not self._plain_because:
            try:
                layout = layout_of(self.model)
                self._decoder, self._window = SlotDecoder(self.model, layout, self._runner(layout)), layout.window
            except Unsupported as reason:
                self._go_plainly(str(reason))
        if self._decoder is not None and self._window is not None and length > self._window:
            return None
        return self._decoder

    def _go_plainly(self, because: str) -> None:
        self._plain_because = because
        log.warning(
            "rollout: responses of %s are generated by the plain loop, several times slower: %s.",
            type(self.model).__name__,
            because,
        )

    def _runner(self, layout: Layout) -> Runner:
        if self.device.type != "cuda":
            return Runner()
        [(_, width)] = layout.shapes
        return GraphRunner(self.model, width)

    def _check_length(self, prompts: list[list[int]], limits: list[int]) -> None:
        positions = getattr(self.config, "max_position_embeddings", None)
        if positions is None:
            return
        for prompt, response in sorted({(len(prompt), limit) for prompt, limit in zip(prompts, limits, strict=True)}, key=sum)[
            -1:
        ]:
            if prompt + response > positions:
                raise ConfigError(
                    f"rollout.max_new_tokens is {response} and the longest prompt of the batch has {prompt} tokens, together "
                    f"more than the {positions} positions of the model (max_position_embeddings in its config.json): lower "
                    "rollout.max_new_tokens or data.max_prompt_length."
                )
