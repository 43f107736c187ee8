"""The values of a reward model: from its files, by whatever names they have there, or a random head."""

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from rl_core.checkpoint.dcp import load_safetensors
from rl_core.errors import ModelError
from rl_core.groups import Group
from rl_core.models.auto import loading
from rl_core.models.local import local
from rl_core.models.source import ModelSource
from rl_core.together import together

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD_SEED = 0
"""Of a random head: always the same one, so that the files of a causal model decide its scores."""


def load(tensors: dict[str, Tensor], source: ModelSource, model: "PreTrainedModel", kind: str, group: Group) -> None:
    """Fill tensors from a model's files, each rank its own shards. Collective over the group.

    Where the files have other names (experts one by one, an older transformers), the group's first rank reads all of them
    through transformers, which knows how to translate, and hands the shards out tensor by tensor.

    Args:
        tensors: destinations by their names in `model`.
        model: on the meta device; what it has beside `tensors` may be in the files too.
        kind: transformers' Auto class.

    Raises:
        ModelError: the files do not hold the model.
    """
    unused = set(model.state_dict()) - tensors.keys()
    stored = together(lambda: _names(source), group.process_group)
    if tensors.keys() <= stored <= tensors.keys() | unused:
        load_safetensors(tensors, source.directory, ignored=unused, process_group=group.process_group)
        return
    values = together(lambda: _through_transformers(tensors, source, kind) if group.rank == 0 else {}, group.process_group)
    for name, tensor in tensors.items():
        whole = values[name] if group.rank == 0 else torch.empty(tensor.shape)
        _copy(tensor, whole.to(tensor.dtype), group)


def fill_at_random(weight: Tensor) -> None:
    """N(0, 1 / (inputs + 1)) as in Stiennon et al. 2020 (arXiv:2009.01325), the same on any number of ranks."""
    values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(HEAD_SEED)) / math.sqrt(weight.shape[-1] + 1)
    _copy(weight, values.to(weight.dtype), None)


def _copy(tensor: Tensor, whole: Tensor, group: Group | None) -> None:
    """Each rank's part of `whole`, as the group's first rank has it (None: as every rank has it)."""
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            from_rank = None if group is None else 0
            part = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=from_rank)
            local(tensor).copy_(local(part))  # which is in host memory with offload_policy
            return
        if group is not None:
            whole = whole.to(group.mesh.device_type)
            dist.broadcast(whole, group.ranks[0], group=group.process_group)
        tensor.copy_(whole)


def _names(source: ModelSource) -> set[str]:
    names: set[str] = set()
    for path in source.weights:
        with safe_open(path, framework="pt") as file:
            names.update(file.keys())
    return names


def _through_transformers(tensors: dict[str, Tensor], source: ModelSource, kind: str) -> dict[str, Tensor]:
    """The whole model in host memory, in the type that config.json names."""
    import transformers

    with loading(source.directory, "the weights", source.trusted, source.section):
        loaded: Any = getattr(transformers, kind).from_pretrained(
            source.directory, dtype="auto", trust_remote_code=source.trusted, output_loading_info=True
        )
    model, report = loaded
    values = model.state_dict()
    problems = {what: sorted(map(str, report.get(f"{what}_keys", ()))) for what in ("missing", "unexpected", "mismatched")}
    problems["missing"] = sorted({*problems["missing"], *tensors.keys() - values.keys()} & tensors.keys())
    if any(problems.values()):
        said = "; ".join(f"{len(names)} {what}: {', '.join(names[:10])}" for what, names in problems.items() if names)
        raise ModelError(
            f"{source.section}.name_or_path: the weights in {source.directory} are not those of its config.json ({said})."
        )
    return values
