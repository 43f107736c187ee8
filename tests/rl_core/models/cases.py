"""What the tests of models share: a configuration, tiny models of several families, ragged rows."""

from pathlib import Path
from typing import Any

from rl_core.config.schema import Config
from tests.tiny import tiny_model


def config(**sections: Any) -> Config:
    """A configuration that is valid and otherwise of no interest."""
    given = {
        "model": {"name_or_path": "unused"},
        "data": {"source": {"kind": "files", "path": "unused.jsonl"}},
        "reward": {"kind": "function", "path": "unused.py"},
        "registry": {"name": "unused"},
    }
    return Config.model_validate(given | sections)


def family(directory: Path, name: str) -> Path:
    """A tiny model of a family, written as `save_pretrained` does, with weights large enough to tell faults."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

    if name in ("llama-tied", "llama-untied"):
        return tiny_model(directory, tie=name == "llama-tied", initializer_range=0.3)
    sizes = {"vocab_size": 102, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.3}
    layers = sizes | {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    if name == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**layers, tie_word_embeddings=True))
    elif name == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(**sizes, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    else:
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(**layers, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"])
        )
    model.save_pretrained(directory)
    return directory


FAMILIES = ["llama-tied", "llama-untied", "qwen2", "gpt2", "gemma3"]


def ragged(seed: int = 0) -> tuple[Any, Any, Any, int]:
    """Four rows of different prompt and response lengths, one without any response, and the longest response's length."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    prompt, response = torch.tensor([3, 7, 1, 5]), torch.tensor([4, 2, 6, 0])
    ids = torch.randint(2, 102, (4, int((prompt + response).max())), generator=generator)
    return ids, prompt, response, 6
