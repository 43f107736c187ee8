"""What is in host memory when: on a GPU measured in bytes, on a CPU that nothing changes and that objects stay what they are."""

import copy
import functools
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rl_core.config.fsdp import FsdpConfig
from rl_core.models.local import local
from rl_core.models.offload import Offload, _move_moments, _move_parameters, home_device
from rl_core.models.policy import PolicyModel
from rl_core.models.sharding import settle_buffers, shard, unit_classes
from tests.ranks import run_ranks

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="measures a GPU's memory")
OFFLOADS = [
    {"param_offload": True},
    {"optimizer_offload": True},
    {"param_offload": True, "optimizer_offload": True},
    {"offload_policy": True},
    {"activation_cpu_offload": True},
    {"activation_cpu_offload": True, "activation_checkpointing": True},
    {"offload_policy": True, "activation_cpu_offload": True, "reshard_after_forward": False},
]
ROWS, PROMPT, RESPONSE = 4, 16, 112


@functools.cache
def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)).eval()


class Trained:
    """A sharded policy on one rank, its AdamW and its offload."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, **settings: Any) -> None:
        self.settings, self.device = FsdpConfig(**settings), device
        self.policy: Any = PolicyModel(copy.deepcopy(_llama()))
        self.wrap(mesh)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-3, eps=0.1)
        self.offload = Offload(self.policy, self.optimizer, self.settings, device)

    def wrap(self, mesh: DeviceMesh) -> None:
        classes = unit_classes(self.policy.model, self.settings.wrap_policy)
        shard(self.policy, classes, self.settings, torch.float32, mesh)

    def loss(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, 512, (ROWS, PROMPT + RESPONSE), generator=generator).to(self.device)
        lengths = (torch.full((ROWS,), length, device=self.device) for length in (PROMPT, RESPONSE))
        logprobs, _ = self.policy(ids, *lengths, RESPONSE, 1.0, False)
        return -logprobs.mean()

    def step(self) -> float:
        with self.offload.loaded(optimizer=True):
            loss = self.loss()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: local(parameter).detach().cpu() for name, parameter in self.policy.named_parameters()}


def check_on_cpu(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    plain = Trained(mesh, CPU)
    losses = [plain.step(), plain.step()]
    for settings in OFFLOADS:
        trained = Trained(mesh, CPU, **settings)
        with trained.offload.loaded(), trained.offload.loaded(optimizer=True):
            pass
        assert [trained.step(), trained.step()] == losses, settings
        for name, weight in trained.weights().items():
            assert torch.equal(weight, plain.weights()[name.replace("_checkpoint_wrapped_module.", "")]), name
    check_moves(plain)


def check_moves(trained: Trained) -> None:
    """Parameters and moments go to another device (meta, as this machine has no other) as the same objects."""
    before, model = dict(trained.policy.named_parameters()), trained.policy.model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    _move_parameters(trained.policy, torch.device("meta"))
    _move_moments(trained.optimizer, torch.device("meta"))
    assert all(parameter is before[name] for name, parameter in trained.policy.named_parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(parameter.device.type == local(parameter).device.type == "meta" for parameter in before.values())
    assert set(trained.optimizer.state) == set(before.values())
    for state in trained.optimizer.state.values():
        assert {name: tensor.device.type for name, tensor in state.items()} == {
            "step": "cpu",
            "exp_avg": "meta",
            "exp_avg_sq": "meta",
        }
    assert model.model.rotary_emb.inv_freq.device == CPU  # buffers stay where they are needed


def test_on_a_cpu_nothing_changes_and_moved_tensors_stay_the_same_objects() -> None:
    run_ranks(check_on_cpu, 1)


def test_home_of_parameters() -> None:
    gpu = torch.device("cuda", 1)
    assert home_device(FsdpConfig(param_offload=True, optimizer_offload=True), gpu) == gpu
    assert home_device(FsdpConfig(offload_policy=True), gpu) == CPU
    assert home_device(FsdpConfig(offload_policy=True), CPU) == CPU


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("shard",))
    Trained(mesh, gpu()).step()  # cuBLAS takes its workspace at first use
    yield mesh
    dist.destroy_process_group()


def allocated() -> int:
    gc.collect()  # the states of FSDP units hold each other
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def shard_bytes() -> int:
    return sum(parameter.nbytes for parameter in _llama().parameters())


@needs_gpu
@pytest.mark.parametrize("settings", OFFLOADS, ids=lambda settings: "+".join(settings))
def test_training_is_the_same_with_each_offload(mesh: DeviceMesh, settings: dict[str, Any]) -> None:
    plain, trained = Trained(mesh, gpu()), Trained(mesh, gpu(), **settings)
    for _ in range(3):
        assert trained.step() == pytest.approx(plain.step(), abs=1e-5)
    for name, weight in trained.weights().items():
        other = plain.weights()[name.replace("_checkpoint_wrapped_module.", "")]
        torch.testing.assert_close(weight, other, rtol=0, atol=1e-5)


@needs_gpu
@pytest.mark.parametrize("parameters", [True, False])
@pytest.mark.parametrize("moments", [True, False])
def test_what_an_idle_role_leaves_on_the_gpu(mesh: DeviceMesh, parameters: bool, moments: bool) -> None:
    before = allocated()
    trained = Trained(mesh, gpu(), param_offload=parameters, optimizer_offload=moments)
    small = 0.02 * shard_bytes()  # buffers, rounding
    assert allocated() - before == pytest.approx(0 if parameters else shard_bytes(), abs=small)
    trained.step()
    idle = (0 if parameters else 1) + (0 if moments else 2)
    assert allocated() - before == pytest.approx(idle * shard_bytes(), abs=small)
    with trained.offload.loaded():
        assert allocated() - before == pytest.approx((1 if moments else 3) * shard_bytes(), abs=small)
        with trained.offload.loaded(optimizer=True):
            assert allocated() - before == pytest.approx(3 * shard_bytes(), abs=small)
        assert allocated() - before == pytest.approx((1 if moments else 3) * shard_bytes(), abs=small)
    assert allocated() - before == pytest.approx(idle * shard_bytes(), abs=small)
    if parameters:
        assert all(local(parameter).is_pinned() for parameter in trained.policy.parameters())


@needs_gpu
def test_what_the_scoring_phase_gathered_is_freed_too(mesh: DeviceMesh) -> None:
    before = allocated()
    trained = Trained(mesh, gpu(), param_offload=True, reshard_after_forward=False)
    with trained.offload.loaded():
        with torch.no_grad():
            trained.loss()
        assert allocated() - before > 1.9 * shard_bytes()  # shards, and what stays gathered
    assert allocated() - before < 0.02 * shard_bytes()


@needs_gpu
def test_offload_policy_keeps_nothing_on_the_gpu(mesh: DeviceMesh) -> None:
    before = allocated()
    trained = Trained(mesh, gpu(), offload_policy=True)
    trained.step()
    assert allocated() - before < 0.02 * shard_bytes()
    for parameter in trained.policy.parameters():
        assert local(parameter).is_pinned()
        assert local(trained.optimizer.state[parameter]["exp_avg"]).device == CPU


@needs_gpu
def test_offload_policy_with_a_model_from_the_meta_device(mesh: DeviceMesh) -> None:
    class FromMeta(Trained):
        def wrap(self, mesh: DeviceMesh) -> None:
            with torch.device("meta"):
                self.policy = PolicyModel(type(_llama())(_llama().config)).eval()
            super().wrap(mesh)
            self.policy.to_empty(device=home_device(self.settings, self.device))
            settle_buffers(self.policy, self.settings, self.device)
            self.policy.model.tie_weights()
            source = dict(_llama().named_parameters()) | dict(_llama().named_buffers())
            with torch.no_grad():
                for name, tensor in [*self.policy.model.named_parameters(), *self.policy.model.named_buffers()]:
                    local(tensor).copy_(source[name])

    plain, trained = Trained(mesh, gpu()), FromMeta(mesh, gpu(), offload_policy=True)
    for _ in range(2):
        assert trained.step() == pytest.approx(plain.step(), abs=1e-5)


@needs_gpu
@pytest.mark.parametrize("checkpointing", [True, False])
def test_activations_leave_the_gpu_between_forward_and_backward(mesh: DeviceMesh, checkpointing: bool) -> None:
    held = {}
    for offload in (False, True):
        trained = Trained(mesh, gpu(), activation_checkpointing=checkpointing, activation_cpu_offload=offload)
        trained.step()
        before = allocated()
        loss = trained.loss()
        held[offload] = allocated() - before
        loss.backward()
        trained.optimizer.zero_grad(set_to_none=True)
        del loss
    layer_input = ROWS * (PROMPT + RESPONSE) * 256 * 4
    assert held[False] - held[True] > 3.9 * layer_input  # what checkpointing keeps of four layers, and more without it
    if not checkpointing:
        assert held[True] < 0.5 * held[False]
