"""Grade-school mathematics: is the final number of a response that of the worked solution?

A reward function in verl's signature, as an example for your own: `reward: {kind: function, path: configs/rewards/gsm8k.py}`.
"""

import re
from decimal import Decimal
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
FINAL = re.compile(r"####\s*(.*)")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    """1.0 for the right final number, written anyhow (`1,234.00` is 1234); 0.0 for another one or none.

    Args:
        solution_str: the response; what stands behind its last `####` is the answer, else its last number.
        ground_truth: the solution of the dataset, which ends with `#### 42`.
    """
    wanted, given = final_number(ground_truth), final_number(solution_str)
    return float(given is not None and given == wanted)


def final_number(text: str) -> Decimal | None:
    """The number behind the last `####`, else the last number of the text; None where there is none."""
    marked = FINAL.findall(text)
    numbers = NUMBER.findall(marked[-1])[:1] if marked else NUMBER.findall(text)[-1:]
    return Decimal(numbers[0].replace(",", "")) if numbers else None
