import pytest

from rl_core.artifacts import commit, fresh_scratch
from tasks.runs import Run, extended
from tasks.store import Reference
from tests.tasks.settings import config, inputs

A, B = {"code": "a", "ranks": 1}, {"code": "b", "ranks": 1}


def segment(start: int, end: int, circumstances: dict) -> dict:
    return {"from_step": start, "to_step": end, **circumstances}


@pytest.mark.parametrize(
    ("earlier", "done", "steps", "now", "expected"),
    [
        ([], 0, 9, A, [segment(0, 9, A)]),
        ([segment(0, 9, A)], 4, 9, A, [segment(0, 9, A)]),  # killed and resumed: as if never killed
        ([segment(0, 9, A)], 0, 9, B, [segment(0, 9, B)]),  # killed before the first checkpoint
        ([segment(0, 9, A)], 4, 9, B, [segment(0, 4, A), segment(4, 9, B)]),
        ([segment(0, 4, A), segment(4, 9, B)], 4, 9, A, [segment(0, 9, A)]),  # B committed nothing
        ([segment(0, 4, A), segment(4, 9, B)], 6, 9, A, [segment(0, 4, A), segment(4, 6, B), segment(6, 9, A)]),
        ([segment(0, 9, A)], 9, 12, A, [segment(0, 12, A)]),  # a finished run goes on
        ([segment(0, 9, A)], 9, 12, B, [segment(0, 9, A), segment(9, 12, B)]),
        ([segment(0, 9, A)], 9, 9, B, [segment(0, 9, A)]),  # only the export is left to do
    ],
)
def test_segments(earlier, done, steps, now, expected):
    assert extended(earlier, done, steps, now) == expected


def key(directory, **overrides):
    return Run.of(config(directory, **overrides), *inputs()).key


def test_run_key_is_the_same_whatever_changes_no_step(home, tmp_path):
    same = {
        "trainer__max_steps": 9, "trainer__per_device_train_batch_size": 1, "launch__nproc_per_node": 2,
        "launch__device": "auto", "fsdp__reshard_after_forward": False, "checkpoint__save_steps": 1, "evaluation__prompts": 3,
        "registry__name": "other", "rollout__batch_size": 7, "model__name_or_path": "elsewhere", "data__shard_rows": 5,
    }  # fmt: skip
    first = key(tmp_path / "a")
    assert {name: key(tmp_path / "a", **{name: value}) == first for name, value in same.items()} == dict.fromkeys(same, True)
    assert key(tmp_path / "b") == first  # the reward's content counts, not its path


def test_run_key_differs_with_whatever_decides_a_step(home, tmp_path):
    differing = {
        "trainer__seed": 1, "actor__learning_rate": 0.5, "trainer__train_batch_size": 8, "critic__warmup_steps": 3,
        "algorithm__gamma": 0.5, "rollout__temperature": 0.5, "rollout__n": 2, "model__torch_dtype": "bfloat16",
        "reward__name": "other",
    }  # fmt: skip
    keys = {key(tmp_path / "a", **{name: value}) for name, value in differing.items()} | {key(tmp_path / "a")}
    (tmp_path / "a" / "reward.py").write_text("def compute_score(*arguments):\n    return 2.0\n")
    keys.add(key(tmp_path / "a"))
    dataset, base = inputs()
    other = Reference(base.stage, base.key, "e" * 64)
    keys.add(Run.of(config(tmp_path / "b"), dataset, other).key)
    assert len(keys) == len(differing) + 3


def test_steps_by_epochs(home, tmp_path):
    overrides = {"trainer__max_steps": None, "trainer__num_train_epochs": 2, "trainer__train_batch_size": 32}
    assert Run.of(config(tmp_path, **overrides), *inputs()).steps == 7  # 2 × 100 prompts / 32


def test_committed_step_is_that_of_the_newest_whole_checkpoint(home):
    run = Run("r" * 64, {}, 9)
    assert run.committed_step() == 0
    for step in (2, 999_999, 1_000_000):
        scratch = fresh_scratch(run.directory / "checkpoints" / f"step_{step:06d}")
        (scratch / "tensors").write_text(str(step))
        commit(scratch, run.directory / "checkpoints" / f"step_{step:06d}", kind="checkpoint", key="0")
    (run.directory / "checkpoints" / "step_1000001").mkdir()
    assert run.committed_step() == 1_000_000
    (run.directory / "checkpoints" / "step_1000000" / "tensors").write_text("rotten")
    assert run.committed_step() == 999_999
