"""Never more than a few chunks of [tokens, vocabulary] at once, whatever the loss is made of."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from rl_core.models import policy

VOCABULARY, TOKENS, CHUNK = 512, 64, 4


class Widest(TorchDispatchMode):
    """Counts the elements of tensors as wide as the vocabulary that are alive at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        if isinstance(result, torch.Tensor) and result.shape == (CHUNK, VOCABULARY):
            storage = result.untyped_storage()
            if storage.data_ptr() not in self.alive:
                self.alive[storage.data_ptr()] = result.numel()
                weakref.finalize(storage, self.alive.pop, storage.data_ptr(), None)
            self.most = max(self.most, sum(self.alive.values()))
        return result


@pytest.mark.parametrize("charged", [False, True], ids=["entropy measured", "entropy in the loss"])
def test_logits_are_alive_a_few_chunks_at_a_time(monkeypatch: pytest.MonkeyPatch, charged: bool) -> None:
    monkeypatch.setattr(policy, "CHUNK_ELEMENTS", CHUNK * VOCABULARY)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = policy.PolicyModel(LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=True, **sizes)))
    ids = torch.randint(0, VOCABULARY, (1, TOKENS + 1))
    with Widest() as widest:
        logprobs, entropy = model(ids, torch.tensor([1]), torch.tensor([TOKENS]), TOKENS, 1.0, True, charged)
        (logprobs.sum() + (entropy.sum() if charged else 0.0)).backward()
    assert entropy.requires_grad == charged
    assert CHUNK * VOCABULARY <= widest.most <= 8 * CHUNK * VOCABULARY, "of 16 chunks, some intermediate results of one"
