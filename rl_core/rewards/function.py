"""A user's Python function as a reward, with verl's signature or TRL's; see `FunctionReward`."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from rl_core.errors import RewardError
from rl_core.rewards.judgement import Failure, Judgement, Sample, read
from rl_core.user_code import code_fingerprint, load_from_module, load_function, module_fingerprint

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL = ("prompts", "completions", "completion_ids")


class FunctionJudge:
    """Calls the function, arguments by keyword.

    Args:
        field: the section, for messages.
        answer_column: the name under which the data has `ground_truth`, so that a function can have it under that name.

    Attributes:
        batched: it takes lists of responses (TRL's signature).
        home: the function's file, whose lines are named where it raises.

    Raises:
        ConfigError: no such file, module or function, or it raises when it is imported.
        RewardError: the function takes other arguments.
    """

    def __init__(
        self, field: str, path: str | None, module: str | None, name: str, completions: str, answer_column: str | None
    ) -> None:
        if path is not None:
            self._function = load_function(path, name, field)
        else:
            self._function = load_from_module(str(module), name, field)
        self._where, self._field, self._name = path or module, field, name
        self._messages, self._answer_column = completions == "messages", answer_column
        self._loop: asyncio.AbstractEventLoop | None = None
        self.home: str | None = getattr(getattr(self._function, "__code__", None), "co_filename", None)
        self._required, self._named, self._any = _parameters(self._function)
        self.batched = bool(self._named & set(TRL))
        if self._messages and not self.batched:
            raise RewardError(f"{self._takes()}; {field}.completions = messages is for those that take {' and '.join(TRL)}.")
        if not self.batched:
            given = (set(VERL) if self._any else self._named & set(VERL)) | (self._named & {"response_ids"})
            if not given & {"solution_str", "response_ids"} or not self._required <= given:
                raise RewardError(
                    f"{self._takes()}: it must take the keyword arguments {', '.join(VERL)}, or {' and '.join(TRL)}."
                )

    def judge(self, samples: list[Sample]) -> list[Judgement | Failure]:
        """One judgement for each sample; a function that takes single responses gets one sample."""
        if self.batched:
            return self._judge_all(samples)
        (sample,) = samples
        given: dict[str, Any] = {
            "data_source": sample.data_source,
            "solution_str": sample.response,
            "ground_truth": sample.ground_truth,
            "extra_info": sample.extra_info,
        }
        if "response_ids" in self._named:
            given["response_ids"] = sample.response_ids
        return [read(self._call(given), len(sample.response_ids), may_be_none=False)]

    def _judge_all(self, samples: list[Sample]) -> list[Judgement | Failure]:
        logged: dict[str, float] = {}
        questions, responses = [sample.question for sample in samples], [sample.response for sample in samples]
        given: dict[str, Any] = self._columns(samples)
        given |= {"prompts": questions, "completions": responses, "completion_ids": [sample.response_ids for sample in samples]}
        if self._messages:
            given["prompts"] = [[{"role": "user", "content": text}] for text in questions]
            given["completions"] = [[{"role": "assistant", "content": text}] for text in responses]
        given["log_metric"] = logged.__setitem__
        if missing := sorted(self._required - set(given)):
            columns = ", ".join(sorted(set(given) - {*TRL, "log_metric"}))
            raise RewardError(
                f"{self._takes()}, but the data has no column {' or '.join(missing)} (it has {columns}). Name the parameter as "
                "the column, or give it a default."
            )
        values = self._call(given)
        if hasattr(values, "tolist"):
            values = values.tolist()
        if not isinstance(values, (list, tuple)) or len(values) != len(samples):
            what = f"{len(values)} values" if isinstance(values, (list, tuple)) else f"{type(values).__name__}, which is no list,"
            return [Failure("invalid", f"returns {what} for {len(samples)} responses", "Return one value for each.")] * len(
                samples
            )
        pairs = zip(samples, values, strict=True)
        results = [read(value, len(sample.response_ids), may_be_none=True) for sample, value in pairs]
        extras = {name: float(value) for name, value in logged.items()}
        return [result._replace(extras=extras | result.extras) if isinstance(result, Judgement) else result for result in results]

    def _columns(self, samples: list[Sample]) -> dict[str, list[Any]]:
        """The data's columns as TRL names them: as they are called there."""
        columns: dict[str, list[Any]] = {"data_source": [sample.data_source for sample in samples]}
        for name in filter(None, ("ground_truth", self._answer_column)):
            columns[name] = [sample.ground_truth for sample in samples]
        for name in dict.fromkeys(name for sample in samples for name in sample.extra_info):
            columns[str(name)] = [sample.extra_info.get(name) for sample in samples]
        return columns

    def _call(self, given: dict[str, Any]) -> Any:
        value = self._function(**{name: item for name, item in given.items() if self._any or name in self._named})
        if inspect.isawaitable(value):
            self._loop = self._loop or asyncio.new_event_loop()
            value = self._loop.run_until_complete(value)
        return value

    def _takes(self) -> str:
        signature = inspect.signature(self._function)
        return f"{self._field}.name = {self._name}: the function in {self._where} takes {signature}"


def _parameters(function: Callable[..., Any]) -> tuple[set[str], set[str], bool]:
    """Names that a function must get, names that it can get, and whether it takes any other."""
    kinds = inspect.Parameter
    parameters = inspect.signature(function).parameters.values()
    single = [p for p in parameters if p.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)]
    return (
        {p.name for p in single if p.default is kinds.empty},
        {p.name for p in single if p.kind is not kinds.POSITIONAL_ONLY},
        any(p.kind is kinds.VAR_KEYWORD for p in parameters),
    )


def fingerprint(path: str | None, module: str | None, name: str, completions: str, field: str) -> dict[str, Any]:
    """Name of the function, digests of its file and of what that imports. Runs nothing of it.

    Raises:
        ConfigError: no such file or module, or one that is no Python.
    """
    code = module_fingerprint(str(module), field) if path is None else code_fingerprint(path, field)
    return {"kind": "function", "name": name, "completions": completions, **code}
