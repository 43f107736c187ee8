"""Built models against plain transformers models in float64, on one rank and on two."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_core.checkpoint.convert import convert
from rl_core.config import Config
from rl_core.errors import ModelError
from rl_core.groups import make_groups
from rl_core.models.build import build_critic, build_policy
from rl_core.models.policy import PolicyModel
from rl_core.models.source import ModelSource, load_tokenizer
from rl_core.models.tensors import model_tensors, optimizer_tensors
from rl_core.models.value import ValueModel
from tests.ranks import run_ranks
from tests.rl_core.models.cases import FAMILIES, config, family, ragged
from tests.tiny import tiny_tokenizer

TEMPERATURE = 0.7


def expected(directory: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities, entropy and last hidden states, worked out in float64, row by row and without padding."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager").eval()
    model.config._experts_implementation = "eager"  # the default knows no float64
    ids, prompt, response, width = ragged()
    logprobs, entropy = torch.zeros(2, len(ids), width, dtype=torch.float64)
    states = torch.zeros(len(ids), width, model.config.hidden_size, dtype=torch.float64)
    for row, (start, length) in enumerate(zip(prompt.tolist(), response.tolist(), strict=True)):
        if not length:
            continue
        tokens = ids[row : row + 1, : start + length]
        with torch.no_grad():
            out = model(tokens, output_hidden_states=True)
        distribution = torch.distributions.Categorical(logits=out.logits[0, start - 1 : start + length - 1] / TEMPERATURE)
        logprobs[row, :length] = distribution.log_prob(tokens[0, start:])
        entropy[row, :length] = distribution.entropy()
        states[row, :length] = out.hidden_states[-1][0, start - 1 : start + length - 1]
    return logprobs, entropy, states


LOW = {
    "model": {"name_or_path": "unused", "torch_dtype": "bfloat16"},
    "fsdp": {
        "activation_checkpointing": True,
        "reshard_after_forward": False,
        "mixed_precision": {"reduce_dtype": "bfloat16"},
    },
}


def actor(directory: Path, settings: Config, trainable: bool = True) -> PolicyModel:
    group = make_groups(settings, ["actor"], "cpu")["actor"]
    return build_policy(directory, settings, "actor", group, torch.device("cpu"), trainable)


def critic(directory: Path, settings: Config) -> ValueModel:
    group = make_groups(settings, ["critic"], "cpu")["critic"]
    return build_critic(directory, settings, group, torch.device("cpu"))


def scores_of(rank: int, directories: list[Path]) -> list[dict[str, Any]]:
    """Scores of each family in float32, then of the first in low precision, and with rows shared among the ranks."""
    shared, results = {"fsdp": {"ulysses_sequence_parallel_size": torch.distributed.get_world_size()}}, []
    for directory, sections in [(each, {}) for each in directories] + [(directories[0], LOW), (directories[0], shared)]:
        policy, valued = actor(directory, config(**sections)), critic(directory, config(**sections))
        ids, prompt, response, width = ragged()
        with torch.no_grad():
            bare = valued(ids, prompt, response, width)
            model_tensors(valued)["value_head.weight"].add_(1.0)
            values = valued(ids, prompt, response, width)
        logprobs, entropy = policy(ids, prompt, response, width, TEMPERATURE, entropy=True, entropy_gradient=True)
        (logprobs.sum() + entropy.sum()).backward()
        tensors = model_tensors(policy)
        first = next(iter(tensors.values()))
        local = sum(tensor.to_local().numel() for tensor in tensors.values())
        results.append(
            {
                "logprobs": logprobs.detach(), "entropy": entropy.detach(), "values": values, "bare": bare,
                "gradient": first.grad.full_tensor(), "share": torch.tensor(local / sum(t.numel() for t in tensors.values())),
                "names": sorted(tensors),
            }
        )  # fmt: skip
    return results


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("families")
    return [family(root / name, name) for name in FAMILIES]


@pytest.fixture(scope="module")
def built(directories: list[Path]) -> dict[int, list[list[dict[str, Any]]]]:
    bases = []
    for directory in directories:
        source = ModelSource(tiny_tokenizer(directory))
        bases.append(directory.with_name(f"{directory.name}-base"))
        convert(source, load_tokenizer(source), bases[-1])
    return {world: run_ranks(scores_of, world, bases) for world in (1, 2)}


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_equal_an_independent_computation(name: str, directories: list[Path], built: dict[int, Any]) -> None:
    index = FAMILIES.index(name)
    logprobs, entropy, states = expected(directories[index])
    for ranks in built.values():
        for rank in ranks:
            torch.testing.assert_close(rank[index]["logprobs"].double(), logprobs, rtol=0, atol=2e-5)
            torch.testing.assert_close(rank[index]["entropy"].double(), entropy, rtol=0, atol=2e-5)
            torch.testing.assert_close(rank[index]["values"].double(), states.sum(-1), rtol=0, atol=1e-4)
            assert not rank[index]["bare"].any()


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_hold_half_each_and_agree_with_one(name: str, built: dict[int, Any]) -> None:
    index = FAMILIES.index(name)
    [one], two = built[1][0:1], [rank[index] for rank in built[2]]
    for rank in two:
        torch.testing.assert_close(rank["logprobs"], one[index]["logprobs"], rtol=0, atol=1e-6)
        torch.testing.assert_close(rank["gradient"], one[index]["gradient"], rtol=1e-4, atol=1e-5)
        assert rank["names"] == one[index]["names"]
        assert 0.49 < rank["share"] < 0.51
    assert one[index]["gradient"].any()


def test_names_are_those_of_transformers_and_tied_weights_appear_once(built: dict[int, Any]) -> None:
    tied, untied = (built[1][0][FAMILIES.index(name)]["names"] for name in ("llama-tied", "llama-untied"))
    assert "lm_head.weight" in untied
    assert set(untied) - set(tied) == {"lm_head.weight"}
    assert "model.layers.1.self_attn.q_proj.weight" in tied


def test_low_precision_and_recomputation_run(built: dict[int, Any]) -> None:
    for ranks in built.values():
        for rank in ranks:
            full, low = rank[0], rank[-2]
            assert low["logprobs"].dtype == torch.float32
            assert low["names"] == full["names"]
            torch.testing.assert_close(low["logprobs"], full["logprobs"], rtol=0, atol=0.5)
            assert not torch.equal(low["logprobs"], full["logprobs"])


def test_ranks_that_share_rows_agree_with_one(built: dict[int, Any]) -> None:
    for world, ranks in built.items():
        for rank in ranks:
            whole, shared = rank[0], rank[-1]
            for score in ("logprobs", "entropy", "values"):
                torch.testing.assert_close(shared[score], whole[score], rtol=0, atol=1e-5)
            # FSDP averages: over ranks with the same gradient, or each with that of its own tokens.
            torch.testing.assert_close(shared["gradient"] * world, whole["gradient"], rtol=1e-4, atol=1e-4)


def properties(rank: int, directory: Path, misfit: Path) -> None:
    """What one rank can check by itself; the assertions raise in the test."""
    policy = actor(directory, config())
    ids, prompt, response, width = ragged()

    # Padding: other pads, and more of them, change nothing.
    with torch.no_grad():
        logprobs, none = policy(ids, prompt, response, width, 1.0, False)
        padded = torch.cat([ids, torch.full((len(ids), 5), 9)], dim=1)
        padded[torch.arange(padded.shape[1]) >= (prompt + response)[:, None]] = 17
        again, _ = policy(padded, prompt, response, width + 3, 1.0, False)
    assert none is None
    torch.testing.assert_close(again[:, :width], logprobs, rtol=0, atol=1e-5)
    assert not again[:, width:].any()

    # Tied: one parameter, also after a step. No response at all: a backward with zero gradients.
    assert policy.model.lm_head.weight is policy.model.model.embed_tokens.weight
    policy(ids, prompt, torch.zeros_like(response), width, 1.0, True)[0].sum().backward()
    assert all(p.grad is not None and not p.grad.full_tensor().any() for p in policy.parameters())

    # Optimizer state: made where missing, equal to what AdamW makes itself, named after the parameters.
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1)
    fresh = optimizer_tensors(policy, optimizer)
    assert len(fresh) == 3 * len(list(policy.parameters()))
    assert not any(tensor.any() for tensor in fresh.values())
    policy(ids, prompt, response, width, 1.0, True)[0].sum().backward()
    optimizer.step()
    stepped = optimizer_tensors(policy, optimizer)
    assert stepped.keys() == fresh.keys()
    assert all(tensor.full_tensor().any() for name, tensor in stepped.items() if name.endswith("exp_avg"))
    assert stepped["model.norm.weight.step"] == 1
    assert policy.model.lm_head.weight is policy.model.model.embed_tokens.weight

    frozen = actor(directory, config(), trainable=False)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    assert not frozen.training

    # Recomputing activations changes no gradient.
    gradients = []
    for recompute in (False, True):
        policy = actor(directory, config(fsdp={"activation_checkpointing": recompute}))
        policy(ids, prompt, response, width, TEMPERATURE, False)[0].sum().backward()
        gradients.append([tensor.grad.full_tensor() for tensor in model_tensors(policy).values()])
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*gradients, strict=True))

    with pytest.raises(ModelError, match=r"of another shape: model.layers.0.mlp.gate_proj.weight \[64, 32\]"):
        actor(misfit, config(), trainable=False)


def test_padding_ties_optimizer_state_and_misfits(tmp_path: Path, directories: list[Path]) -> None:
    misfit = Path(shutil.copytree(directories[0], tmp_path / "misfit"))
    text = (misfit / "config.json").read_text()
    (misfit / "config.json").write_text(text.replace('"intermediate_size": 64', '"intermediate_size": 60'))
    run_ranks(properties, 1, directories[0], misfit)
