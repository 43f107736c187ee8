"""A reward for machines without reasoning-gym: 1 if the last number of the response is the answer, else 0."""

import re


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> float:
    """verl's signature."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", solution_str)
    return float(bool(numbers) and numbers[-1].replace(",", "") == ground_truth)
