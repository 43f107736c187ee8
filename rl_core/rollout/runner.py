"""How the steps of the decoding are run: one after the other here; see `graphs` for the GPU."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from rl_core.rollout.requests import Requests
from rl_core.rollout.sampling import draw
from rl_core.rollout.slots import Slots, advance


class Runner:
    """Runs each step as it stands."""

    seconds = 0.0
    """Spent on compiling and capturing."""
    kernels = False
    """Whether attention and sampling are those of `rl_core.rollout.kernels`."""
    captures = False
    """Whether steps are run again without the host, which then knows nothing of their rows."""
    steps = 1
    """Steps between two looks at what is finished."""

    def begin(self, requests: Requests) -> None:
        """Take note of what all rows have in common."""
        self._temperature: float | None = requests.temperature or None
        self._top_k, self._top_p = requests.top_k, requests.top_p

    def size(self, rows: int) -> int:
        """The number of rows that are computed where `rows` are wanted: no less."""
        return rows

    def running(self) -> AbstractContextManager[None]:
        """Within, the model is run."""
        return nullcontext()

    def prefill(self, forward: Callable[[], Any]) -> None:
        """Run the forward of packed prompts."""
        forward()

    def run(self, rows: int, step: Callable[[], None]) -> None:
        """Run `step`, which depends on nothing but the number of `rows` and the contents of tensors."""
        step()

    def finish(self, logits: Tensor, slots: Slots) -> None:
        """Draw a token for each row from its logits [B, V] and append it."""
        finite = logits.isfinite().all(dim=1)
        token, logprob = draw(logits, slots.keys, slots.produced, self._temperature, self._top_k, self._top_p)
        advance(slots, token, logprob, finite)

    def wait(self) -> None:
        """Until the device has done what it was given."""

    def reset(self) -> None:
        """Forget what depends on where the rows are in memory."""
