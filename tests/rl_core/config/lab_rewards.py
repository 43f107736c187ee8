"""Observations of rewards: what they say of some responses, where they are judged, and what a service is asked."""

import json
import os
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rl_core.config import Config
from tests.rl_core.config.lab import Observation, dataset_of

ASKED: list[dict[str, Any]] = []
SLOW_SECONDS = 1.0


class _Service(BaseHTTPRequestHandler):
    """`/other` gives other scores, `/down` none, `/slow` takes a second."""

    def do_POST(self) -> None:
        samples = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
        ASKED.append({"samples": len(samples), "key": self.headers["X-Key"], "path": self.path})
        if self.path == "/slow":
            threading.Event().wait(SLOW_SECONDS)
        scale = 0.5 if self.path == "/other" else 1.0
        reply = json.dumps({"scores": [scale * len(sample["response"]) for sample in samples]}).encode()
        self.send_response(500 if self.path == "/down" else 200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: Any) -> None: ...


@cache
def service() -> str:
    """The address of a service that judges by length, started once for this process."""
    os.environ["no_proxy"] = "127.0.0.1"
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Service)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def judged(config: Config) -> Observation:
    """What some responses to the first prompt are worth, whether another process says so, and what the service was asked."""
    import psutil

    from rl_core.data.prompts import Prompts
    from rl_core.rewards import build_reward

    dataset = dataset_of(config.model.model_dump_json(), config.data.model_dump_json())
    first = Prompts(dataset.path, "train")[0]
    ASKED.clear()
    before = set(psutil.Process().children())
    folder = Path.cwd()
    os.chdir(Path(config.model.name_or_path).parent)  # where modules are looked for
    try:
        reward = build_reward(config.reward, config.data.answer_column)
    finally:
        os.chdir(folder)
    assert reward is not None
    elsewhere = bool(set(psutil.Process().children()) - before)
    texts = ["", "7", str(first.ground_truth), f"it is {first.ground_truth}", f"<answer>{first.ground_truth}</answer>"]
    judgements = reward([first] * len(texts), texts, [[1]] * len(texts))
    return {"scores": [judgement.score for judgement in judgements], "elsewhere": elsewhere, "asked": list(ASKED)}
