"""The plain loop: prefill of a padded batch, then one token at a time with transformers' growing cache, until all have ended.

For the models that `rl_core.rollout.cache` does not serve, and what the fast path is compared with.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from rl_core.rollout.batch import PAD_ID, RolloutBatch
from rl_core.rollout.requests import Requests
from rl_core.rollout.sampling import sample


def generate_plainly(model: Any, requests: Requests, batch_size: int) -> RolloutBatch:
    """Draw one response for each request, `batch_size` of them at a time, those with prompts of similar length together.

    Returns:
        The rows in the order of the requests, on the model's device.

    Raises:
        NonFiniteError: a logit is infinite or NaN.
    """
    order = sorted(range(len(requests)), key=lambda row: len(requests.prompts[row]))
    batches = []
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        tokens, logprobs = _decode(model, requests, rows)
        ends = [requests.ends(row, made) for row, made in zip(rows, tokens, strict=True)]
        batches.append(
            RolloutBatch.from_lists(
                [requests.prompts[row] for row in rows],
                [made[:length] for made, (length, _) in zip(tokens, ends, strict=True)],
                [made[:length] for made, (length, _) in zip(logprobs, ends, strict=True)],
                [truncated for _, truncated in ends],
                [requests.numbers[row] for row in rows],
                model.device,
            )
        )
    return RolloutBatch.cat(batches).select(torch.tensor(order).argsort())


@torch.inference_mode()
def _decode(model: Any, requests: Requests, rows: list[int]) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens and log-probabilities of one group, until every row has ended; what follows a row's end is noise."""
    from transformers import DynamicCache

    device, prompts = model.device, [requests.prompts[row] for row in rows]
    taken = signature(model.forward).parameters
    # transformers 5.24 renamed `past_key_values`; older releases and models with code of their own know only the old name.
    cache = {"cache" if "cache" in taken else "past_key_values": DynamicCache(config=model.config)}
    # Models with code of their own may give the logits of all positions only.
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    width, most = max(map(len, prompts)), max(requests.limits[row] for row in rows)
    ids = torch.tensor([[PAD_ID] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    places = torch.arange(width + most, device=device) - (width - lengths[:, None])
    attended, places = (places >= 0).long(), places.clamp(min=0)
    index = torch.tensor([requests.numbers[row] for row in rows], device=device)
    limits = torch.tensor([requests.limits[row] for row in rows], device=device)
    stops = requests.stops_of(rows).to(device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    tokens: list[Tensor] = []
    logprobs: list[Tensor] = []
    for position in range(most):
        seen = width + position
        logits = model(
            input_ids=ids,
            attention_mask=attended[:, :seen],
            position_ids=places[:, seen - ids.shape[1] : seen],
            use_cache=True,
            **cache,
            **last_only,
        ).logits[:, -1]
        token, logprob = sample(
            logits,
            requests.temperature,
            seed=requests.seed,
            step=requests.step,
            sample_index=index,
            position=torch.full_like(index, position),
            top_k=requests.top_k,
            top_p=requests.top_p,
        )
        tokens.append(token)
        logprobs.append(logprob)
        ended |= (token[:, None] == stops).any(1) | (limits == position + 1)
        if ended.all():
            break
        ids = token[:, None]
    return torch.stack(tokens, dim=1).tolist(), torch.stack(logprobs, dim=1).tolist()
