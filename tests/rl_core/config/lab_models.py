"""Observations of models: where they come from, how they are built and spread, and how a learner updates weights."""

from typing import Any

from rl_core.config import Config
from rl_core.config.schema import Role
from tests.rl_core.config.lab import Observation, one_rank, place


def base_model(config: Config) -> Observation:
    """Which files are taken, by which class and attention, and what the tokenizer makes of a conversation."""
    from rl_core.models.build import empty_model
    from rl_core.models.source import load_tokenizer, resolve

    source = resolve(config.model)
    model = empty_model(source.directory, config.model)
    tokenizer = load_tokenizer(source, config.model.chat_template)
    return {
        "directory": source.directory.name,
        "class": type(model).__name__,
        "attention": model.config._attn_implementation,
        "text": tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False),
    }


def structure(config: Config, role: Role = "actor") -> Observation:
    """How a role's model is spread over ranks, held, gathered and computed."""
    import torch
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from rl_core.groups import make_groups
    from rl_core.models.offload import home_device

    with one_rank(config) as world:
        group = make_groups(config, config.roles(), "cpu")[role]
        module = build(config, role, group, world.device)
        units = [(name, unit) for name, unit in module.named_modules() if isinstance(unit, FSDPModule)]
        states = [unit._get_fsdp_state() for _, unit in units]
        result = score(module, role)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return {
            "attention": next(m.config._attn_implementation for m in module.modules() if hasattr(m, "config")),
            "units": [name for name, _ in units],
            "policies": [str(state._mp_policy) for state in states],
            "prefetch": [len(state._states_to_forward_prefetch) for state in states],
            "gathered": [name for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor)],
            "held": sorted({str(parameter.dtype) for parameter in module.parameters()}),
            "trained": len(trained),
            "buffers": sorted({str(buffer.dtype) for buffer in module.buffers()}),
            "layers": sorted({type(inner).__name__ for inner in module.modules()}),
            "home": str(home_device(config.fsdp_of(role), torch.device("cuda"))),
            "leaves": leaves_the_gpu(module, trained, config, role),
            "adapters": {name: list(p.shape) for name, p in module.named_parameters() if "lora_" in name},
            "scaling": sorted({layer.scaling["default"] for layer in module.modules() if hasattr(layer, "lora_A")}),
            "result": result,
        }


def build(config: Config, role: Role, group: Any, device: Any) -> Any:
    """A role's model as a training builds it."""
    from rl_core.models.build import build_critic, build_policy
    from rl_core.models.reward_model import build_reward_model
    from rl_core.models.source import load_tokenizer_dir

    base = place() / "deep"
    if role == "critic":
        return build_critic(base, config, group, device)
    if role == "reward":
        return build_reward_model(config, group, device, load_tokenizer_dir(base))
    return build_policy(base, config, role, group, device, trainable=role == "actor")


def score(module: Any, role: Role) -> list[float]:
    """What the model says to a prompt and its response."""
    import torch

    with torch.no_grad():
        if role == "reward":
            return module(*module.encode([[5, 6, 7]], [[8, 9]])).flatten().tolist()
        ids, lengths = torch.tensor([[5, 6, 7, 8, 9]]), (torch.tensor([3]), torch.tensor([2]))
        if role == "critic":
            module.value_head.weight.fill_(0.1)
            return module(ids, *lengths, 2).flatten().tolist()
        return module(ids, *lengths, 2, 1.0, entropy=False)[0].flatten().tolist()


def leaves_the_gpu(module: Any, trained: list[Any], config: Config, role: Role) -> bool:
    """Whether anything would be brought from the GPU to host memory. There is no GPU here, so that is an error."""
    import torch

    from rl_core.models.offload import Offload

    optimizer = torch.optim.AdamW(trained) if trained else None
    try:
        Offload(module, optimizer, config.fsdp_of(role), torch.device("cuda"))
    except (AssertionError, RuntimeError):
        return True
    return False


def layout(config: Config, role: Role = "actor") -> Observation:
    """Which of four ranks hold a role, and how many replicas of how many shards they make."""
    from rl_core import groups

    ranks = groups.ranks_of(config, role, 4)
    return {"ranks": ranks, "replicas and shards": groups._layout(role, len(ranks), config.fsdp_of(role))}


def learning(config: Config, role: Role = "actor") -> Observation:
    """Weights and learning rates of a small layer over five updates with given gradients, small ones and large ones."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from rl_core.groups import make_groups
    from rl_core.learner import Learner
    from rl_core.models.local import local

    with one_rank(config) as world:
        group = make_groups(config, ["actor", "critic"], "cpu")[role]
        module = nn.Linear(64, 64, bias=False)
        module.weight.data.copy_(torch.linspace(-1, 1, 64 * 64).view(64, 64))
        fully_shard(module, mesh=group.mesh)
        learner = Learner(role, module, group, config, world.device, 5)
        said = []
        for step in range(5):
            given = torch.linspace(0.1, 1.0, 64).roll(step) * (10.0 if step == 1 else 0.1)
            learner.backward(module(given[None]).sum(), last=True)
            said.append(learner.step(step))
        return {"weights": local(module.weight).flatten().tolist()[::97], "said": said, "kind": type(learner.optimizer).__name__}
