"""The models of a run as `plan` sees them: what is held and what is used, in bytes, by the real modules on the meta device."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from rl_core.config.fsdp import FsdpConfig
from rl_core.config.roles import LoraConfig
from rl_core.models import lora
from rl_core.models.auto import model_config, model_of
from rl_core.models.offload import SMALLEST, layer_runner
from rl_core.models.policy import PolicyModel
from rl_core.models.sharding import _units, _wrap_layers, unit_classes
from rl_core.models.value import ValueModel
from rl_core.tools.plan_trace import META, LiveBytes, collect_gradients, use_fused_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Model:
    """Where a model's config.json is, and how it is built."""

    directory: Path
    gguf: str | None = None
    trusted: bool = False
    attention: str = "sdpa"
    kind: str = "AutoModelForCausalLM"
    section: str = "model"

    def empty(self, dtype: torch.dtype) -> "PreTrainedModel":
        """On the meta device. Raises ModelError as `rl_core.models.auto`."""
        config = model_config(self.directory, self.trusted, gguf=self.gguf, section=self.section)
        with torch.device("meta"):
            causal = model_of(config, dtype, attention=self.attention, trusted=self.trusted, kind=self.kind, section=self.section)
        use_fused_attention(causal)
        return causal.eval()


@dataclass(frozen=True)
class Part:
    """A role's model, as far as memory goes."""

    model: Model
    valued: bool
    """With a value head instead of the language model's (critic, reward model)."""
    trained: bool
    lora: str | None
    """The section of its adapters as JSON."""
    fsdp: str
    """Of its `FsdpConfig`, as JSON, what changes the module or how it runs: the same traces serve as many settings as can be."""
    dtype: torch.dtype
    """In which it computes."""

    @property
    def settings(self) -> FsdpConfig:
        """Its `fsdp` section."""
        return FsdpConfig.model_validate_json(self.fsdp)

    @property
    def keeping(self) -> "Part":
        """The same without what only changes what is kept for the backward: for questions that do not depend on it."""
        plain = self.settings.model_copy(update={"activation_checkpointing": False, "activation_cpu_offload": False})
        return replace(self, fsdp=plain.model_dump_json())

    @property
    def frozen(self) -> "Part":
        """The same for forwards without gradients."""
        return replace(self.keeping, trained=False)


@dataclass(frozen=True)
class Sizes:
    """Elements of a model's parameters."""

    all: int
    trained: int
    unit: int
    """Of the largest FSDP unit but the root."""
    unit_trained: int
    root: int
    """Of no other unit: the embedding, the head."""
    largest: int
    """Of the largest tensor."""
    adapted: int
    """Of the largest tensor that has an adapter; 0: none."""
    embedding: int
    """Of the output head's weight."""


@dataclass(frozen=True)
class Trace:
    """Bytes beside parameters and gradients in one forward and backward."""

    kept: int
    """Between them."""
    forward: int
    """Most during the forward."""
    after: int
    """What its results still hold when the backward is over, as long as somebody holds them."""
    most: tuple[tuple[int, int], ...]
    """(elements of complete gradients, most bytes while so many were complete), in this order."""


@cache
def sizes(part: Part) -> Sizes:
    """Of a part that is `keeping`. Raises ConfigError as `sharding.unit_classes` and `lora.add_adapters`."""
    module, causal = _built(part)
    settings = part.settings
    units = _units(module, unit_classes(causal, settings.wrap_policy), settings.wrap_policy)
    taken: set[nn.Parameter] = set()
    own: list[list[nn.Parameter]] = []
    for unit in units:  # inner ones first
        own.append([parameter for parameter in unit.parameters() if parameter not in taken])
        taken.update(unit.parameters())
    parameters = list(module.parameters())
    total = _elements(parameters)
    return Sizes(
        all=total,
        trained=_elements(parameter for parameter in parameters if parameter.requires_grad),
        unit=max(map(_elements, own), default=0),
        unit_trained=max((_elements(each for each in unit if each.requires_grad) for unit in own), default=0),
        root=total - _elements(taken),
        largest=max(parameter.numel() for parameter in parameters),
        adapted=max((layer.base_layer.weight.numel() for layer in lora.adapted_layers(causal).values()), default=0),
        embedding=causal.get_output_embeddings().weight.numel() if not part.valued else 0,
    )


@cache
def update_trace(part: Part, rows: int, prompt: int, response: int, entropy: bool = False) -> Trace:
    """Forward and backward of a micro-batch of `rows` responses, all of the greatest length; `entropy`: the loss has it."""
    module, causal = _built(part)
    settings = part.settings
    if layer_runner(settings) is not None:
        wrapped = _wrap_layers(module, unit_classes(causal, settings.wrap_policy), settings)
        for layer in wrapped.values() if settings.activation_cpu_offload else ():
            layer.checkpoint_fn = partial(_without_kept, settings.activation_checkpointing)  # type: ignore[assignment]
    counter = LiveBytes(ignored=[*module.parameters(), *module.buffers()])
    remove = collect_gradients(module, counter)
    with counter:
        results = _run(module, part, rows, prompt, response, True, entropy)
        kept, forward = counter.live, counter.peak
        (results[0].sum() + results[1].sum() if entropy else results[0].sum()).backward()
        after = counter.live
    remove()
    return Trace(kept, forward, after, tuple(sorted(counter.most.items())))


@cache
def scoring_peak(part: Part, rows: int, prompt: int, response: int) -> int:
    """Most bytes of a forward of a part that is `frozen`."""
    module, _ = _built(part)
    with LiveBytes(ignored=[*module.parameters(), *module.buffers()]) as counter, torch.no_grad():
        _run(module, part, rows, prompt, response, False)
    return counter.peak


def _built(part: Part) -> tuple[nn.Module, "PreTrainedModel"]:
    """A role's module on the meta device in the type that it computes in, with adapters and frozen as `models.build` does it."""
    causal = part.model.empty(part.dtype)
    if part.lora is not None:
        lora.add_adapters(causal, LoraConfig.model_validate_json(part.lora))
    module: nn.Module = ValueModel(causal.base_model) if part.valued else PolicyModel(causal)  # type: ignore[arg-type]
    for name, parameter in module.named_parameters():
        if lora.is_adapter(name):  # gathered in the type of the unit
            parameter.data = parameter.data.to(part.dtype)
        head = name.startswith("value_head.")
        parameter.requires_grad_(part.trained and (part.lora is None or lora.is_adapter(name) or head))
    return module.eval(), causal


def _run(module: nn.Module, part: Part, rows: int, prompt: int, response: int, *entropy: bool) -> tuple[Any, ...]:
    ids = torch.empty(rows, prompt + response, dtype=torch.long, device=META)
    lengths = torch.empty(rows, dtype=torch.long, device=META)
    if part.valued:
        return (module(ids, lengths, lengths, response),)
    return module(ids, lengths, lengths, response, 1.0, *entropy)


def _without_kept(recomputed: bool, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`offload._run_offloaded` with nothing in place of the host's memory."""
    weights = {parameter.untyped_storage()._cdata for parameter in layer.parameters()}

    def pack(tensor: Tensor) -> Any:
        small = tensor.nbytes < SMALLEST or tensor.untyped_storage()._cdata in weights
        return tensor if small else (tensor.shape, tensor.stride(), tensor.dtype)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        shape, stride, dtype = packed
        return torch.empty_strided(shape, stride, dtype=dtype, device=META)

    with saved_tensors_hooks(pack, unpack):
        if recomputed:
            return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        return layer(*args, **kwargs)


def _elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
