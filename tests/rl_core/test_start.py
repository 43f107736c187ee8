"""What a run says at its start, once however many ranks it has, and what it refuses before it loads a model."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.pipeline import ROOT, environment, tiny_settings

BACKBONE = 102 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32
"""Parameters of the tiny Llama, whose head is tied."""


class Program:
    """`rl_core.train` as a process, with one configuration and one run directory."""

    def __init__(self, directory: Path) -> None:
        self.settings: dict[str, Any] = tiny_settings(directory)
        self.config, self.run = directory / "x.yaml", directory / "run"
        self.environment = environment(directory / "home")
        del self.settings["reward"]
        self.settings["data"] = {"eval_fraction": 0.97, "max_prompt_length": 128}  # of the default prompts some sixty are left
        self.settings["trainer"] |= {"max_steps": 1, "num_train_epochs": 3, "per_device_train_batch_size": 8}
        self.settings["actor"]["min_lr_ratio"] = 0.5
        self.settings["critic"] = {"torch_dtype": "bfloat16", "fsdp": {"hsdp_group_size": 2}}

    def train(self, train_batch_size: int, ranks: int | None) -> "subprocess.CompletedProcess[str]":
        """`ranks` of torchrun; None: one process without it."""
        self.settings["trainer"]["train_batch_size"] = train_batch_size
        self.config.write_text(yaml.safe_dump(self.settings))
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
        arguments = ["-m", "rl_core.train", "--config_path", str(self.config), "--output_dir", str(self.run)]
        return subprocess.run(
            [sys.executable, *torchrun, *arguments],
            cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
        )  # fmt: skip


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def refused(program: Program) -> "subprocess.CompletedProcess[str]":
    """With a step of more prompts than there are."""
    return program.train(1000, ranks=None)


@pytest.fixture(scope="module")
def most(refused: "subprocess.CompletedProcess[str]") -> int:
    """The batch size that the refusal names."""
    said = refused.stdout.splitlines()[-1]
    named = re.search(r"Lower it to (\d+) or less", said)
    assert named is not None, said
    return int(named[1])


@pytest.fixture(scope="module")
def started(program: Program, most: int) -> list[str]:
    """Lines of a run of two ranks that does what the refusal says."""
    ended = program.train(most, ranks=2)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.splitlines()


def test_fewer_prompts_than_a_step_takes_are_refused_before_a_model_loads(
    program: Program, refused: "subprocess.CompletedProcess[str]", most: int
) -> None:
    from rl_core.artifacts import open_artifact
    from rl_core.data.prompts import Prompts

    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert most == len(Prompts(open_artifact(program.run / "dataset").path, "train")) < 1000
    assert refused.stdout.splitlines()[-1] == (
        f"ppoflow: error: trainer.train_batch_size: 1000 prompts a step, but only {most} training prompts. Lower it to {most} or "
        "less, or give more prompts."
    )
    assert "FSDP unit" not in refused.stdout
    assert not (program.run / "checkpoints").exists()


def test_the_batch_plan_is_said(started: list[str], most: int) -> None:
    rows = -(-most // 2)
    assert once(started, "Batch plan") == (
        f"Batch plan: {most} prompts, {most} responses a step; 1 mini-batch(es) of {most} responses × 1 epoch(s) = 1 optimizer "
        f"step(s); on each of 2 data-parallel rank(s) {rows} responses a mini-batch in {-(-rows // 8)} micro-batch(es) of 8"
    )


@pytest.mark.parametrize("role", ["actor", "critic", "ref"])
def test_how_each_role_is_spread_is_said(role: str, started: list[str]) -> None:
    said = once(started, f"{role} (")
    head = 33 if role == "critic" else 0
    assert said.startswith(f"{role} (LlamaForCausalLM): fsdp (1 replica(s) × 2 shard(s)), {4 if head else 3} FSDP unit(s), ")
    assert f"{BACKBONE + head:,} parameters" in said
    local = re.search(r"([\d,]+) of them \((\d+\.\d)%, (\d+\.\d) MiB\) on this rank", said)
    assert local is not None
    here = int(local[1].replace(",", ""))
    assert BACKBONE // 2 <= here <= BACKBONE // 2 + 33
    assert local[2] == f"{here / (BACKBONE + head):.1%}"[:-1]
    assert local[3] == f"{here * 4 / 2**20:.1f}"
    compute = "bfloat16" if role == "critic" else "float32"
    assert said.endswith(f"; parameters float32, compute {compute}, reduce float32")


def test_what_is_not_said_by_the_user_or_does_nothing_is_said(program: Program, started: list[str]) -> None:
    notes = {line for line in started if line.startswith("Note: ")}
    assert notes == {
        "Note: data.source is not given: the prompts are 2,000 problems of reasoning-gym's chain_sum, sums of two digits. Your "
        "own: data.source = {kind: files, path: prompts.jsonl}.",
        "Note: trainer.num_train_epochs has no effect beside trainer.max_steps.",
        "Note: actor.min_lr_ratio has no effect with lr_scheduler_type = constant.",
        "Note: critic.fsdp.hsdp_group_size has no effect with strategy = fsdp.",
        "Note: launch.nproc_per_node has no effect: 2 rank(s) were started on this host.",
    }
    for note in notes:
        once(started, note)


def test_all_is_said_before_the_first_step(started: list[str]) -> None:
    first = next(number for number, line in enumerate(started) if line.startswith("[Rank 0]"))
    kinds = ("Note: ", "Batch plan", "actor (", "critic (", "ref (")
    assert [[line for line in started[first:] if line.startswith(kind)] for kind in kinds] == [[]] * len(kinds)


def once(lines: list[str], start: str) -> str:
    """The only line that starts so."""
    [line] = [line for line in lines if line.startswith(start)]
    return line
