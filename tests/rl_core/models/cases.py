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
    import transformers

    if name in ("llama-tied", "llama-untied"):
        return tiny_model(directory, tie=name == "llama-tied", initializer_range=0.3)
    kind, settings = _CLASSES[name]
    config = getattr(transformers, f"{kind}Config")(**_SIZES | settings)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


_SIZES = {
    "vocab_size": 102, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.3,
    "tie_word_embeddings": False,
}  # fmt: skip
_LAYERS = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
_CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("Llama", _LAYERS | {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }}),
    "qwen2": ("Qwen2", _LAYERS | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", _LAYERS | {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": ("Mistral", _LAYERS | {"sliding_window": 4}),
    "gemma3": ("Gemma3Text", _LAYERS | {
        "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True,
    }),
    "deepseek-v2": ("DeepseekV2", _LAYERS | {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
        "topk_method": "group_limited_greedy", "moe_intermediate_size": 16, "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    }),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "tie_word_embeddings": True}),
}  # fmt: skip
FAMILIES = ["llama-tied", "llama-untied", *_CLASSES]


def ragged(seed: int = 0) -> tuple[Any, Any, Any, int]:
    """Four rows of different prompt and response lengths, one without any response, and the longest response's length."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    prompt, response = torch.tensor([3, 7, 1, 5]), torch.tensor([4, 2, 6, 0])
    ids = torch.randint(2, 102, (4, int((prompt + response).max())), generator=generator)
    return ids, prompt, response, 6
