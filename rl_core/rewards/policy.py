"""What becomes of responses that cannot be judged, and the rewards that ask a judge on this machine."""

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rl_core.config.reward import FallibleReward
from rl_core.errors import RewardError
from rl_core.rewards.isolated import IsolatedJudge
from rl_core.rewards.judgement import Failure, Judgement, Sample
from rl_core.rewards.judges import Judge, attempt, make_judge

if TYPE_CHECKING:  # a reward is built and fingerprinted in runs that need no pyarrow
    from rl_core.data.prompts import Prompt

log = logging.getLogger(__name__)


def samples_of(prompts: "list[Prompt]", responses: list[str], ids: list[list[int]]) -> list[Sample]:
    """Prompts and responses as judges get them."""
    return [
        Sample(p.prompt_id, p.question, p.ground_truth, p.data_source, p.extra_info, response, tokens)
        for p, response, tokens in zip(prompts, responses, ids, strict=True)
    ]


class Policy:
    """Applies `on_error`.

    Args:
        name: what judges, for messages.
        field: the section, for messages.
    """

    def __init__(self, config: FallibleReward, name: str, field: str) -> None:
        self._value = config.error_value if config.on_error == "value" else None
        self._name, self._field = name, field
        self._warned: set[str] = set()

    def settle(self, sample: Sample, result: Judgement | Failure) -> Judgement:
        """The judgement, or what stands for it.

        Raises:
            RewardError: it failed, and that is not to be borne.
        """
        if isinstance(result, Judgement):
            return result
        if result.kind == "usage":
            raise RewardError(result.said) from result.error
        message = f"{self._field}: {self._name} {result.said} on {sample}. {result.remedy}"
        if self._value is None:
            raise RewardError(f"{message} Or let {self._field}.on_error = value count such responses.") from result.error
        if result.kind not in self._warned:
            self._warned.add(result.kind)
            log.warning("%s Such a response is worth %g; further ones are counted, not named.", message, self._value)
        return Judgement(self._value, failed=result.kind)

    def only_together(self, count: int, failure: Failure) -> None:
        """Say, once, that many responses cannot be judged by one call though each can alone: slow, and seldom meant."""
        if "together" not in self._warned:
            self._warned.add("together")
            log.warning(
                "%s: %s %s when given %d responses at once, yet judges each of them alone; they are given one by one. %s",
                self._field,
                self._name,
                failure.said,
                count,
                failure.remedy,
            )


class InProcess:
    """Runs a judge here, without a limit."""

    def __init__(self, judge: Judge) -> None:
        self._judge, self.batched = judge, judge.batched

    def run(self, chunks: list[list[Sample]]) -> Iterator[list[Judgement | Failure] | Failure]:
        """One answer for each list of samples."""
        return (attempt(self._judge, samples) for samples in chunks)


class JudgedReward:
    """A reward whose judge runs on this machine, in a process of its own where there is a limit of time."""

    def __init__(self, config: FallibleReward, kind: str, settings: dict[str, Any], name: str, field: str) -> None:
        self._policy = Policy(config, name, field)
        if config.timeout_s is None:
            self._runner: InProcess | IsolatedJudge = InProcess(make_judge(kind, settings))
        else:
            self._runner = IsolatedJudge(kind, settings, config.timeout_s, field)

    def __call__(self, prompts: "list[Prompt]", responses: list[str], ids: list[list[int]]) -> list[Judgement]:
        """One judgement for each response.

        Raises:
            RewardError: a response cannot be judged, and `on_error` says to stop; the sample is named.
        """
        samples = samples_of(prompts, responses, ids)
        return [self._policy.settle(sample, result) for sample, result in self._results(samples)]

    def _results(self, samples: list[Sample]) -> Iterable[tuple[Sample, Judgement | Failure]]:
        together: Judgement | Failure | None = None
        if self._runner.batched and len(samples) > 1:
            (answer,) = self._runner.run([samples])
            if isinstance(answer, list) and any(isinstance(result, Judgement) for result in answer):
                yield from zip(samples, answer, strict=True)
                return
            # All of them failed at once: only one of them may be at fault, so each is judged alone.
            together = answer if isinstance(answer, Failure) else answer[0]
        failed = False
        for sample, answer in zip(samples, self._runner.run([[sample] for sample in samples]), strict=True):
            result = answer if isinstance(answer, Failure) else answer[0]
            failed = failed or isinstance(result, Failure)
            yield sample, result
        if isinstance(together, Failure) and not failed:
            self._policy.only_together(len(samples), together)
