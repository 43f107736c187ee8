"""Sharded models against a plain one: each strategy, wrapping and option on 1, 2 and 4 ranks."""

from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.rl_core.models.sharded import CHOICES, EACH_TWO, MAX_NORM, RANKS, STRATEGIES, WRAPPINGS, all_results, expected


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
