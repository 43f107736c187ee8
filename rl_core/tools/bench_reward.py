"""The reward of a bench: a number between 0 and 1 that looks random and takes no time."""

import zlib


def compute_score(solution_str: str) -> float:
    """The same for the same response."""
    return zlib.crc32(solution_str.encode()) % 1000 / 1000
