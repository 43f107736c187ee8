"""Generation in slots: rows that are done leave, waiting prompts take their place, so a ragged batch costs what it generates.

All rows decode together, one token a step, over the static cache. What a step needs to know is on the device; the host looks
every few steps, takes finished responses out and fills the free slots by one forward of waiting prompts, packed. The last token
of a prompt is the first input of the decoding, so a prompt that another slot holds already is copied and not computed again.
"""

import time
from collections import deque
from functools import partial
from typing import Any

import torch

from rl_core.rollout.batch import PAD_ID, RolloutBatch
from rl_core.rollout.cache import Layer, Layout, Rows, attending
from rl_core.rollout.requests import Requests
from rl_core.rollout.runner import Runner
from rl_core.rollout.sampling import non_finite, row_keys
from rl_core.rollout.slots import Slots

PACKED = 8192
"""Tokens of prompts computed together, at most (a longer prompt by itself)."""
_ROUND = 64
"""Capacity and the number of end tokens grow in steps, so that what was captured for them serves the next batch too."""


class SlotDecoder:
    """Draws responses with a transformers module whose attention `cache.attend` serves."""

    def __init__(self, model: Any, layout: Layout, runner: Runner) -> None:
        self._model, self._layout, self.runner = model, layout, runner
        self._device: torch.device = model.device
        self._slots: Slots | None = None
        self._keys = self._values = torch.empty(0)
        self._held: list[int] = []
        """For each slot the request whose prompt its cache begins with; -1: none."""
        self.seconds = {"prefill_s": 0.0, "decode_s": 0.0}
        """Of the last `generate`, as the host sees them."""
        self._rows = Rows(kernels=runner.kernels)

    def release(self) -> None:
        """Give back the memory of the cache, and what was captured with it."""
        self.runner.reset()
        self._slots, self._keys, self._values = None, torch.empty(0), torch.empty(0)
        for module in self._layout.modules:
            vars(module).pop("rollout", None)

    @torch.no_grad()
    def generate(self, requests: Requests, concurrency: int) -> RolloutBatch:
        """Draw one response for each request (at least one), `concurrency` of them at a time.

        Returns:
            The rows in the order of the requests, on the model's device.

        Raises:
            NonFiniteError: a logit is infinite or NaN.
        """
        slots = self._room(requests, min(concurrency, len(requests)))
        self._held = [-1] * len(slots.live)
        results = _Results(requests, self._device)
        # Equal prompts come together; those of similar length too.
        order = sorted(range(len(requests)), key=lambda row: (len(requests.prompts[row]), requests.prompts[row]))
        waiting, running = deque(order), [-1] * min(concurrency, len(requests))
        enough = max(1, len(running) // 8)  # a forward of prompts costs about as much as a step, however few they are
        self.runner.begin(requests)
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        with attending(self._model.config), self.runner.running():
            while True:
                free = [slot for slot, request in enumerate(running) if request < 0]
                if waiting and len(free) >= min(enough, len(waiting)):
                    taken = [(slot, waiting.popleft()) for slot in free[: len(waiting)]]
                    began = time.perf_counter()
                    self._fill(slots, requests, taken)
                    self.runner.wait()
                    self.seconds["prefill_s"] += time.perf_counter() - began
                    for slot, request in taken:
                        running[slot] = request
                if max(running) < 0:
                    return results.batch()
                began = time.perf_counter()
                rows = self._narrow(slots, running)
                for _ in range(self.runner.steps):
                    self.runner.run(rows, partial(self._step, slots.first(rows)))
                self._look(slots, requests, running, results)
                self.seconds["decode_s"] += time.perf_counter() - began

    def _room(self, requests: Requests, size: int) -> Slots:
        """Slots for the requests: those of before where they suffice."""
        longest = max(len(prompt) + limit for prompt, limit in zip(requests.prompts, requests.limits, strict=True))
        ends = max(map(len, requests.stops))
        size, capacity, ends = self.runner.size(size), -(-longest // _ROUND) * _ROUND, max(4, ends)
        old = self._slots
        if old is not None and size <= len(old.live) and ends <= old.stops.shape[1] and capacity <= self._keys.shape[2]:
            return old
        if old is not None:
            size, ends = max(size, len(old.live)), max(ends, old.stops.shape[1])
            capacity = max(capacity, self._keys.shape[2])
        self.release()
        [(heads, width)] = self._layout.shapes
        shape = len(self._layout.modules), size, capacity, heads, width
        self._keys, self._values = (torch.zeros(shape, dtype=self._model.dtype, device=self._device) for _ in range(2))
        for module, keys, values in zip(self._layout.modules, self._keys, self._values, strict=True):
            module.rollout = Layer(self._rows, keys, values)  # type: ignore[assignment]
        self._slots = Slots.empty(size, capacity, ends, self._device)
        return self._slots

    def _fill(self, slots: Slots, requests: Requests, taken: list[tuple[int, int]]) -> None:
        """Put requests into slots: (slot, request) each."""
        prompts, chosen = requests.prompts, [request for _, request in taken]
        held = {tuple(prompts[request]): slot for slot, request in enumerate(self._held) if request >= 0}
        fresh: dict[tuple[int, ...], int] = {}
        early: list[tuple[int, int]] = []
        late: list[tuple[int, int]] = []
        for slot, request in taken:
            prompt = tuple(prompts[request])
            if prompt in held:
                early.append((held[prompt], slot))
            elif prompt in fresh:
                late.append((fresh[prompt], slot))
            else:
                fresh[prompt] = slot
        longest = max(len(prompts[request]) for request in chosen) - 1
        self._copy(early, longest)
        self._prefill([(slot, prompt[:-1]) for prompt, slot in fresh.items() if len(prompt) > 1])
        self._copy(late, longest)
        for slot, request in taken:
            self._held[slot] = request
        keys = row_keys(requests.seed, requests.step, torch.tensor([requests.numbers[request] for request in chosen]))
        columns = (
            torch.tensor([slot for slot, _ in taken]),
            torch.tensor([prompts[request][-1] for request in chosen]),
            torch.tensor([len(prompts[request]) - 1 for request in chosen]),
            torch.tensor([requests.limits[request] for request in chosen]),
            requests.stops_of(chosen, slots.stops.shape[1]),
            keys,
        )
        slots.fill(*(column.to(self._device) for column in columns))

    def _prefill(self, prompts: list[tuple[int, tuple[int, ...]]]) -> None:
        """Compute keys and values of prompts, each for its slot."""
        while prompts:
            count, total = 1, len(prompts[0][1])
            while count < len(prompts) and total + len(prompts[count][1]) <= PACKED:
                total += len(prompts[count][1])
                count += 1
            self._forward_packed(prompts[:count])
            prompts = prompts[count:]

    def _forward_packed(self, prompts: list[tuple[int, tuple[int, ...]]]) -> None:
        lengths = [len(ids) for _, ids in prompts]
        cuts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        places = [place for length in lengths for place in range(length)]
        slots = [slot for (slot, _), length in zip(prompts, lengths, strict=True) for _ in range(length)]
        packed = torch.tensor([[token for _, ids in prompts for token in ids], places, slots]).to(self._device)
        rows = self._rows
        rows.decoding, rows.places, rows.slots = False, packed[1], packed[2]
        rows.longest = -(-max(lengths) // 256) * 256
        rows.bounds = torch.tensor(cuts, dtype=torch.int32).to(self._device)
        rows.cuts = () if rows.kernels else tuple(cuts)
        self.runner.prefill(
            lambda: self._model(input_ids=packed[:1], position_ids=packed[1:2], use_cache=False, logits_to_keep=1)
        )

    def _copy(self, pairs: list[tuple[int, int]], length: int) -> None:
        """Copy the first `length` places of the cache from slot to slot, all at once."""
        pairs = [(source, target) for source, target in pairs if source != target]
        if pairs and length:
            source, target = torch.tensor(pairs).T.to(self._device)
            for held in (self._keys, self._values):
                held[:, target, :length] = held[:, source, :length]

    def _narrow(self, slots: Slots, running: list[int]) -> int:
        """The number of first slots that are to be computed; live rows are moved together where that makes it smaller."""
        live = [slot for slot, request in enumerate(running) if request >= 0]
        wanted, now = self.runner.size(len(live)), self.runner.size(live[-1] + 1)
        if wanted < now:
            gaps = [slot for slot in range(len(live)) if running[slot] < 0]
            pairs = list(zip(live[-len(gaps) :], gaps, strict=True))
            self._copy(pairs, int(slots.position[live].max()))
            source, target = torch.tensor(pairs).T.to(self._device)
            slots.move(source, target)
            for old, new in pairs:
                running[new], running[old] = running[old], -1
                self._held[new], self._held[old] = self._held[old], -1
        return wanted

    def _step(self, slots: Slots) -> None:
        """One token for each of the given rows, which are the first ones."""
        rows = self._rows
        rows.decoding, rows.places = True, slots.position
        if not rows.kernels:
            rows.slots = torch.arange(len(slots.position), device=self._device)
            length = self._keys.shape[2] if self.runner.captures else int(slots.position.max()) + 1
            rows.seen = (torch.arange(length, device=self._device) <= slots.position[:, None])[:, None, None]
        logits = self._model(
            input_ids=slots.token[:, None], position_ids=slots.position[:, None], use_cache=False, logits_to_keep=1
        ).logits[:, -1]
        self.runner.finish(logits, slots)

    def _look(self, slots: Slots, requests: Requests, running: list[int], results: "_Results") -> None:
        """Take the responses of the rows that are done."""
        live, bad = torch.stack([slots.live, slots.bad]).tolist()
        if any(bad[slot] for slot, request in enumerate(running) if request >= 0):
            rows = [slot for slot, request in enumerate(running) if request >= 0]
            numbers = torch.tensor([requests.numbers[running[slot]] for slot in rows])
            error = non_finite(slots.bad[rows].cpu(), numbers, slots.produced[rows].cpu(), requests.step)
            self.release()  # the cache may hold what is not finite, and no mask hides that
            raise error
        done = [slot for slot, request in enumerate(running) if request >= 0 and not live[slot]]
        if done:
            results.take(slots, done, [running[slot] for slot in done])
            for slot in done:
                running[slot] = -1


class _Results:
    """Responses as they come, [N, W] on the device."""

    def __init__(self, requests: Requests, device: torch.device) -> None:
        self._requests, self._device = requests, device
        count, width = len(requests), max(requests.limits)
        self._tokens = torch.full((count, width), PAD_ID, device=device)
        self._logprobs = torch.zeros(count, width, device=device)
        self._lengths = torch.zeros(count, dtype=torch.long, device=device)
        self._stopped = torch.zeros(count, dtype=torch.bool, device=device)

    def take(self, slots: Slots, rows: list[int], requests: list[int]) -> None:
        """Take the responses of the slots `rows`, which answer `requests`."""
        source, target = torch.tensor([rows, requests]).to(self._device)
        width = self._tokens.shape[1]
        self._tokens[target], self._logprobs[target] = slots.tokens[source, :width], slots.logprobs[source, :width]
        self._lengths[target], self._stopped[target] = slots.produced[source], slots.stopped[source]

    def batch(self) -> RolloutBatch:
        """All rows in the order of the requests."""
        prompts = [len(prompt) for prompt in self._requests.prompts]
        lengths = torch.tensor(prompts, device=self._device)
        width = max(1, int(self._lengths.max()))
        longest = max(prompts)
        padded = [prompt + [PAD_ID] * (longest - len(prompt)) for prompt in self._requests.prompts]
        ids = torch.full((len(prompts), longest + width), PAD_ID, device=self._device)
        ids[:, :longest] = torch.tensor(padded).to(self._device)
        columns = torch.arange(width, device=self._device)
        inside = columns < self._lengths[:, None]
        tokens = self._tokens[:, :width].masked_fill(~inside, PAD_ID)
        ids.scatter_(1, lengths[:, None] + columns, tokens)
        total = int((lengths + self._lengths).max())
        return RolloutBatch(
            input_ids=ids[:, :total].clone(),
            prompt_length=lengths,
            response_length=self._lengths,
            truncated=~self._stopped,
            sample_index=torch.tensor(self._requests.numbers, device=self._device),
            logprobs=self._logprobs[:, :width].masked_fill(~inside, 0.0),
        )
