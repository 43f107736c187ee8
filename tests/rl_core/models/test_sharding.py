"""Sharded models against a plain one: each strategy, wrapping and option on 1, 2 and 4 ranks."""

import copy
import functools
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl_core.checkpoint.dcp import load_tensors, save_tensors
from rl_core.config.fsdp import FsdpConfig, WrapPolicyConfig
from rl_core.errors import ConfigError
from rl_core.groups import make_groups
from rl_core.models import sharding
from rl_core.models.policy import PolicyModel
from rl_core.models.sharding import settle_buffers, shard, unit_classes
from rl_core.models.tensors import model_tensors, optimizer_tensors
from rl_core.models.value import ValueModel
from tests.ranks import run_ranks
from tests.rl_core.models.cases import config, ragged

MAX_NORM = 0.1
ADAMW = {"lr": 0.1, "eps": 0.1, "weight_decay": 0.1}  # a large ε: the first step is smooth in the gradient, not its sign
STRATEGIES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"single": {}, "ddp": {}},
    2: {"fsdp": {}, "ddp": {}},
    4: {"fsdp": {}, "ddp": {}, "hsdp": {"hsdp_group_size": 2}},
}
"""By number of ranks. Four processes run them all: the small ones on some of the ranks, at the same time."""
RANKS = {1: [2], 2: [0, 1], 4: [0, 1, 2, 3]}
WRAPPINGS: dict[str, dict[str, Any]] = {
    "class": {},
    "class and size": {"min_num_params": 3000},
    "size": {"auto_wrap": "SIZE_BASED_WRAP", "min_num_params": 5000},
    "none": {"auto_wrap": "NO_WRAP"},
}
OPTIONS = ("reshard_after_forward", "forward_prefetch", "activation_checkpointing")
EACH_TWO = [(True, 0, False), (True, 2, True), (False, 0, True), (False, 2, False)]
"""Each two values together once."""
CHOICES = {(2, "fsdp"): list(product((True, False), (0, 2), (True, False)))}
"""By number of ranks and strategy, of the options; `EACH_TWO` where nothing else stands here."""


def llama(tie: bool = True, seed: int = 0) -> Any:
    """A model of its own, with weights large enough to tell faults."""
    return copy.deepcopy(_llama(tie, seed))


@functools.cache
def _llama(tie: bool, seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = LlamaConfig(
        vocab_size=102, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=tie, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(settings).eval()


def step(parameters: Any, optimizer: torch.optim.Optimizer) -> float:
    """Clip and apply; the norm."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
    optimizer.step()
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def expected(tie: bool) -> dict[str, Any]:
    """One AdamW step of the plain transformers model on all rows, one by one and without padding."""
    model, (ids, prompt, response, _) = llama(tie), ragged()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    loss = torch.zeros(())
    for row, (start, length) in enumerate(zip(prompt.tolist(), response.tolist(), strict=True)):
        if length:
            tokens = ids[row : row + 1, : start + length]
            loss = loss + nn.functional.cross_entropy(model(tokens).logits[0, start - 1 : -1], tokens[0, start:], reduction="sum")
    loss = loss / response.sum()
    loss.backward()
    norm = step(model.parameters(), optimizer)
    return {"loss": loss.item(), "norm": norm, "weights": dict(model.named_parameters())}


class Ranks:
    """Some of the ranks, laid out for each strategy by the code that does it in a training."""

    def __init__(self, size: int) -> None:
        self.size, self.strategies = size, list(STRATEGIES[size])
        self._groups = {
            name: make_groups(
                config(actor={"fsdp": {"strategy": name, **settings}}, model_mapping={"actor": RANKS[size]}),
                ["actor", "critic"],
                "cpu",
            )["actor"]
            for name, settings in STRATEGIES[size].items()
        }
        self.group = self._groups[self.strategies[0]]

    def sharded(self, strategy: str, compute: torch.dtype = torch.float32, model: Any = None, **settings: Any) -> Any:
        """A sharded policy (or `model`) and what `shard` reported."""
        module = PolicyModel(llama()) if model is None else model
        fsdp = FsdpConfig(strategy=strategy, **settings)  # type: ignore[arg-type]
        causal = module.model if isinstance(module, PolicyModel) else module.backbone
        classes = unit_classes(causal, fsdp.wrap_policy)
        return module, shard(module, classes, fsdp, compute, self._groups[strategy].mesh)

    def accumulate(self, policy: Any, micro_batches: int = 1) -> float:
        """Forward and backward over this rank's rows in so many parts; this rank's part of the loss."""
        ids, prompt, response, width = ragged()
        parts = torch.arange(len(ids)).chunk(self.size)[self.group.rank or 0].chunk(micro_batches)
        total = 0.0
        for number, rows in enumerate(parts):
            logprobs, _ = policy(ids[rows], prompt[rows], response[rows], width, 1.0, False)
            loss = -logprobs.sum() / response.sum()
            policy.set_requires_gradient_sync(number + 1 == len(parts))
            (loss * self.size).backward()
            total += loss.item()
        return total


def all_results(rank: int, directory: Path) -> dict[int, dict[str, Any]]:
    """Everything that the tests below look at, by number of ranks: each process starts once for all of them."""
    every = {size: Ranks(size) for size in STRATEGIES}
    mine = {size: ranks for size, ranks in every.items() if rank in RANKS[size]}
    for size, ranks in every.items():
        for strategy in ranks.strategies:
            state = trained_state(ranks, strategy) if size in mine else {}
            save_tensors(state, directory / f"{strategy} on {size}")
    return {
        size: {
            "steps": steps(ranks),
            "reports": {strategy: ranks.sharded(strategy)[1] for strategy in ranks.strategies},
            "collectives": collectives(ranks),
            "types": types(ranks) if size == 2 else None,
            "loaded": loaded(ranks, directory),
        }
        for size, ranks in mine.items()
    }


def steps(ranks: Ranks) -> dict[Any, Any]:
    results = {}
    cases = [
        (tie, strategy, choice)
        for strategy in ranks.strategies
        for tie, choices in ((True, CHOICES.get((ranks.size, strategy), EACH_TWO)), (False, EACH_TWO[1:2]))
        for choice in choices
    ]
    for (tie, strategy, choice), wrapping in product(cases, WRAPPINGS):
        options: dict[str, Any] = dict(zip(OPTIONS, choice, strict=True))
        policy, _ = ranks.sharded(strategy, model=PolicyModel(llama(tie)), wrap_policy=WRAPPINGS[wrapping], **options)
        optimizer = torch.optim.AdamW(policy.parameters(), **ADAMW)
        loss = torch.tensor(ranks.accumulate(policy))
        torch.distributed.all_reduce(loss, group=ranks.group.process_group)
        norm = step(policy.parameters(), optimizer)
        weights = {key: tensor.full_tensor() for key, tensor in model_tensors(policy).items()}
        if ranks.group.rank == 0:
            results[tie, strategy, wrapping, choice] = {"loss": loss.item(), "norm": norm, "weights": weights}
    return results


class Collectives(TorchDispatchMode):
    """Counts gathers, reduce-scatters and all-reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen[func._opname] += 1
        return func(*args, **(kwargs or {}))


def collectives(ranks: Ranks) -> dict[Any, Any]:
    """Counts of collectives of forward and backward, and the gathers issued when the first layer starts."""
    counts: dict[Any, Any] = {}
    for strategy, reshard, micro_batches in product(ranks.strategies, (True, False), {1, 4 // ranks.size}):
        policy, _ = ranks.sharded(strategy, reshard_after_forward=reshard)
        with Collectives() as counted:
            ranks.accumulate(policy, micro_batches)
        counts[strategy, reshard, micro_batches] = dict(counted.seen)
    for prefetch in (0, 1):
        policy, _ = ranks.sharded(ranks.strategies[0], forward_prefetch=prefetch)
        early: list[int] = []
        with Collectives() as counted:
            policy.model.model.layers[0].mlp.register_forward_hook(
                lambda *_, seen=counted.seen, early=early: early.append(seen["_allgather_base_"])
            )
            ranks.accumulate(policy)
        counts["prefetch", prefetch] = early[0]
    return counts


def types(ranks: Ranks) -> dict[Any, Any]:
    """Types in the forward, of gradients, and how often a layer runs."""
    results: dict[Any, Any] = {}
    ids, prompt, response, width = ragged()
    strategy = ranks.strategies[0]
    for compute, reduce in product((torch.bfloat16, torch.float16, torch.float32), ("float32", "bfloat16")):
        critic = ValueModel(llama().model)
        critic.value_head = nn.Linear(32, 1)
        ranks.sharded(strategy, compute, critic, mixed_precision={"reduce_dtype": reduce})
        seen: dict[str, Any] = {}
        for name in ("backbone.layers.0.mlp.up_proj", "value_head"):
            critic.get_submodule(name).register_forward_hook(
                lambda module, given, _, name=name, seen=seen: seen.update({name: (module.weight.dtype, given[0].dtype)})
            )
        values = critic(ids, prompt, response, width)
        values.sum().backward()
        gradient: Any = critic.backbone.embed_tokens.weight.grad
        results[compute, reduce] = {
            "seen": seen, "output": values.dtype, "held": critic.backbone.embed_tokens.weight.dtype, "gradient": gradient.dtype,
            "rounded": bool((gradient.full_tensor() == gradient.full_tensor().bfloat16()).all()),
        }  # fmt: skip
    for cast in (True, False):
        precision, wrapping = {"cast_forward_inputs": cast}, {"transformer_layer_cls_to_wrap": "LlamaMLP"}
        policy, _ = ranks.sharded(strategy, torch.bfloat16, mixed_precision=precision, wrap_policy=wrapping)
        try:
            results["cast", cast] = policy.model.model.layers[0].mlp(torch.ones(1, 1, 32)).dtype
        except RuntimeError as error:
            results["cast", cast] = str(error)
    for recompute in (True, False):
        policy, _ = ranks.sharded(strategy, activation_checkpointing=recompute, wrap_policy=WRAPPINGS["size"])
        runs: list[int] = []
        policy.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        policy(ids, prompt, response, width, 1.0, False)[0].sum().backward()
        results["recompute", recompute] = len(runs)
    return results


def trained_state(ranks: Ranks, strategy: str) -> dict[str, torch.Tensor]:
    """Weights and moments after a step."""
    policy, _ = ranks.sharded(strategy)
    optimizer = torch.optim.AdamW(policy.parameters(), **ADAMW)
    ranks.accumulate(policy)
    step(policy.parameters(), optimizer)
    return model_tensors(policy) | optimizer_tensors(policy, optimizer)


def loaded(ranks: Ranks, directory: Path) -> dict[Any, bool]:
    """Whether what was saved under each mesh, also on other numbers of ranks, comes out right under each of these."""
    results = {}
    for strategy in ranks.strategies:
        trained = trained_state(ranks, strategy)
        for saved in sorted(directory.iterdir()):
            policy, _ = ranks.sharded(strategy, model=PolicyModel(llama(seed=1)))
            fresh = model_tensors(policy) | optimizer_tensors(policy, torch.optim.AdamW(policy.parameters(), **ADAMW))
            load_tensors(fresh, saved, process_group=ranks.group.process_group)
            close = [torch.allclose(_full(trained[key]), _full(fresh[key]), rtol=0, atol=1e-5) for key in trained]
            results[saved.name, strategy] = all(close)
    return results


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By number of ranks, what each of these ranks returned."""
    results = run_ranks(all_results, 4, tmp_path_factory.mktemp("saved"))
    return {size: [results[rank][size] for rank in ranks] for size, ranks in RANKS.items()}


@pytest.fixture(scope="module")
def plain() -> dict[bool, dict[str, Any]]:
    return {tie: expected(tie) for tie in (True, False)}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize(("size", "strategy"), [(size, name) for size, names in STRATEGIES.items() for name in names])
def test_a_step_equals_that_of_the_plain_model(size: int, strategy: str, wrapping: str, ran: dict, plain: dict) -> None:
    results = {key: value for key, value in ran[size][0]["steps"].items() if key[1:3] == (strategy, wrapping)}
    assert len(results) == len(CHOICES.get((size, strategy), EACH_TWO)) + 1
    for (tie, *_), result in results.items():
        assert result["loss"] == pytest.approx(plain[tie]["loss"], abs=1e-5)
        assert result["norm"] == pytest.approx(plain[tie]["norm"], rel=1e-5)
        assert result["norm"] > MAX_NORM
        assert result["weights"].keys() == plain[tie]["weights"].keys()
        for key, weight in plain[tie]["weights"].items():
            torch.testing.assert_close(result["weights"][key], weight.detach(), rtol=0, atol=1e-5)


UNITS = 3  # root and two layers


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_are_summed_over_ranks_once_per_optimizer_step(size: int, ran: dict) -> None:
    for rank in ran[size]:
        for (strategy, reshard, micro_batches), counts in ((k, v) for k, v in rank["collectives"].items() if k[2:]):
            gathers = UNITS * micro_batches * (2 if reshard else 1)
            shared = {"_allgather_base_": gathers, "_reduce_scatter_base_": UNITS} if strategy != "ddp" else {}
            assert counts == shared | ({"allreduce_": UNITS} if strategy != "fsdp" else {})


@pytest.mark.parametrize("size", [2, 4])
def test_prefetch_gathers_a_unit_earlier(size: int, ran: dict) -> None:
    for rank in ran[size]:
        assert rank["collectives"]["prefetch", 0] == 2  # root, first layer
        assert rank["collectives"]["prefetch", 1] == 3  # and the second


@pytest.mark.parametrize("size", STRATEGIES)
def test_state_saved_under_each_mesh_loads_in_each_other(size: int, ran: dict) -> None:
    for rank in ran[size]:
        assert all(rank["loaded"].values()), rank["loaded"]
        assert len(rank["loaded"]) == sum(map(len, STRATEGIES.values())) * len(STRATEGIES[size])


def test_types(ran: dict) -> None:
    for rank in ran[2]:
        for (compute, reduce), result in ((k, v) for k, v in rank["types"].items() if isinstance(k[0], torch.dtype)):
            assert result["seen"] == {
                "backbone.layers.0.mlp.up_proj": (compute, compute), "value_head": (torch.float32, torch.float32)
            }  # fmt: skip
            assert result["output"] == result["held"] == result["gradient"] == torch.float32
            if compute != torch.bfloat16:
                assert result["rounded"] == (reduce == "bfloat16")
        assert rank["types"]["cast", True] == torch.bfloat16
        assert "dtype" in rank["types"]["cast", False]


def test_layers_are_recomputed_whatever_the_units_are(ran: dict) -> None:
    for rank in ran[2]:
        assert rank["types"]["recompute", True] == 2
        assert rank["types"]["recompute", False] == 1


@pytest.mark.parametrize("size", STRATEGIES)
def test_the_report_says_what_was_sharded(size: int, ran: dict) -> None:
    total = 102 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32
    for strategy in STRATEGIES[size]:
        reports = [rank["reports"][strategy] for rank in ran[size]]
        shards = {"fsdp": size, "hsdp": 2}.get(strategy, 1)
        for report in reports:
            assert (report.strategy, report.replicas, report.shards, report.units) == (strategy, size // shards, shards, UNITS)
            assert report.parameters == total
            assert report.local_bytes == 4 * report.local_parameters
            assert f"{total:,} parameters" in str(report)
            assert "parameters float32, compute float32, reduce float32" in str(report)
        assert sum(report.local_parameters for report in reports) == total * size // shards


def test_what_is_not_sharded_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "fully_shard", lambda *_, **__: None)

    class Mesh:
        device_type, ndim = "cpu", 1

        def size(self, _: int = 0) -> int:
            return 2

    with pytest.raises(AssertionError, match="is not sharded"):
        shard(PolicyModel(llama()), {"LlamaDecoderLayer"}, FsdpConfig(), torch.float32, Mesh())  # type: ignore[arg-type]


def wrapped(model: nn.Module, **policy: Any) -> Counter[str]:
    """Class names of the units beside the root."""
    settings = WrapPolicyConfig(**policy)
    inner = model.model if isinstance(model, PolicyModel) else model
    return Counter(type(unit).__name__ for unit in sharding._units(model, unit_classes(inner, settings), settings))


def test_which_modules_become_units() -> None:
    with torch.device("meta"):
        tied, untied = (PolicyModel(llama(tie)) for tie in (True, False))
    layers, halves = {"LlamaDecoderLayer": 2}, {"LlamaAttention": 2, "LlamaMLP": 2}
    assert wrapped(tied) == wrapped(untied) == layers
    assert wrapped(tied, transformer_layer_cls_to_wrap="LlamaAttention, LlamaMLP") == halves
    # 3,264 parameters of the embeddings (+ 32 of the last norm), 3,072 of attention, 6,144 of the MLP: both keys count.
    assert wrapped(untied, min_num_params=3297) == layers | {"LlamaMLP": 2}
    assert wrapped(untied, min_num_params=3296) == layers | {"LlamaMLP": 2, "LlamaModel": 1}
    assert wrapped(untied, min_num_params=3264) == layers | {"LlamaMLP": 2, "Embedding": 1}
    assert wrapped(untied, min_num_params=3072) == layers | halves | {"Embedding": 1}
    # By size alone: what is left of the layers belongs to the backbone. The head never is a unit, nor what is tied to it.
    size = {"auto_wrap": "SIZE_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    assert wrapped(untied, **size, min_num_params=6144) == {"LlamaMLP": 2, "LlamaModel": 1}
    assert wrapped(tied, **size, min_num_params=3264) == {"LlamaMLP": 2}
    assert wrapped(untied, **size) == {}
    assert wrapped(untied, auto_wrap="NO_WRAP", min_num_params=1) == {}


class Expert(nn.Linear):
    pass


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.experts = nn.ModuleList(Expert(8, 8) for _ in range(2))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))


def test_experts_that_run_on_some_ranks_only_are_no_units() -> None:
    assert wrapped(Stack(), auto_wrap="SIZE_BASED_WRAP", min_num_params=1) == {"LayerNorm": 2, "Layer": 2}
    with pytest.raises(ConfigError, match="Expert shares its parameters or does not run once"):
        unit_classes(Stack(), WrapPolicyConfig(transformer_layer_cls_to_wrap=["Expert"]))


def test_wrong_classes_are_refused_with_those_that_exist() -> None:
    where = r"fsdp\.wrap_policy\.transformer_layer_cls_to_wrap: "
    with pytest.raises(ConfigError, match=where + r"Qwen2DecoderLayer does not occur in LlamaForCausalLM.*: LlamaDecoderLayer\."):
        unit_classes(llama(), WrapPolicyConfig(transformer_layer_cls_to_wrap=["Qwen2DecoderLayer", "LlamaDecoderLayer"]))
    with pytest.raises(ConfigError, match=where + r"Stack does not say which of its layers to shard.*: Layer\."):
        unit_classes(Stack(), WrapPolicyConfig())
    assert unit_classes(Stack(), WrapPolicyConfig(min_num_params=1)) == set()
    assert unit_classes(Stack(), WrapPolicyConfig(auto_wrap="NO_WRAP")) == set()


def test_recomputation_needs_layers() -> None:
    with pytest.raises(ConfigError, match=r"activation_checkpointing.*nothing says what the layers of Linear are"):
        sharding._wrap_layers(nn.Linear(2, 2), set(), FsdpConfig(activation_checkpointing=True))


def test_buffers_get_their_type_and_stay_unsaved() -> None:
    model = llama()
    model.register_buffer("count", torch.zeros(3, dtype=torch.int64))
    settle_buffers(model, FsdpConfig(mixed_precision={"buffer_dtype": "bf16"}), torch.device("cpu"))  # type: ignore[arg-type]
    frequencies = model.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.bfloat16
    torch.testing.assert_close(frequencies.float(), 10000.0 ** -(torch.arange(0, 8, 2) / 8), rtol=0.01, atol=0)
    assert model.count.dtype == torch.int64
    assert "model.rotary_emb.inv_freq" not in model.state_dict()
    settle_buffers(model, FsdpConfig(), torch.device("cpu"))
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
