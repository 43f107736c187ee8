"""A service that judges responses; `HttpReward` says what it is sent and what it answers."""

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from rl_core.config.reward import HttpReward
from rl_core.data import values
from rl_core.errors import ConfigError
from rl_core.rewards.judgement import Failure, Judgement, Sample, read, short
from rl_core.rewards.policy import Policy, samples_of

if TYPE_CHECKING:
    from rl_core.data.prompts import Prompt

FIRST_PAUSE = 0.5
"""Seconds before the first further try; each later pause is twice as long."""
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected request would take its headers, secrets too, to another server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class HttpEndpoint:
    """Asks the service, one request after the other.

    Raises:
        ConfigError: a header names an environment variable that is not set.
    """

    def __init__(self, config: HttpReward, field: str) -> None:
        self._config, self._field = config, field
        self._policy = Policy(config, f"the service at {config.url}", field)
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._headers()

    def __call__(self, prompts: "list[Prompt]", responses: list[str], ids: list[list[int]]) -> list[Judgement]:
        """One judgement for each response.

        Raises:
            RewardError: the service gives none after all tries, and `on_error` says to stop.
        """
        samples, size = samples_of(prompts, responses, ids), self._config.batch_size
        judgements: list[Judgement] = []
        for start in range(0, len(samples), size):
            part = samples[start : start + size]
            pairs = zip(part, self._ask(part), strict=True)
            judgements += [self._policy.settle(sample, result) for sample, result in pairs]
        return judgements

    def _ask(self, samples: list[Sample]) -> list[Judgement | Failure]:
        body = values.dumps({"samples": [sample._asdict() for sample in samples]}).encode()
        for tried in range(self._config.retries + 1):
            if tried:
                time.sleep(FIRST_PAUSE * 2 ** (tried - 1))
            reply, again = self._request(body)
            if not again:
                break
        if isinstance(reply, Failure):
            return [reply] * len(samples)
        scores = reply.get("scores") if isinstance(reply, dict) else None
        if not isinstance(scores, list) or len(scores) != len(samples):
            what = f"{len(scores)} scores" if isinstance(scores, list) else short(reply)
            remedy = 'It must be {"scores": […]} with one entry for each sample.'
            return [Failure("invalid", f"returns {what} for {len(samples)} samples", remedy)] * len(samples)
        pairs = zip(samples, scores, strict=True)
        return [read(score, len(sample.response_ids), may_be_none=True) for sample, score in pairs]

    def _request(self, body: bytes) -> tuple[Any, bool]:
        """The reply's JSON or why there is none, and whether another try may help."""
        timeout, remedy = self._config.timeout_s, "Is it up, and can it be reached from here?"
        assert timeout is not None
        request = urllib.request.Request(self._config.url, body, self._headers() | {"Content-Type": "application/json"})
        deadline = time.monotonic() + timeout
        try:
            with self._opener.open(request, timeout=timeout) as response:
                text = b""
                while part := response.read1(1 << 20):
                    text += part
                    if time.monotonic() > deadline:
                        raise TimeoutError
        except urllib.error.HTTPError as error:
            with error:
                again = error.code == 429 or error.code >= 500
                said = f"answers with status {error.code} ({error.reason})"
                return Failure("error", said, "Its own log may say why."), again
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                said = f"takes longer than {self._field}.timeout_s = {timeout:g} s"
                return Failure("timeout", said, "Allow more, or lower batch_size."), True
            return Failure("error", f"cannot be asked ({type(reason).__name__}: {reason})", remedy), True
        try:
            return json.loads(text), False
        except ValueError:
            return Failure("invalid", f"returns {short(text)}, which is no JSON,", "See its own log."), False

    def _headers(self) -> dict[str, str]:
        """The header fields with the values of their variables."""

        def value(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            if name not in os.environ:
                raise ConfigError(f"{self._field}.headers: the environment variable {name} is not set. Set it for all ranks.")
            return os.environ[name]

        return {name: _VARIABLE.sub(value, text) for name, text in self._config.headers.items()}
