"""A real service on this machine: what it is asked, what it may answer, and what happens when it does not."""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rl_core.config import parse_config
from rl_core.config.reward import HttpReward
from rl_core.errors import ConfigError, RewardError
from rl_core.rewards import build_reward, http, probe, reward_fingerprint
from tests.rl_core.rewards.samples import judged, prompt, scores

SECRET = "a-secret-that-nobody-may-read"
Answer = Callable[[list[dict[str, Any]]], tuple[int, bytes]]


class Service(ThreadingHTTPServer):
    """Answers as a test says, and keeps what it was asked."""

    daemon_threads = True
    answer: Answer
    asked: list[tuple[dict[str, str], list[dict[str, Any]]]]
    over: threading.Event
    """Set when the test is over: what hangs waits for it."""


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Service)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((dict(self.headers), body["samples"]))
        status, reply = self.server.answer(body["samples"])
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    do_GET = do_POST

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(http, "FIRST_PAUSE", 0.01)
    server = Service(("127.0.0.1", 0), Handler)
    server.asked, server.over = [], threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def at(service: Service, **settings: Any) -> HttpReward:
    return HttpReward(**{"kind": "http", "url": f"http://127.0.0.1:{service.server_port}/judge"} | settings)


def replies(entries: list[Any]) -> Answer:
    return lambda samples: (200, json.dumps({"scores": entries[: len(samples)]}).encode())


def lengths(samples: list[dict[str, Any]]) -> tuple[int, bytes]:
    return 200, json.dumps({"scores": [len(sample["response"]) for sample in samples]}).encode()


def test_what_it_is_sent_and_what_comes_back(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service.answer = replies([1, {"score": 0.5, "clarity": 2, "why": "short"}, [0.5, 1.5], None])
    monkeypatch.setenv("TOKEN_OF_A_TEST", SECRET)
    headers = {"Authorization": "Bearer $TOKEN_OF_A_TEST", "X-Both": "a${TOKEN_OF_A_TEST}b"}
    reward = build_reward(at(service, headers=headers))
    result = judged(reward, [prompt(extra_info={"level": 3, "pair": (1, 2)})] + [prompt()] * 3, ["ab", "", "c", "d"])
    assert [(j.score, j.tokens, j.extras) for j in result[:3]] == [
        (1, None, {}),
        (0.5, None, {"clarity": 2}),
        (2, [0.5, 1.5], {}),
    ]
    assert [j.failed for j in result] == [None, None, None, "not_applicable"]
    ((headers, samples),) = service.asked
    assert (headers["Authorization"], headers["X-Both"]) == (f"Bearer {SECRET}", f"a{SECRET}b")
    assert headers["Content-Type"] == "application/json"
    assert samples[1] == {
        "prompt_id": "a" * 64, "question": "1+1=", "ground_truth": "2", "data_source": "sums", "extra_info": {"level": 3},
        "response": "", "response_ids": [1],
    }  # fmt: skip
    assert samples[0]["response_ids"] == [97, 98, 1]


def test_so_many_at_once(service: Service) -> None:
    service.answer = lengths
    texts = ["a" * length for length in range(7)]
    assert scores(build_reward(at(service, batch_size=3)), [prompt()] * 7, texts) == [0, 1, 2, 3, 4, 5, 6]
    assert [len(samples) for _, samples in service.asked] == [3, 3, 1]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_it_is_asked_again_where_that_may_help(service: Service, status: int) -> None:
    service.answer = lambda samples: lengths(samples) if len(service.asked) == 3 else (status, b"busy")
    assert scores(build_reward(at(service, retries=2)), [prompt()], ["abc"]) == [3.0]
    assert len(service.asked) == 3


@pytest.mark.parametrize(
    ("status", "reply", "words", "asked"),
    [
        (500, b"", ["answers with status 500"], 2),
        (404, b"", ["answers with status 404"], 1),
        (302, b"", ["answers with status 302"], 1),
        (200, b"<html>", ["returns b'<html>', which is no JSON"], 1),
        (200, b"[1]", ["returns [1] for 1 samples", '{"scores": [']  , 1),
        (200, b'{"scores": [1, 2]}', ["returns 2 scores for 1 samples"], 1),
        (200, b'{"scores": ["good"]}', ["returns 'good', which is no finite number"], 1),
        (200, b'{"scores": [NaN]}', ["returns nan"], 1),
        (200, b'{"scores": [[1]]}', ["1 numbers for the 2 tokens"], 1),
    ],
)  # fmt: skip
def test_answers_that_are_none(service: Service, status: int, reply: bytes, words: list[str], asked: int) -> None:
    service.answer = lambda samples: (status, reply)
    with pytest.raises(RewardError) as caught:
        judged(build_reward(at(service, retries=1)), [prompt()], ["x"])
    assert all(word in str(caught.value) for word in [*words, f"reward: the service at {at(service).url}"]), caught.value
    assert len(service.asked) == asked


def hang(samples: list[dict[str, Any]], service: Service) -> tuple[int, bytes]:
    if samples[0]["response"] == "hang":
        service.over.wait()
    return lengths(samples)


def test_a_request_that_hangs_costs_its_own_responses(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    service.answer = lambda samples: hang(samples, service)
    config = at(service, batch_size=1, retries=1, timeout_s=2.0, on_error="value", error_value=-1.0)
    with caplog.at_level(logging.WARNING):
        result = judged(build_reward(config), [prompt()] * 3, ["a", "hang", "bb"])
    assert [(j.score, j.failed) for j in result] == [(1, None), (-1, "timeout"), (2, None)]
    assert len(service.asked) == 4
    assert "takes longer than reward.timeout_s = 2 s" in caplog.text


def test_nobody_there_is_found_on_trial(service: Service) -> None:
    config = at(service, retries=1, on_error="value")
    service.socket.close()
    with pytest.raises(RewardError, match="none of 2 responses on trial"):
        probe(build_reward(config), [prompt()] * 2)
    with pytest.raises(RewardError, match=r"cannot be asked \(ConnectionRefusedError"):
        probe(build_reward(config.model_copy(update={"on_error": "raise"})), [prompt()] * 2)


def test_a_secret_is_nowhere(service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TOKEN_OF_A_TEST", SECRET)
    service.answer = lambda samples: (500, SECRET.encode())
    values = {"kind": "http", "url": at(service).url, "headers": {"Authorization": "$TOKEN_OF_A_TEST"}, "retries": 0}
    config = parse_config({"model": {"name_or_path": "m"}, "reward": values})
    assert SECRET not in config.model_dump_json() + json.dumps([config.training_identity(), reward_fingerprint(config.reward)])
    with pytest.raises(RewardError) as caught:
        judged(build_reward(config.reward), [prompt()], ["x"])
    assert SECRET not in str(caught.value) + caplog.text
    monkeypatch.delenv("TOKEN_OF_A_TEST")
    with pytest.raises(ConfigError, match=r"reward.headers: the environment variable TOKEN_OF_A_TEST is not set"):
        build_reward(config.reward)
    with pytest.raises(ConfigError) as refused:
        parse_config({"model": {"name_or_path": "m"}, "reward": values | {"headers": {"Authorization": f"Bearer {SECRET}"}}})
    assert "reward.headers.Authorization" in str(refused.value)
    assert SECRET not in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        parse_config({"model": {"name_or_path": "m"}, "reward": values | {"url": f"http://me:{SECRET}@host/"}})
    assert "reward.url" in str(refused.value)
    assert SECRET not in str(refused.value)
