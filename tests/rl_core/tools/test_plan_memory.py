"""Bytes by phase, against sums worked out by hand and peaks measured on an H200."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_core.config import parse_config
from rl_core.tools.plan import make_plan
from rl_core.tools.plan_memory import Phase, phases
from rl_core.tools.plan_models import Model
from rl_core.tools.plan_roles import Situation
from tests.rl_core.tools.plans import HIDDEN, LAYER, LAYERS, PARAMETERS, ROOT, VALUE_HEAD, situation, wide_model

RESULTS = Path(__file__).parents[2] / "bench" / "results"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide_model(tmp_path_factory.mktemp("model"))


def by_name(model: Path, ranks: int = 1, **settings: Any) -> dict[str, Phase]:
    [rank] = phases(situation(model, ranks, **settings))
    return {phase.name: phase for phase in rank}


CRITIC = PARAMETERS + VALUE_HEAD


def test_what_is_there_all_the_time(model: Path) -> None:
    found = by_name(model)
    assert list(found) == [
        "building the models", "going on", "sync_weights", "gen", "old_log_prob", "ref", "values", "update_critic",
        "update_actor", "save",
    ]  # fmt: skip
    for phase in found.values():
        assert phase.bytes["parameters"] == 4 * PARAMETERS + 4 * CRITIC + 2 * PARAMETERS  # the reference is in bfloat16
        assert phase.bytes["rollout_weights"] == 2 * PARAMETERS
        assert phase.bytes["optimizer"] == (8 * PARAMETERS + 8 * CRITIC if phase.name != "building the models" else 0)


def test_two_micro_batches_sum_whole_gradients(model: Path) -> None:
    gradients = by_name(model)["update_actor"].bytes["gradients"]
    assert 4 * PARAMETERS <= gradients <= 4 * PARAMETERS + (2 + 4 + 4) * LAYER
    two = by_name(model, 2)["update_actor"].bytes["gradients"]  # one micro-batch on each of two ranks: each sums its half
    assert two <= 2 * PARAMETERS + (2 + 4 + 2) * LAYER
    eight_rows = by_name(model, 2, trainer__per_device_train_batch_size=1)["update_actor"].bytes["gradients"]
    assert eight_rows >= 4 * PARAMETERS  # summed without the other rank until the last


def test_shards_and_replicas(model: Path) -> None:
    whole, shared = by_name(model)["gen"].bytes, by_name(model, 2)["gen"].bytes
    assert shared["parameters"] == pytest.approx(whole["parameters"] / 2, abs=4)
    assert shared["optimizer"] == pytest.approx(whole["optimizer"] / 2, abs=4)
    assert shared["rollout_weights"] == whole["rollout_weights"]
    assert by_name(model, 2, fsdp__strategy="ddp")["gen"].bytes["parameters"] == whole["parameters"]
    halves = by_name(model, 4, fsdp__strategy="hsdp", fsdp__hsdp_group_size=2)["gen"].bytes
    assert halves["parameters"] == shared["parameters"]


def test_gathered_units(model: Path) -> None:
    assert by_name(model)["ref"].bytes["gathered"] == 2 * (ROOT + LAYER)
    assert by_name(model, 2)["ref"].bytes["gathered"] == 2 * (ROOT + 3 * LAYER)  # the next on its way, in one piece and copied
    kept = by_name(model, fsdp__reshard_after_forward=False)
    assert kept["old_log_prob"].bytes["gathered"] == 2 * PARAMETERS
    assert kept["update_critic"].bytes["gathered"] == 2 * CRITIC + 4 * PARAMETERS  # actor and reference since their forwards
    assert kept["update_actor"].bytes["gathered"] == 4 * PARAMETERS  # its own and the reference


def test_offload(model: Path) -> None:
    found = by_name(model, fsdp__param_offload=True, fsdp__optimizer_offload=True)
    assert found["gen"].bytes["parameters"] == found["gen"].bytes["optimizer"] == 0
    assert found["ref"].bytes["parameters"] == 2 * PARAMETERS
    update = found["update_critic"].bytes
    assert (update["parameters"], update["optimizer"]) == (4 * CRITIC, 8 * CRITIC)
    assert found["save"].bytes["optimizer"] == found["save"].bytes["parameters"] == 0
    assert found["going on"].bytes["optimizer"] == 8 * (PARAMETERS + CRITIC)
    assert found["going on"].bytes["parameters"] == 4 * (PARAMETERS + CRITIC)
    never = by_name(model, fsdp__offload_policy=True)["update_actor"].bytes
    assert never["parameters"] == never["optimizer"] == 0
    assert never["gradients"] >= 4 * PARAMETERS


def test_the_cache_stays_between_rollouts(model: Path) -> None:
    found = by_name(model)
    cache = 2 * LAYERS * 8 * 128 * HIDDEN * 2  # keys and values, layers, rows, tokens, heads × width, bytes
    assert {name for name, phase in found.items() if phase.bytes["kv_cache"] == 0} == {"building the models", "going on"}
    assert {phase.bytes["kv_cache"] for phase in found.values()} == {0, cache}


def test_host_memory_and_disk(model: Path) -> None:
    weights = 4 * (PARAMETERS + CRITIC)
    plain = make_plan(situation(model, checkpoint__async_save=False), 2**36)
    assert plain.host == 0
    assert plain.checkpoint == 3 * weights
    assert plain.disk == 3 * plain.checkpoint + 4 * PARAMETERS
    assert make_plan(situation(model), 2**36).host == 3 * weights  # the copy of which a checkpoint is written
    waiting = {"fsdp__param_offload": True, "fsdp__optimizer_offload": True, "checkpoint__async_save": False}
    assert make_plan(situation(model, **waiting), 2**36).host == 3 * weights + 2 * PARAMETERS
    assert make_plan(situation(model, 2, **waiting), 2**36).host == pytest.approx(3 * weights + 2 * PARAMETERS, abs=16)
    assert make_plan(situation(model, checkpoint__keep_best="val/reward/mean"), 2**36).checkpoints == 4


def test_adapters(model: Path) -> None:
    adapters = LAYERS * 4 * (4 * 2 * HIDDEN + 3 * (HIDDEN + 8192))  # rank 4 around q, k, v, o and the MLP's three
    found = by_name(model, actor__lora={"rank": 4})
    assert found["gen"].bytes["parameters"] == 2 * PARAMETERS + 4 * adapters + 4 * CRITIC + 2 * PARAMETERS
    assert found["gen"].bytes["optimizer"] == 8 * adapters + 8 * CRITIC
    assert found["gen"].bytes["rollout_weights"] == 2 * PARAMETERS
    plan = make_plan(situation(model, actor__lora={"rank": 4}), 2**36)
    assert plan.checkpoint == 12 * (adapters + CRITIC)
    assert plan.export == 4 * (PARAMETERS + adapters)
    assert plan.disk == 3 * plan.checkpoint + plan.export


def test_eight_bit_moments(model: Path) -> None:
    found = by_name(model, actor__optimizer="adamw8bit")
    packed = int(2 * PARAMETERS * (1 + 4 / 256))
    assert found["gen"].bytes["optimizer"] == packed + 8 * CRITIC
    assert found["save"].bytes["optimizer"] == 8 * PARAMETERS + 8 * CRITIC
    assert found["going on"].bytes["optimizer"] == 8 * PARAMETERS + 8 * CRITIC
    assert found["largest batch"].bytes["optimizer"] >= 8 * PARAMETERS


def test_roles_on_ranks_of_their_own(model: Path) -> None:
    mapping = {"model_mapping__actor": [0], "model_mapping__critic": [1], "fsdp__strategy": "single"}
    ranks = phases(situation(model, 2, **mapping))
    names = [{phase.name for phase in rank} for rank in ranks]
    assert {"update_actor", "ref", "gen"} <= names[0]
    assert "update_critic" not in names[0]
    assert "update_critic" in names[1]
    assert "gen" not in names[1]


def test_without_a_critic(model: Path) -> None:
    found = by_name(model, algorithm__adv_estimator="grpo", rollout__n=4, algorithm__kl_in="none")
    assert found["gen"].bytes["parameters"] == 4 * PARAMETERS
    assert not {"values", "update_critic", "ref"} & set(found)


def test_longer_rows_and_wider_micro_batches_need_more(model: Path) -> None:
    usual = by_name(model)["update_actor"]
    longer = by_name(model, rollout__max_new_tokens=192)["update_actor"]
    assert longer.bytes["activations"] == pytest.approx(2 * usual.bytes["activations"], rel=0.02)  # 64 + 192 tokens, not 64 + 64
    tokens = by_name(model, trainer__max_tokens_per_micro_batch=4 * 128)["update_actor"]
    assert tokens.bytes["activations"] == usual.bytes["activations"]


QWEN = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936, "hidden_size": 1536,
    "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
    "tie_word_embeddings": True, "max_position_embeddings": 32768,
}  # fmt: skip
MEASURED = [
    ("qwen2_1.5b_ppo_step_h200", "fsdp"),
    ("qwen2_1.5b_ppo_step_h200", "fsdp, gathered until the backward"),
    ("qwen2_1.5b_ppo_step_h200", "param and optimizer offload"),
    ("qwen2_1.5b_one_gpu_fixed", "adamw8bit"),
    ("qwen2_1.5b_two_gpus", "fsdp"),
    ("qwen2_1.5b_two_gpus", "actor+ref [0], critic [1]"),
]
"""Committed results of `ppo_step.py`. Since then AdamW, the rollout and the entropy have come to take less or more: some GiB."""


@pytest.mark.parametrize(("file", "case"), MEASURED)
def test_peaks_measured_on_a_gpu(tmp_path_factory: pytest.TempPathFactory, file: str, case: str) -> None:
    model = tmp_path_factory.getbasetemp() / "qwen2-1.5b"  # the same for all: traces are remembered by it
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(QWEN))
    report = json.loads((RESULTS / f"{file}.json").read_text())
    measured = report["cases"][case]
    values = {
        "model": {"name_or_path": str(model), "torch_dtype": "bfloat16"},
        "data": {"source": {"kind": "files", "path": "none"}},
        "reward": {"kind": "function", "path": "none.py"},
        "rollout": {"max_new_tokens": 256, "batch_size": 256},
        "trainer": {"train_batch_size": 64, "ppo_mini_batch_size": 16, "per_device_train_batch_size": 8},
    }
    config = parse_config(values, measured["settings"]).settled(report["ranks"])
    planned = Situation(
        config=config, model=Model(model), judge=None, ranks=report["ranks"], per_node=report["ranks"], prompt=107
    )
    peak = max(phase.total for rank in phases(planned) for phase in rank if phase.name not in ("going on", "save"))
    assert peak / 2**30 == pytest.approx(measured["gib_peak"], rel=0.1)


def test_predictions_that_were_made_before_they_were_measured() -> None:
    predicted = json.loads((RESULTS / "plan_predictions.json").read_text())
    measured = json.loads((RESULTS / "plan_measured_h200.json").read_text())["cases"]
    assert len(measured) == 5
    for name, case in measured.items():
        assert case["gib_predicted"] == predicted[name]["gib_predicted"]
        assert case["gib_predicted"] == pytest.approx(case["gib_measured"], rel=0.1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_update_on_this_gpu(tmp_path: Path) -> None:
    """The bytes of one forward and backward of a small model, as the allocator counts them."""
    import transformers

    from rl_core.config.fsdp import FsdpConfig
    from rl_core.models.value import ValueModel
    from rl_core.tools.plan_models import Part, update_trace
    from tests.tiny import tiny_model

    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    directory = tiny_model(tmp_path / "model", **sizes)
    trace = update_trace(Part(Model(directory), True, True, None, FsdpConfig().model_dump_json(), torch.bfloat16), 4, 100, 156)
    causal = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).cuda().eval()
    module = ValueModel(causal.base_model)  # type: ignore[arg-type]
    module.value_head.to_empty(device="cuda")
    ids = torch.zeros(4, 256, dtype=torch.long, device="cuda")
    lengths = torch.full((4,), 100, device="cuda"), torch.full((4,), 156, device="cuda")
    module(ids, *lengths, 156).sum().backward()  # the libraries' workspaces
    module.zero_grad()
    before = torch.cuda.memory_allocated()
    result = module(ids, *lengths, 156)
    assert torch.cuda.memory_allocated() - before == pytest.approx(trace.kept, rel=0.05)
    del result
