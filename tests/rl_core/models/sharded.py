"""What ranks do with sharded models, and what a plain model does: material of `test_sharding`."""

import copy
import functools
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl_core.checkpoint.dcp import load_tensors, save_tensors
from rl_core.config.fsdp import FsdpConfig
from rl_core.groups import make_groups
from rl_core.models.policy import PolicyModel
from rl_core.models.sharding import shard, unit_classes
from rl_core.models.tensors import model_tensors, optimizer_tensors
from rl_core.models.value import ValueModel
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
