"""`fsdp`: how a model is spread over its ranks. Each role may override single keys (`critic.fsdp.param_offload: true`)."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_serializer

from rl_core.config.base import Runtime, Section
from rl_core.config.dtypes import Dtype, MasterDtype


def _names(value: object) -> object:
    """accelerate writes several classes with commas."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


class WrapPolicyConfig(Section):
    """Which modules become FSDP units: gathered, computed and freed one at a time."""

    auto_wrap: Runtime[Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]] = "TRANSFORMER_BASED_WRAP"
    """By class, by size alone, or the whole model as one unit."""

    transformer_layer_cls_to_wrap: Annotated[Runtime[list[str] | None], BeforeValidator(_names)] = None
    """Classes of which each instance becomes a unit (a list, or one text with commas). null: the model's own
    `_no_split_modules`."""

    min_num_params: Runtime[NonNegativeInt] = 0
    """With a value above 0 each other module with at least so many parameters (units inside it not counted) becomes a unit too.
    SIZE_BASED_WRAP takes 100,000,000 where this is 0."""


class MixedPrecisionConfig(Section):
    """Types in which a model computes and communicates (FSDP2's `MixedPrecisionPolicy`)."""

    param_dtype: Dtype | None = None
    """Of forward and backward. null: the role's `torch_dtype`."""

    reduce_dtype: Dtype = "float32"
    """In which gradients are summed over ranks. bfloat16 loses small contributions."""

    buffer_dtype: Dtype = "float32"
    """Of buffers such as rotary frequencies."""

    cast_forward_inputs: bool = True
    """Cast a unit's floating-point inputs to `param_dtype`."""


class FsdpConfig(Section):
    """Sharding of parameters, gradients and optimizer states over ranks (FSDP2 `fully_shard`)."""

    strategy: Runtime[Literal["single", "ddp", "fsdp", "hsdp"]] = "fsdp"
    """`single`: one rank. `ddp`: each rank holds all, gradients are summed. `fsdp`: each rank holds its share. `hsdp`: shares
    within groups of `hsdp_group_size` ranks, groups are replicas. The losses are the same."""

    hsdp_group_size: Runtime[PositiveInt | None] = None
    """Ranks that share one replica under `hsdp`; must divide the number of ranks. null: the ranks of one host."""

    fsdp_state_dict_type: Runtime[Literal["SHARDED_STATE_DICT"]] = "SHARDED_STATE_DICT"
    """Checkpoints are always sharded: each rank writes its own part. Any number of ranks reads them."""

    wrap_policy: Runtime[WrapPolicyConfig] = WrapPolicyConfig()
    """What becomes a unit."""

    mixed_precision: MixedPrecisionConfig = MixedPrecisionConfig()
    """Types."""

    master_dtype: MasterDtype = "float32"
    """Type of the weights that the optimizer updates, of its moments, and of checkpoints. bfloat16 halves the memory; small
    updates are lost in it. (float16 would overflow.) Frozen models are held in the type that they compute in."""

    reshard_after_forward: Runtime[bool] = True
    """Free a unit's gathered parameters after its forward and gather them again for the backward: less memory, more
    communication."""

    forward_prefetch: Runtime[NonNegativeInt] = 0
    """So many units ahead are gathered while one computes, beside FSDP2's own overlap."""

    param_offload: Runtime[bool] = False
    """Keep the parameters in host memory while the role is idle; they come to the GPU for each phase that uses them."""

    optimizer_offload: Runtime[bool] = False
    """Keep the optimizer's moments in host memory except during the update."""

    offload_policy: Runtime[bool] = False
    """Keep parameters, gradients and moments in host memory always, units come to the GPU one at a time and the optimizer runs
    on the CPU (FSDP2's `CPUOffloadPolicy`). Implies `param_offload` and `optimizer_offload`."""

    activation_checkpointing: Runtime[bool] = False
    """Recompute each layer's activations in the backward instead of keeping them."""

    activation_cpu_offload: Runtime[bool] = False
    """Keep activations in host memory between forward and backward."""

    ulysses_sequence_parallel_size: Annotated[Runtime[int], Field(ge=1)] = 1
    """So many ranks share each sequence (DeepSpeed-Ulysses, arXiv:2309.14509); must divide the role's ranks and the model's
    attention heads."""


class FsdpOverrides(FsdpConfig):
    """What a role sets differently from `fsdp`: only the keys that are given count."""

    def over(self, base: FsdpConfig) -> FsdpConfig:
        """`base` with the given keys replaced, nested ones one by one."""
        return FsdpConfig.model_validate(_merged(base.model_dump(), _given(self)))

    def identity(self) -> dict[str, Any]:
        """Nothing by itself: what counts is the role's `fsdp` as a whole (`Config.training_identity`)."""
        return {}

    @model_serializer(mode="plain")
    def _only_given(self) -> dict[str, Any]:
        return _given(self)


def _given(section: Section) -> dict[str, Any]:
    values = {name: getattr(section, name) for name in type(section).model_fields if name in section.model_fields_set}
    return {name: _given(value) if isinstance(value, Section) else value for name, value in values.items()}


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    nested = {name: _merged(base[name], value) for name, value in changes.items() if isinstance(value, dict)}
    return base | changes | nested
