"""`model`: which base model the policy starts from."""

from typing import Literal

from rl_core.config.base import Runtime, Section
from rl_core.config.dtypes import Dtype


class PretrainedModel(Section):
    """A model on disk, at a URL or on the hub, and how it computes."""

    name_or_path: Runtime[str]
    """One of: a Hugging Face id (`Qwen/Qwen2-1.5B-Instruct`), a local directory of safetensors, a local `.gguf` file, an
    fsspec URL of either (`s3://bucket/dir`, `simplecache::zip://x.gguf::file://y.whl`), or `models:/name@alias` from
    MLflow. Only the content counts for the keys of the stages, not the name."""

    revision: Runtime[str | None] = None
    """Branch, tag or commit of a Hugging Face id. Without it the newest is taken, and its commit is recorded."""

    trust_remote_code: bool = False
    """Run the Python code that the model brings along (`auto_map` in its config.json): for its configuration, its model class
    and its tokenizer alike. Without it transformers' own class is used; a model that it has none for is refused."""

    attn_implementation: Runtime[Literal["sdpa", "eager", "flash_attention_2"]] = "sdpa"
    """Attention kernels. `flash_attention_2` needs the package flash-attn; where that is missing, sdpa is used and said so."""


class ModelConfig(PretrainedModel):
    """The base model: actor, critic and reference all start from it."""

    chat_template: Runtime[str | None] = None
    """A Jinja file that replaces the tokenizer's chat template. Its content enters the keys."""

    torch_dtype: Dtype = "float32"
    """Type in which forward and backward compute, unless a role has a `torch_dtype` of its own. Master weights and optimizer
    moments are in `fsdp.master_dtype`. float16 is trained with dynamic loss scaling. A GPU without bfloat16 computes in float16
    instead, and that is said."""
