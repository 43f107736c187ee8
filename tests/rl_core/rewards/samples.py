"""Prompts, and rewards made of a few lines of Python, for tests of rewards."""

from pathlib import Path
from typing import Any

from rl_core.config.reward import FunctionReward
from rl_core.data import values
from rl_core.data.generate import create, row
from rl_core.data.prompts import Prompt
from rl_core.rewards import Judgement, Reward

SIGNATURE = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"


def prompt(**fields: Any) -> Prompt:
    return Prompt(
        **{
            "prompt_id": "a" * 64,
            "input_ids": [1],
            "text": "<u>1+1=",
            "question": "1+1=",
            "ground_truth": "2",
            "data_source": "sums",
            "extra_info": {"level": 3},
        }
        | fields
    )


def gym_prompt(name: str, index: int = 0, **options: Any) -> Prompt:
    """As it comes back from a shard."""
    made = row(create(name, 3, 1, options)[index], {"dataset": name, "options": options})
    extra = values.loads(values.dumps({key: made[key] for key in ("metadata", "entry", "generator")}))
    return prompt(question=made["prompt"], ground_truth=made["answer"], data_source=name, extra_info=extra)


def function(tmp_path: Path, code: str, name: str = "compute_score", **settings: Any) -> FunctionReward:
    """Judged in this process, unless the settings say otherwise."""
    path = tmp_path / "reward.py"
    path.write_text(code, encoding="utf-8")
    return FunctionReward(**{"kind": "function", "path": str(path), "name": name, "timeout_s": None} | settings)


def judged(reward: Reward | None, prompts: list[Prompt], texts: list[str]) -> list[Judgement]:
    """Each response has one token for each character, and an end token."""
    assert reward is not None
    return reward(prompts, texts, [[*map(ord, text), 1] for text in texts])


def scores(reward: Reward | None, prompts: list[Prompt], texts: list[str]) -> list[float]:
    return [judgement.score for judgement in judged(reward, prompts, texts)]
