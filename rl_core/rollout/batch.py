"""Prompts with the responses drawn for them, as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import pad

PAD_ID = 0
"""What stands behind a row's end. Any id would do: which tokens count is known from the lengths alone."""


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """B rows; each is prompt, response, padding. T is the longest row, R the longest response (both at least 1)."""

    input_ids: Tensor
    """[B, T] long."""
    prompt_length: Tensor
    """[B] long, tokens."""
    response_length: Tensor
    """[B] long, tokens, the end token included; 0 is legal."""
    truncated: Tensor
    """[B] bool: the response reached the greatest length without an end token."""
    sample_index: Tensor
    """[B] long: number of the sample in its step over all ranks; -1 for a dummy row."""
    logprobs: Tensor
    """[B, R] float32 of the response's tokens under the policy and temperature they were drawn with; 0 behind the end."""

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def width(self) -> int:
        """R."""
        return self.logprobs.shape[1]

    @property
    def mask(self) -> Tensor:
        """[B, R] bool: the response's tokens."""
        return torch.arange(self.width, device=self.input_ids.device) < self.response_length[:, None]

    @property
    def responses(self) -> list[list[int]]:
        """The token ids of each response, end token included."""
        ends = zip(self.prompt_length.tolist(), self.response_length.tolist(), strict=True)
        return [row[start : start + length] for row, (start, length) in zip(self.input_ids.tolist(), ends, strict=True)]

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of each prompt."""
        return [row[:length] for row, length in zip(self.input_ids.tolist(), self.prompt_length.tolist(), strict=True)]

    def to(self, device: torch.device | str) -> "RolloutBatch":
        """The same rows on a device."""
        return RolloutBatch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    @classmethod
    def from_lists(
        cls,
        prompts: list[list[int]],
        responses: list[list[int]],
        logprobs: list[list[float]],
        truncated: list[bool],
        sample_index: list[int],
        device: torch.device | str = "cpu",
    ) -> "RolloutBatch":
        """Build from ragged lists with one entry a row."""
        sequences = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        assert [len(row) for row in logprobs] == [len(row) for row in responses], "a log-probability for each token"
        assert len(truncated) == len(sample_index) == len(sequences), "one entry a row"

        def ragged(rows: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> Tensor:
            width = max([1, *map(len, rows)])
            padded = [[*row, *[fill] * (width - len(row))] for row in rows]
            return torch.tensor(padded, dtype=dtype, device=device).reshape(len(rows), width)

        return cls(
            input_ids=ragged(sequences, PAD_ID, torch.long),
            prompt_length=torch.tensor([len(row) for row in prompts], dtype=torch.long, device=device),
            response_length=torch.tensor([len(row) for row in responses], dtype=torch.long, device=device),
            truncated=torch.tensor(truncated, dtype=torch.bool, device=device),
            sample_index=torch.tensor(sample_index, dtype=torch.long, device=device),
            logprobs=ragged(logprobs, 0.0, torch.float32),
        )

    def select(self, rows: Sequence[int] | Tensor) -> "RolloutBatch":
        """The given rows in the given order, as narrow as they allow."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.input_ids.device)
        return RolloutBatch(**{field.name: getattr(self, field.name)[index] for field in fields(self)})._resized()

    @staticmethod
    def cat(batches: "list[RolloutBatch]") -> "RolloutBatch":
        """The rows of all batches (at least one), one after the other."""
        length = max(batch.input_ids.shape[1] for batch in batches)
        width = max(batch.width for batch in batches)
        wide = [batch._resized(length, width) for batch in batches]
        return RolloutBatch(
            **{field.name: torch.cat([getattr(batch, field.name) for batch in wide]) for field in fields(RolloutBatch)}
        )

    def pad_rows(self, count: int) -> "RolloutBatch":
        """Append dummy rows up to `count` rows: one prompt token, no response, hence no weight in any loss or statistic.

        With as many rows on every rank, all ranks run the same collectives.
        """
        missing = count - len(self)
        assert missing >= 0, f"{len(self)} rows do not fit in {count}"
        none: list[list[int]] = [[] for _ in range(missing)]
        dummies = RolloutBatch.from_lists(
            [[PAD_ID]] * missing, none, [[] for _ in none], [False] * missing, [-1] * missing, self.input_ids.device
        )
        return RolloutBatch.cat([self, dummies])

    def _resized(self, length: int | None = None, width: int | None = None) -> "RolloutBatch":
        """The same rows padded or cut to T = `length` and R = `width`; None: what the longest row needs."""
        if length is None or width is None:
            length = max([1, *(self.prompt_length + self.response_length).tolist()])
            width = max([1, *self.response_length.tolist()])
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        columns["input_ids"] = pad(self.input_ids, (0, length - self.input_ids.shape[1]), value=PAD_ID)
        columns["logprobs"] = pad(self.logprobs, (0, width - self.width))
        return RolloutBatch(**columns)
