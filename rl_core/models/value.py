"""The critic: the backbone of the base model with a linear head to one number."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rl_core.models.policy import response_positions
from rl_core.models.ulysses import last_hidden_states, sum_over_ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rl_core.groups import Group


class ValueModel(nn.Module):
    """Wraps a transformers backbone (`.backbone`); `.value_head` starts at zero and computes in float32."""

    def __init__(self, backbone: "PreTrainedModel", group: "Group | None" = None) -> None:
        """`group` as for `PolicyModel`."""
        super().__init__()
        self.backbone = backbone
        self._sequence_group = None if group is None else group.sequence_group
        hidden_size = backbone.config.get_text_config().hidden_size
        self.value_head = nn.Linear(hidden_size, 1, dtype=torch.float32, device="meta")

    def forward(self, input_ids: Tensor, prompt_length: Tensor, response_length: Tensor, width: int) -> Tensor:
        """Values of the states in which the response tokens were chosen: at the position before each.

        Args:
            input_ids: [B, T] prompt and response of each row, padded on the right with any valid id.
            prompt_length: [B], at least 1.
            response_length: [B], 0 to `width`.
            width: R, columns of the result.

        Returns:
            [B, R] float32; zero beyond a row's length.
        """
        hidden, here = last_hidden_states(self.backbone, input_ids, self._sequence_group)
        rows, columns, positions = response_positions(prompt_length, response_length, width, here)
        states = hidden[rows, positions - here.start if here else positions]
        values = self.value_head(states.float()).squeeze(-1)
        blank = torch.zeros(len(input_ids), width, device=input_ids.device)
        return sum_over_ranks(blank.index_put((rows, columns), values), self._sequence_group)
