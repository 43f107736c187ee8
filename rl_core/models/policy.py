"""The policy: a causal language model that gives log-probabilities of responses, never whole logits.

[tokens, vocabulary] in float32 exists for one chunk of response tokens at a time, in the backward too (each chunk is
recomputed there). Rows are padded on the right: with causal attention no real token sees a pad, so no mask is needed and
a row's result does not depend on its padding.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rl_core.models.ulysses import last_hidden_states, sum_over_ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl_core.groups import Group

CHUNK_ELEMENTS = 2**26
"""Logits of one chunk: 256 MiB in float32."""


def response_positions(
    prompt_length: Tensor, response_length: Tensor, width: int, here: range | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the states stand in which response tokens were chosen.

    Args:
        prompt_length: [B], at least 1.
        response_length: [B], 0 to `width`.
        here: only states at these positions count; None: all.

    Returns:
        rows [N], columns [N] (index in the response) and positions [N] (of the token *before* the response token, in the
        sequence) of all N response tokens, row by row.
    """
    columns = torch.arange(width, device=response_length.device)
    wanted = columns < response_length[:, None]
    if here is not None:
        positions = prompt_length[:, None] + columns - 1
        wanted &= (positions >= here.start) & (positions < here.stop)
    rows, columns = wanted.nonzero(as_tuple=True)
    return rows, columns, prompt_length[rows] + columns - 1


class PolicyModel(nn.Module):
    """Wraps a transformers causal language model (`.model`)."""

    def __init__(self, model: "PreTrainedModel", group: "Group | None" = None) -> None:
        """With a sequence group in `group`, `model` must have been prepared by `ulysses.enable`; each forward is then a
        collective over that group with equal arguments, and gives all of it the same result."""
        super().__init__()
        self.model = model
        self._sequence_group = None if group is None else group.sequence_group
        settings = model.config.get_text_config()
        # The scalings that transformers' heads apply to logits: Gemma's cap, Cohere's factor, Granite's divisor.
        self.cap: float | None = getattr(settings, "final_logit_softcapping", None)
        self.scale: float = (getattr(settings, "logit_scale", None) or 1.0) / (getattr(settings, "logits_scaling", None) or 1.0)

    def forward(
        self,
        input_ids: Tensor,
        prompt_length: Tensor,
        response_length: Tensor,
        width: int,
        temperature: float,
        entropy: bool,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Score the responses.

        Args:
            input_ids: [B, T] prompt and response of each row, padded on the right with any valid id.
            prompt_length: [B], at least 1.
            response_length: [B], 0 to `width`; prompt and response fit into T.
            width: R, columns of the result; the same on all ranks is not required.
            temperature: logits are divided by it.
            entropy: whether to compute the entropy too.
            entropy_gradient: whether gradients flow through the entropy. Only where the loss has it: else the backward would
                recompute what it needs and keep that, [tokens, vocabulary], to its end.

        Returns:
            Log-probabilities of the response tokens [B, R] float32 in nats, and the entropy of the distributions that they
            were drawn from [B, R] (None unless asked for); zero beyond a row's length.
        """
        hidden, here = last_hidden_states(self.model.base_model, input_ids, self._sequence_group)
        rows, columns, positions = response_positions(prompt_length, response_length, width, here)
        states, targets = hidden[rows, positions - here.start if here else positions], input_ids[rows, positions + 1]
        head = self.model.get_output_embeddings()
        size = max(1, CHUNK_ELEMENTS // self.model.config.get_text_config().vocab_size)
        scores = [
            checkpoint(
                self._score, head, *chunk, temperature, entropy, entropy_gradient, use_reentrant=False, preserve_rng_state=False
            )
            for chunk in zip(states.split(size), targets.split(size), strict=True)
        ]
        blank = torch.zeros(len(input_ids), width, device=input_ids.device)
        # index_put keeps the graph even without any response token: every rank has a backward.
        logprobs = blank.index_put((rows, columns), torch.cat([logprob for logprob, _ in scores]))
        logprobs = sum_over_ranks(logprobs, self._sequence_group)
        if not entropy:
            return logprobs, None
        entropies = blank.index_put((rows, columns), torch.cat([value for _, value in scores]))
        return logprobs, sum_over_ranks(entropies, self._sequence_group)

    def _score(
        self, head: nn.Module, states: Tensor, targets: Tensor, temperature: float, entropy: bool, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        logits = head(states).float() * (self.scale / temperature if self.cap is None else self.scale)
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * (self.cap / temperature)
        logprobs = functional.log_softmax(logits, dim=-1)
        chosen = logprobs.gather(-1, targets[:, None]).squeeze(-1)
        if not entropy:
            return chosen, chosen.detach()
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            return chosen, -(logprobs.exp() * logprobs).sum(-1)
