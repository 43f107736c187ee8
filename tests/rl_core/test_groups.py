"""Roles on ranks: what a mapping and a strategy make of them, and which are refused."""

from typing import Any

import pytest

from rl_core.errors import ConfigError
from rl_core.groups import make_groups
from tests.ranks import run_ranks
from tests.rl_core.models.cases import config


def layouts(rank: int, sections: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made = []
    for settings in sections:
        groups = make_groups(config(**settings), config(**settings).roles(), "cpu")
        made.append(
            {
                role: (
                    group.ranks, group.rank, tuple(group.mesh.mesh.shape), group.mesh.mesh_dim_names, group.data_parallel,
                    group.rank is not None and group.reports,
                )
                for role, group in groups.items()
            }
        )  # fmt: skip
    return made


def test_layouts_on_four_ranks():
    cases = [
        {},
        {"model_mapping": {"actor": [0, 1], "critic": [3, 2]}},
        {"fsdp": {"strategy": "ddp"}},
        {"fsdp": {"strategy": "hsdp", "hsdp_group_size": 2}, "critic": {"fsdp": {"ulysses_sequence_parallel_size": 2}}},
        {
            "algorithm": {"kl_in": "none"},
            "model_mapping": {"actor": [1, 2, 3], "critic": [0]},
            "critic": {"fsdp": {"strategy": "single"}},
        },
    ]
    by_rank = run_ranks(layouts, 4, cases)
    everyone = (0, 1, 2, 3)
    for rank, (plain, mapped, replicas, hybrid, single) in enumerate(by_rank):
        assert plain == {role: (everyone, rank, (4,), ("shard",), 4, True) for role in ("actor", "critic", "ref")}
        actor = ((0, 1), rank if rank < 2 else None, (2,), ("shard",), 2, rank < 2)
        critic = ((2, 3), rank - 2 if rank >= 2 else None, (2,), ("shard",), 2, rank >= 2)
        assert mapped == {"actor": actor, "critic": critic, "ref": actor}
        assert replicas["actor"] == (everyone, rank, (4, 1), ("replicate", "shard"), 4, True)
        assert hybrid["actor"] == (everyone, rank, (2, 2), ("replicate", "shard"), 4, True)
        assert hybrid["critic"] == (everyone, rank, (2, 2), ("replicate", "shard"), 2, rank % 2 == 0)
        assert set(single) == {"actor", "critic"}
        assert single["critic"] == ((0,), 0 if rank == 0 else None, (1,), ("shard",), 1, rank == 0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model_mapping": {"actor": [0, 2]}}, r"model_mapping\.actor = \[0, 2\] names rank 2, but this run has ranks 0 to 1"),
        ({"model_mapping": {"critic": []}}, r"model_mapping\.critic = \[\] must name at least one rank"),
        ({"model_mapping": {"critic": [1, 1]}}, r"each once"),
        ({"model_mapping": {"actor": [0], "critic": [0]}}, r"gives no role to rank\(s\) 1 of 2"),
        ({"fsdp": {"strategy": "single"}}, r"actor\.fsdp\.strategy = single is for one rank, but the role has 2"),
        ({"fsdp": {"strategy": "hsdp", "hsdp_group_size": 3}}, r"hsdp_group_size = 3 does not divide the 2"),
        ({"ref_model": {"fsdp": {"ulysses_sequence_parallel_size": 4}}}, r"ref_model\.fsdp\.ulysses.*= 4 does not divide the 2"),
    ],
)  # fmt: skip
def test_wrong_maps_are_refused_on_all_ranks(settings, said):
    refused = run_ranks(refusal, 2, settings)
    assert refused[0] == refused[1]
    with pytest.raises(ConfigError, match=said):
        raise ConfigError(refused[0])


def refusal(rank: int, settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        make_groups(config(**settings), config(**settings).roles(), "cpu")
    return str(caught.value)
