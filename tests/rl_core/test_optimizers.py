"""AdamW with moments in 8 bits: against AdamW itself, over a stop, and on one rank and two."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rl_core.checkpoint.dcp import load_tensors, save_tensors
from rl_core.config.roles import ActorConfig
from rl_core.models.tensors import model_tensors, optimizer_tensors
from rl_core.optimizers import AdamW8bit, compress, make_optimizer
from tests.ranks import run_ranks

SETTINGS: dict[str, Any] = {
    "learning_rate": 0.01, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6
}  # fmt: skip
WIDTHS = (300, 67, 9)
"""67 rows do not divide by two, 300 is no multiple of a block; 67 × 9 is small."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTHS[0], WIDTHS[1]), nn.Linear(WIDTHS[1], WIDTHS[2]))


def made(module: nn.Module, kind: str) -> torch.optim.Optimizer:
    return make_optimizer(module.parameters(), ActorConfig(optimizer=kind, **SETTINGS))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Each step has data of its own; gradients differ by four orders of magnitude within a row."""
    for step in steps:
        inputs = torch.randn(16, WIDTHS[0], generator=torch.Generator().manual_seed(step)) * torch.logspace(-4, 0, WIDTHS[0])
        optimizer.zero_grad()
        module(inputs).square().mean().backward()
        optimizer.step()


def whole(module: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {name: tensor.detach() for name, tensor in model_tensors(module).items()}
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for name, t in tensors.items()}


def test_it_goes_where_adamw_goes_in_a_third_of_the_memory() -> None:
    start = whole(network())
    one, other = network(), network()
    exact, coded = made(one, "adamw"), made(other, "adamw8bit")
    assert isinstance(coded, AdamW8bit)
    for module, optimizer in ((one, exact), (other, coded)):
        train(module, optimizer, range(1))
    # The first step is not coded yet: the formula alone.
    for name, tensor in whole(one).items():
        torch.testing.assert_close(whole(other)[name], tensor, rtol=0, atol=1e-6)
    for module, optimizer in ((one, exact), (other, coded)):
        train(module, optimizer, range(1, 30))
    reached = whole(other)
    for name, tensor in whole(one).items():
        way, apart = (tensor - start[name]).norm(), (tensor - reached[name]).norm()
        assert apart < 0.1 * way, (name, apart, way)
    held = [sum(t.nbytes for s in o.state.values() for k, t in s.items() if k != "step") for o in (exact, coded)]
    assert held[1] < held[0] / 3


def sharded(rank: int, directory: Path) -> dict[str, torch.Tensor]:
    """Five steps, of which the last two after a stop; the checkpoint of the first three stays in `directory`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def start() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
        module = network()
        for layer in module:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        return module, made(module, "adamw8bit"), {}

    def tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        return model_tensors(module) | {f"optimizer.{k}": v for k, v in optimizer_tensors(module, optimizer).items()}

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    module, optimizer, _ = start()
    train(module, optimizer, range(3))
    save_tensors(tensors(module, optimizer), directory)
    compress(optimizer)
    kept = dict(optimizer.state[module[0].weight])
    assert "exp_avg" not in kept
    optimizer_tensors(module, optimizer)
    compress(optimizer)
    # What was decoded is coded the same again.
    assert all(torch.equal(kept[key], value) for key, value in optimizer.state[module[0].weight].items())
    train(module, optimizer, range(3, 5))

    resumed, fresh, _ = start()
    load_tensors(tensors(resumed, fresh), directory)
    train(resumed, fresh, range(3, 5))
    uninterrupted, again = whole(module), whole(resumed)
    assert all(torch.equal(again[name], tensor) for name, tensor in uninterrupted.items())
    return again


def assert_rounded_alike(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Where a shard ends decides which elements a processor takes singly and which in vectors, which some round otherwise;
    and rounding decides, seldom, between two codes of 8 bits."""
    apart = (actual - expected).abs()
    assert (apart > 1e-6).float().mean() < 0.01, name
    assert apart.max() < 2e-4, name


def test_neither_a_stop_nor_the_number_of_ranks_changes_anything(tmp_path: Path) -> None:
    ranks = {world: run_ranks(sharded, world, tmp_path / str(world))[0] for world in (1, 2)}
    for name, tensor in ranks[1].items():
        assert_rounded_alike(ranks[2][name], tensor, name)

    # Two ranks' checkpoint read by one process without shards, and by AdamW itself.
    for kind in ("adamw8bit", "adamw"):
        module = network()
        optimizer = made(module, kind)
        load_tensors(
            model_tensors(module) | {f"optimizer.{k}": v for k, v in optimizer_tensors(module, optimizer).items()},
            tmp_path / "2",
        )
        train(module, optimizer, range(3, 5))
        for name, tensor in ranks[1].items():
            if kind == "adamw8bit":
                assert_rounded_alike(whole(module)[name], tensor, name)
            torch.testing.assert_close(whole(module)[name], tensor, rtol=0, atol=1e-3)


@pytest.mark.parametrize("chunk", [1, 2**10])
def test_a_part_at_a_time_gives_the_same(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    expected = network()
    train(expected, made(expected, "adamw8bit"), range(3))
    monkeypatch.setattr("rl_core.optimizers.CHUNK_ELEMENTS", chunk)
    module = network()
    train(module, made(module, "adamw8bit"), range(3))
    assert all(torch.equal(tensor, whole(module)[name]) for name, tensor in whole(expected).items())


def test_rows_without_gradient_stay() -> None:
    """As rows of an embedding that no token names: no weight moves, and nothing becomes NaN."""
    parameter = nn.Parameter(torch.ones(64, 256))
    optimizer = AdamW8bit([parameter], 0.1, (0.9, 0.999), 1e-8, 0.0)
    for _ in range(2):
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad[3] = 1e-12
        optimizer.step()
    assert (parameter[3] < 1).all()
    assert torch.equal(parameter[4:], torch.ones(60, 256))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures a GPU's memory")
def test_a_step_on_a_gpu_needs_no_memory_beside_parameters_gradients_and_moments() -> None:
    parameter = nn.Parameter(torch.zeros(2**22, device="cuda"))
    optimizer = make_optimizer([parameter], ActorConfig())
    for _ in range(2):  # the first makes the moments
        parameter.grad = torch.ones_like(parameter)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < parameter.nbytes / 8
