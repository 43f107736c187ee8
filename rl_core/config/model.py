"""`model`: which base model the policy starts from."""

from typing import Literal

from rl_core.config.base import Runtime, Section


class ModelConfig(Section):
    """The base model: actor, critic and reference all start from it."""

    name_or_path: Runtime[str]
    """One of: a Hugging Face id (`Qwen/Qwen2-1.5B-Instruct`), a local directory of safetensors, a local `.gguf` file, an
    fsspec URL of either (`s3://bucket/dir`, `simplecache::zip://x.gguf::file://y.whl`), or `models:/name@alias` from
    MLflow. Only the content counts for the keys of the stages, not the name."""

    revision: Runtime[str | None] = None
    """Branch, tag or commit of a Hugging Face id. Without it the newest is taken, and its commit is recorded."""

    chat_template: Runtime[str | None] = None
    """A Jinja file that replaces the tokenizer's chat template. Its content enters the keys."""

    torch_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which forward and backward compute. Master weights, optimizer moments and saved checkpoints are float32.
    float16 is not offered: its small gradients vanish without loss scaling, which bfloat16 (same range as float32) needs not."""
