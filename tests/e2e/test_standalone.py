"""`torchrun … -m rl_core.train` as a user starts it by hand: a whole training without Prefect and MLflow."""

import json
import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from rl_core.artifacts import open_artifact
from tests.pipeline import ROOT, environment, tiny_settings
from tests.tiny import tiny_model

VERL_NAMES = {
    *(f"critic/{name}/{part}" for name in ("score", "rewards") for part in ("mean", "max", "min")),
    *(f"critic/{name}/mean" for name in ("advantages", "returns", "values")),
    *(f"{name}_length/{part}" for name in ("prompt", "response") for part in ("mean", "max", "min")),
    "response_length/clip_ratio",
    *(f"actor/{name}" for name in ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "entropy", "grad_norm", "lr")),
    *(f"critic/{name}" for name in ("vf_loss", "vf_clipfrac", "vpred_mean", "grad_norm", "lr")),
    *(
        f"timing_s/{phase}"
        for phase in ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "step")
    ),
    "perf/total_num_tokens", "perf/time_per_step", "perf/throughput",
}  # fmt: skip
"""What verl 0.4 logs of a PPO step with a critic (`compute_data_metrics`, `compute_timing_metrics`, its workers)."""
FAILS_ON_RANK_1 = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if os.environ["RANK"] == "1" and solution_str != "The answer is 0.":
        raise ValueError("a user's\\nmistake")
    return 0.5
"""
SHADOW = """
import os
open(os.environ["IMPORTED"], "a").write(__name__)
raise RuntimeError(__name__)
"""


ABSENT = ("prefect", "mlflow", "ray", "vllm", "sglang", "megatron", "trl")
"""What a training by itself does without."""
NOT_INSTALLED = ("deepspeed", "flash_attn")
"""As well; transformers itself imports these where they can be found."""


class Standalone:
    """A directory with a configuration, a run directory, and modules that tell when what is not needed is imported."""

    def __init__(self, directory: Path) -> None:
        self.settings = tiny_settings(directory)
        self.config, self.run, self.imported = directory / "x.yaml", directory / "run", directory / "imported"
        for name in ABSENT:
            shadow = directory / "shadows" / name
            shadow.mkdir(parents=True)
            (shadow / "__init__.py").write_text(SHADOW)
        path = os.pathsep.join([str(directory / "shadows"), str(ROOT)])
        self.environment = environment(directory / "home", PYTHONPATH=path, IMPORTED=str(self.imported))

    def train(self, *settings: str, ranks: int | None) -> "subprocess.CompletedProcess[str]":
        """`ranks` of torchrun; None: one process without torchrun."""
        self.config.write_text(yaml.safe_dump(self.settings))
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
        arguments = ["-m", "rl_core.train", "--config_path", str(self.config), "--output_dir", str(self.run)]
        more = [word for setting in settings for word in ("--set", setting)]
        return subprocess.run(
            [sys.executable, *torchrun, *arguments, *more],
            cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]

    def expected_lines(self, steps: range) -> list[str]:
        """The three lines of each step, with what metrics.jsonl says (the deviation is not in it)."""
        lines = []
        for step in steps:
            metrics, where = self.metrics()[step], rf"\[Rank 0\] PPO epoch 0 \| Step {step} \| "
            lines += [
                where + "Rollout completed, generated 8 sequences",
                where + rf"Reward computed, mean: {metrics['critic/score/mean']:.3f}, std: \d+\.\d{{3}}",
                where + rf"Training step done, loss: {metrics['actor/loss']:.3g}",
            ]
        return lines


def assert_seed_lines(said: str, expected: list[str]) -> None:
    lines = [line for line in said.splitlines() if line.startswith("[Rank")]
    assert len(lines) == len(expected), said
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(expected, lines, strict=True)), lines


@pytest.fixture(scope="module")
def standalone(tmp_path_factory) -> Standalone:
    return Standalone(tmp_path_factory.mktemp("standalone"))


@pytest.fixture(scope="module")
def first(standalone) -> "subprocess.CompletedProcess[str]":
    """Two steps on two ranks."""
    return standalone.train(ranks=2)


def test_two_ranks_train_and_export(standalone, first):
    from transformers import AutoModelForCausalLM

    assert first.returncode == 0, first.stderr
    assert not any(map(find_spec, NOT_INSTALLED))
    assert_seed_lines(first.stdout, standalone.expected_lines(range(2)))
    model, report = AutoModelForCausalLM.from_pretrained(standalone.run / "policy", output_loading_info=True)
    assert not any(report.values()), report
    assert not all(
        before.equal(after)
        for before, after in zip(
            AutoModelForCausalLM.from_pretrained(standalone.settings["model"]["name_or_path"]).parameters(),
            model.parameters(),
            strict=True,
        )
    )
    assert not standalone.imported.exists()


def test_metrics_have_verls_names_and_are_finite(standalone, first):
    steps = standalone.metrics()[:2]
    assert [metrics["step"] for metrics in steps] == [0, 1]
    for metrics in steps:
        assert metrics.keys() >= VERL_NAMES, sorted(VERL_NAMES - metrics.keys())
        assert all(math.isfinite(value) for value in metrics.values())


def test_another_seed_in_the_same_directory_is_refused(standalone, first):
    refused = standalone.train("trainer.seed=9", ranks=None)
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    [said] = [line for line in refused.stdout.splitlines() if line.strip()]
    assert said.startswith(f"ppoflow: error: --output_dir {standalone.run} holds another run: ")
    assert "config.trainer.seed (0 there, 9 here)" in said
    assert not list(standalone.run.glob(".*broken*"))


def test_another_model_in_the_same_directory_is_refused_and_nothing_is_set_aside(standalone, first, tmp_path):
    other = tiny_model(tmp_path / "other", seed=1)
    refused = standalone.train(f"model.name_or_path={other}", ranks=None)
    assert refused.returncode == 2
    assert f"--output_dir {standalone.run} holds another run: its base was made from other input" in refused.stdout
    assert not list(standalone.run.glob(".*broken*"))


def test_more_steps_go_on_from_the_checkpoint_on_another_number_of_ranks(standalone, first):
    longer = standalone.train("trainer.max_steps=3", ranks=1)
    assert longer.returncode == 0, longer.stderr
    assert "Going on from step_000002: 2 of 3 steps are done" in longer.stdout
    assert_seed_lines(longer.stdout, standalone.expected_lines(range(2, 3)))
    assert [metrics["step"] for metrics in standalone.metrics()] == [0, 1, 2]
    assert open_artifact(standalone.run / "policy").results == {"step": 3}
    assert not standalone.imported.exists()


def test_a_users_mistake_on_one_rank_is_one_paragraph_on_each(tmp_path):
    failing = Standalone(tmp_path)
    Path(failing.settings["reward"]["path"]).write_text(FAILS_ON_RANK_1)
    ended = failing.train(ranks=2)
    assert ended.returncode != 0
    errors = [line for line in ended.stdout.splitlines() if line.startswith("ppoflow: error: ")]
    assert len(errors) == 2, ended.stdout
    assert len(set(errors)) == 1
    assert "reward.py raises ValueError: a user's mistake (line 6 of " in errors[0]
    assert " on prompt " in errors[0]
    assert "compute_score" not in ended.stderr  # no rank's traceback
    assert set(re.findall(r"exitcode\s*: (\d+)", ended.stderr)) == {"2"}
