"""What the tests of `plan` share: a model of two wide layers, which costs nothing on the meta device, and plans for it."""

import json
from pathlib import Path
from typing import Any

from rl_core.config import Config, parse_config
from rl_core.tools.plan_models import Model
from rl_core.tools.plan_roles import Situation

HIDDEN, INNER, VOCABULARY, LAYERS = 2048, 8192, 32000, 2
LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER + 2 * HIDDEN
ROOT = VOCABULARY * HIDDEN + HIDDEN
PARAMETERS = LAYERS * LAYER + ROOT
VALUE_HEAD = HIDDEN + 1
PROMPT = 64


def wide_model(directory: Path, layers: int = LAYERS) -> Path:
    """A Llama of 67 million parameters a layer with tied embeddings: config.json alone."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 16,
        "tie_word_embeddings": True, "max_position_embeddings": 4096,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def wide_config(directory: Path, **settings: Any) -> Config:
    """A run of it in bfloat16; keys with `__` for the dot."""
    values = {
        "model": {"name_or_path": str(directory), "torch_dtype": "bfloat16"},
        "data": {"source": {"kind": "files", "path": "none"}, "max_prompt_length": PROMPT},
        "reward": {"kind": "function", "path": "none.py"},
        "rollout": {"max_new_tokens": 64, "batch_size": 8},
        "trainer": {"max_steps": 1, "train_batch_size": 16, "ppo_mini_batch_size": 8, "per_device_train_batch_size": 4},
    }
    return parse_config(values, {key.replace("__", "."): value for key, value in settings.items()})


def situation(directory: Path, ranks: int = 1, **settings: Any) -> Situation:
    config = wide_config(directory, **settings).settled(ranks)
    return Situation(config=config, model=Model(directory), judge=None, ranks=ranks, per_node=ranks, prompt=PROMPT)
