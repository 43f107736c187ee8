"""The inputs whose outputs by other libraries are kept: ragged rows with all the shapes that masks come in."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MASK = [
    "1111111",
    "1110000",
    "1011010",  # gaps
    "0010111",  # begins late
    "1000000",  # one token
    "1100000",
    "1111000",  # the same score as the row before
    "0000000",  # empty
    "1111100",
    "1101100",
]
GROUP = [40, 40, 40, 7, 7, 12, 12, 3, -1, 40]
"""Numbers of prompts in no order; 3 and -1 have one response, that of 3 is empty."""


def inputs() -> dict[str, Tensor]:
    """All tensors [10, 7], or [10]; numbers of three decimals, so that the file keeps them exactly."""
    generator = torch.Generator().manual_seed(20)
    mask = torch.tensor([[place == "1" for place in row] for row in MASK])
    group = torch.tensor(GROUP)

    def normal(scale: float = 1.0) -> Tensor:
        return torch.randn(mask.shape, generator=generator, dtype=torch.float64) * scale

    rewards = torch.where(mask, normal(), 0.0)
    rewards[5], rewards[6] = 0.0, 0.0
    rewards[5, 1] = rewards[6, 3] = 0.3
    old = -normal(1.5).abs()
    logprobs = old + normal(0.4)
    advantages = normal()
    logprobs[0, 1], advantages[0, 1] = old[0, 1] + 1.5, -0.7  # the dual clip decides
    logprobs[1, 0], advantages[1, 0] = old[1, 0] + 0.9, 1.2  # the upper clip decides
    logprobs[9, 1], advantages[9, 0] = old[9, 1] + 1.6, -0.9  # the dual clip again, for losses by the first token's advantage
    ref = logprobs + normal(0.5)
    ref[0, 3], ref[9, 0] = logprobs[0, 3] + 23.0, logprobs[9, 0] - 8.0  # past the bounds of k3
    rollout = old + normal(0.3)
    rollout[8, 2] = old[8, 2] - 1.4
    values = normal()
    made = {
        "mask": mask,
        "group": group,
        "rewards": rewards,
        "values": values,
        "baseline": torch.randn(60, generator=generator, dtype=torch.float64)[group],
        "old_logprobs": old,
        "logprobs": logprobs,
        "advantages": advantages,
        "ref_logprobs": ref,
        "rollout_logprobs": rollout,
        "new_values": values + normal(0.5),
        "returns": values + normal(),
    }
    return {name: tensor.mul(1000).round().div(1000) if tensor.is_floating_point() else tensor for name, tensor in made.items()}


def write(name: str, about: dict[str, str], outputs: dict[str, Any]) -> None:
    """Keep inputs and outputs, tensors as lists with ten digits."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(part) for key, part in value.items()}
        if isinstance(value, Tensor):
            return plain(value.int().tolist() if value.dtype == torch.bool else value.tolist())
        if isinstance(value, list):
            return [plain(part) for part in value]
        return float(f"{value:.10g}") if isinstance(value, float) else value

    parts = {"about": about, "inputs": plain(inputs()), "outputs": plain(outputs)}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in parts.items() if key == "about"]
    for section in ("inputs", "outputs"):
        rows = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in parts[section].items()]
        lines.append(f' "{section}": {{\n' + ",\n".join(rows) + "\n }")
    (Path(__file__).parent / name).write_text("{\n" + ",\n".join(lines) + "\n}\n")
