"""A judge in a process of its own: what hangs, crashes or is killed costs its own response, and nothing outlives a run."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl_core.config.reward import FunctionReward, MathReward, ReasoningGymReward, RegexReward
from rl_core.distributed import seed_global_generators
from rl_core.errors import ConfigError, RewardError
from rl_core.rewards import build_reward, probe
from tests.rl_core.rewards.samples import SIGNATURE, function, gym_prompt, judged, prompt, scores

SHORT, LONG = 2.0, 120.0
"""Seconds: of a limit that is to be reached, and of one that is not, however slow the machine."""


def isolated(tmp_path: Path, code: str, timeout_s: float = LONG, **settings: Any) -> FunctionReward:
    return function(tmp_path, code, timeout_s=timeout_s, **settings)


PERILS = f"""
import os, signal, sys
{SIGNATURE}    if solution_str == "hang":
        while True: pass
    if solution_str == "exit": os._exit(3)
    if solution_str == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "raise": raise ValueError("no")
    if solution_str == "stop": sys.exit("bye")
    return {{"score": len(solution_str), "pid": os.getpid()}}
"""


def test_what_hangs_or_ends_its_process_costs_its_own_response(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reward = build_reward(isolated(tmp_path, PERILS, SHORT, on_error="value", error_value=-1.0))
    responses = ["a", "hang", "bb", "exit", "kill", "ccc", "raise", "stop", "dddd"]
    with caplog.at_level(logging.WARNING):
        result = judged(reward, [prompt()] * len(responses), responses)
    assert [j.score for j in result] == [1, -1, 2, -1, -1, 3, -1, -1, 4]
    assert [j.failed for j in result] == [None, "timeout", None, "error", "error", None, "error", "error", None]
    pids = [int(j.extras["pid"]) for j in result if j.extras]
    assert len(set(pids)) == 3, "one process until it has to be ended, then another one"
    assert os.getpid() not in pids
    assert not any(map(psutil.pid_exists, set(pids) - {pids[-1]}))
    first = "\n".join(record.getMessage() for record in caplog.records)
    assert "takes longer than reward.timeout_s = 2 s on prompt aaaaaaaaaaaa '1+1=', response 'hang'" in first
    assert "ends its process (exit code 3) on" in first
    assert first.count("ends its process") == 1


@pytest.mark.parametrize(
    ("response", "words"),
    [
        ("hang", ["takes longer than reward.timeout_s = 2 s", "reward.on_error = value"]),
        ("kill", ["ends its process (signal 9, Killed)"]),
        ("raise", ["raises ValueError: no (line 8 of ", "reward.py)"]),
    ],
)
def test_or_stops_the_run(tmp_path: Path, response: str, words: list[str]) -> None:
    reward = build_reward(isolated(tmp_path, PERILS, SHORT if response == "hang" else LONG))
    with pytest.raises(RewardError) as caught:
        judged(reward, [prompt()] * 3, ["a", response, "b"])
    assert all(word in str(caught.value) for word in [*words, "compute_score in", f"response '{response}'"]), caught.value
    assert scores(reward, [prompt()], ["abc"]) == [3.0], "what was left of the question before is not the answer now"


LISTED = """
import os
def compute_score(completions, **columns):
    for completion in completions:
        while completion == "hang": pass
        if completion == "exit": os._exit(1)
    return [float(len(completions))] * len(completions)
"""


def test_of_a_list_only_what_hangs_or_ends_its_process_is_lost(tmp_path: Path) -> None:
    reward = build_reward(isolated(tmp_path, LISTED, SHORT, on_error="value"))
    assert scores(reward, [prompt()] * 2, ["a", "b"]) == [2.0, 2.0], "given all at once"
    for peril, failed in {"hang": "timeout", "exit": "error"}.items():
        result = judged(reward, [prompt()] * 3, ["a", peril, "b"])
        assert [(j.score, j.failed) for j in result] == [(1.0, None), (0.0, failed), (1.0, None)]


def test_it_prints_where_the_rank_prints_and_ends_with_what_it_started(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = f"""
import subprocess
{SIGNATURE}    child = subprocess.Popen(["sleep", "1000"])
    print("judging", solution_str)
    while solution_str == "hang": pass
    return child.pid
"""
    reward = build_reward(isolated(tmp_path, code, SHORT, on_error="value"))
    (started,) = scores(reward, [prompt()], ["one"])
    assert psutil.pid_exists(int(started))
    judged(reward, [prompt()], ["hang"])
    psutil.wait_procs([psutil.Process(int(started))] if psutil.pid_exists(int(started)) else [], timeout=LONG)
    assert not psutil.pid_exists(int(started)) or psutil.Process(int(started)).status() == psutil.STATUS_ZOMBIE
    assert capfd.readouterr().out == "judging one\njudging hang\n"


DRAWS = f"""
import random, numpy
{SIGNATURE}    while solution_str == "hang": pass
    return [random.random(), float(numpy.random.rand())]
"""


def test_its_draws_are_those_of_the_step_whatever_was_ended(tmp_path: Path) -> None:
    reward = build_reward(isolated(tmp_path, DRAWS, SHORT, on_error="value"))

    def step(number: int, responses: list[str]) -> list[Any]:
        seed_global_generators(7, number, 0)
        assert reward is not None
        return [j.tokens for j in reward([prompt()] * len(responses), responses, [[5, 1]] * len(responses))]

    first = step(0, ["a", "b", "c"])
    assert step(1, ["a", "b", "c"]) != first
    assert len({tuple(tokens) for tokens in first}) == 3
    assert step(0, ["a", "hang", "c"]) == [first[0], None, first[2]]
    assert step(0, ["a", "b", "c"]) == first


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        ("def (", ConfigError, ["reward.path", "cannot be imported", "SyntaxError"]),
        ("x = 1", ConfigError, ["reward.name = compute_score", "has no function"]),
        ("def compute_score(text): return 1", RewardError, ["takes (text)"]),
        ("import os; os._exit(5)", ConfigError, ["reward: its process ended while it was loaded (exit code 5)"]),
    ],
)
def test_what_cannot_be_loaded_is_said_at_once(tmp_path: Path, code: str, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        build_reward(isolated(tmp_path, code))
    assert all(word in str(caught.value) for word in words), caught.value


def test_on_trial_it_may_not_fail_on_everything(tmp_path: Path) -> None:
    reward = build_reward(isolated(tmp_path, f"{SIGNATURE}    return None", on_error="value"))
    with pytest.raises(RewardError, match=r"none of 2 responses on trial could be judged \(invalid\)"):
        probe(reward, [prompt()] * 2)
    some = f"{SIGNATURE}    return 1.0 if extra_info else None"
    probe(build_reward(isolated(tmp_path, some, on_error="value")), [prompt(), prompt(extra_info={})])


@pytest.mark.parametrize("ending", ["normal", "killed"])
def test_it_ends_with_the_rank(tmp_path: Path, ending: str) -> None:
    """Also where the rank is killed while it judges, and would judge for ever."""
    config = isolated(
        tmp_path, f"import os\n{SIGNATURE}    print(os.getpid())\n    while solution_str == 'killed': pass\n    return 1"
    )
    code = (
        "from tests.rl_core.rewards.samples import prompt, scores\n"
        "from rl_core.config.reward import FunctionReward\nfrom rl_core.rewards import build_reward\n"
        f"reward = build_reward(FunctionReward(kind='function', path={config.path!r}, timeout_s={LONG}))\n"
        f"scores(reward, [prompt()], [{ending!r}])"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        worker = int(rank.stdout.readline())
        if ending == "killed":
            rank.kill()
        assert rank.wait(LONG) == (-signal.SIGKILL if ending == "killed" else 0)
    if psutil.pid_exists(worker):  # the kernel has its signal on the way, or nobody has asked how it ended
        psutil.Process(worker).wait(LONG)
    assert not psutil.pid_exists(worker)


def test_every_kind_is_judged_there(tmp_path: Path) -> None:
    """With the verdicts of this process."""
    assert scores(build_reward(MathReward(kind="math", timeout_s=LONG)), [prompt()] * 2, ["so it is 2", "3"]) == [1.0, 0.0]
    with pytest.raises(RewardError, match=r"^reward.kind = reasoning_gym judges prompts of reasoning-gym's own"):
        probe(build_reward(ReasoningGymReward(kind="reasoning_gym", timeout_s=LONG)), [prompt()])


def test_a_verifier_without_end_is_ended() -> None:
    """countdown's gives what the response says to SymPy."""
    config = ReasoningGymReward(kind="reasoning_gym", extract="text", timeout_s=SHORT, on_error="value", error_value=-1.0)
    sums = gym_prompt("countdown")
    assert scores(build_reward(config), [sums] * 2, ["1+1", "9**9**9**9"]) == [0.05, -1.0]
    with pytest.raises(RewardError, match=r"reasoning-gym's verifier takes longer than reward.timeout_s = 2 s on .*'9\*\*9"):
        scores(build_reward(config.model_copy(update={"on_error": "raise"})), [sums], ["9**9**9**9"])


def test_a_pattern_that_backtracks_without_end_is_ended() -> None:
    reward = build_reward(RegexReward(kind="regex", pattern=r"(a+)+$", timeout_s=SHORT, on_error="value", error_value=-1.0))
    assert scores(reward, [prompt(ground_truth="aa")] * 2, ["a" * 50 + "b", "baa"]) == [-1.0, 1.0]
