from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_core.errors import ModelError
from rl_core.rollout.engine import RolloutEngine
from rl_core.rollout.sync import sync_weights
from tests.ranks import run_ranks
from tests.tiny import tiny_model

IDS = torch.tensor([[5, 9, 17, 33, 40, 2]])


def disturb(model: torch.nn.Module) -> None:
    """Change every weight, as an optimizer step would."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)


@pytest.mark.parametrize("tie", [True, False])
def test_engine_follows_the_policy(tmp_path, tie):
    directory = tiny_model(tmp_path, tie=tie)
    policy = AutoModelForCausalLM.from_pretrained(directory)
    engine = RolloutEngine(directory, torch.float32, "cpu")
    addresses = {name: tensor.data_ptr() for name, tensor in engine.model.state_dict().items()}
    before = None
    for _ in range(2):
        sync_weights(SimpleNamespace(model=policy), engine)
        with torch.no_grad():
            expected = policy(IDS).logits
            assert torch.equal(engine.model(IDS).logits, expected)
        assert before is None or not torch.allclose(before, expected)
        before = expected
        disturb(policy)
    assert {name: tensor.data_ptr() for name, tensor in engine.model.state_dict().items()} == addresses
    assert len(set(addresses.values())) == len(addresses) - tie
    assert not any(parameter.requires_grad for parameter in engine.model.parameters())


def test_cast_to_the_rollout_type(tmp_path):
    directory = tiny_model(tmp_path)
    policy = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    engine = RolloutEngine(directory, torch.bfloat16, "cpu")
    sync_weights(SimpleNamespace(model=policy), engine)
    for name, weight in policy.state_dict().items():
        assert torch.equal(engine.model.state_dict()[name], weight.bfloat16())


@pytest.mark.parametrize(
    ("settings", "named"), [({"num_hidden_layers": 3}, "model.layers.2."), ({"intermediate_size": 32}, "mlp.down_proj")]
)
def test_another_architecture_is_refused_whole(tmp_path, settings, named):
    policy = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "other", **settings))
    engine = RolloutEngine(tiny_model(tmp_path / "base"), torch.float32, "cpu")
    for tensor in engine.model.state_dict().values():
        tensor.zero_()
    with pytest.raises(ModelError, match=named):
        sync_weights(SimpleNamespace(model=policy), engine)
    assert not any(tensor.any() for tensor in engine.model.state_dict().values())
    assert not engine.synced


def sharded_rank(rank: int, directories: list[str]) -> list[list[int]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    drawn = []
    for directory in directories:
        whole, policy = (AutoModelForCausalLM.from_pretrained(directory) for _ in range(2))
        disturb(whole)
        disturb(policy)
        for layer in policy.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(policy, mesh=mesh)
        engine = RolloutEngine(Path(directory), torch.float32, "cpu")
        sync_weights(SimpleNamespace(model=policy), engine)
        with torch.no_grad():
            assert torch.equal(engine.model(IDS).logits, whole(IDS).logits)
            assert torch.allclose(engine.model(IDS).logits, policy(IDS).logits, atol=1e-5)
        # Ranks generate on their own, rows of different number and length: no rank waits for another.
        prompts, samples = ([[5, 9, 17], [6]], [0, 1]) if rank == 0 else ([[7]], [2])
        made = engine.generate(
            prompts, samples, max_new_tokens=3 + rank, temperature=1.0, seed=0, step=0, stop_ids=set(), batch_size=4
        )
        drawn += made.responses
    return drawn


def test_sharded_policy(tmp_path):
    directories = [str(tiny_model(tmp_path / str(tie), tie=tie)) for tie in (True, False)]
    made = run_ranks(sharded_rank, 2, directories)
    assert [[len(row) for row in rows] for rows in made] == [[3, 3, 3, 3], [4, 4]]
