"""The hub as a source: the real client against a server on loopback that speaks what it asks for."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

COMMIT = "c0ffee" * 6 + "abcd"
CONTENT = b'{"question": "1+1", "answer": "2"}\n{"question": "1+2", "answer": "3"}\n'
CHILD = """
import json, sys
from rl_core.config.data import DataConfig
from rl_core.data.sources import read_rows, source_fingerprint
from rl_core.errors import DataError
config = DataConfig(source={"kind": "hub"} | json.loads(sys.argv[1]), prompt_column="question")
try:
    print(json.dumps([source_fingerprint(config), list(read_rows(config))]))
except DataError as error:
    print(json.dumps(str(error)))
"""


class Hub(BaseHTTPRequestHandler):
    """One dataset `org/sums` of one file `data/train.jsonl`, newest commit COMMIT."""

    def do_GET(self) -> None:
        path, oid = self.path.split("?")[0], hashlib.sha1(CONTENT).hexdigest()
        api, files = "/api/datasets/org/sums", f"/datasets/org/sums/resolve/{COMMIT}/"
        file = {"type": "file", "path": "data/train.jsonl", "size": len(CONTENT), "oid": oid}
        answers = {
            api: {"id": "org/sums", "sha": COMMIT, "siblings": [{"rfilename": "data/train.jsonl"}], "tags": []},
            f"{api}/tree/{COMMIT}": [{"type": "directory", "path": "data", "size": 0, "oid": oid}],
            f"{api}/tree/{COMMIT}/data": [file],
        }
        answers[f"{api}/revision/{COMMIT}"] = answers[api]
        if path in answers:
            self.reply(200, json.dumps(answers[path]).encode())
        elif path == files + "data/train.jsonl":
            self.reply(200, CONTENT, {"ETag": f'"{oid}"', "X-Repo-Commit": COMMIT})
        else:
            known = path.startswith((api, files))
            self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound" if known else "RepoNotFound"})

    do_HEAD = do_GET

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body)), "Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def read(tmp_path):
    """Reads `org/sums` with the given settings in a child, which gets the address before it imports the client."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def in_child(address: str = f"http://127.0.0.1:{server.server_port}", **source):
        places = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf"), "PPOFLOW_HOME": str(tmp_path / "home")}
        command = [sys.executable, "-c", CHILD, json.dumps({"name": "org/sums"} | source)]
        environment = os.environ | places | {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)

    yield in_child
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("revision", [None, COMMIT])
def test_rows_and_commit(read, tmp_path, revision):
    fingerprint, rows = read(revision=revision)
    assert fingerprint == {"kind": "hub", "name": "org/sums", "subset": None, "split": "train", "commit": COMMIT}
    assert rows == [json.loads(line) for line in CONTENT.splitlines()]
    assert list((tmp_path / "home" / "datasets" / "hub").rglob("*.arrow"))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"split": "test"}, ["data.source.split", "Unknown split", "train"]),
        ({"subset": "x"}, ["data.source.subset", "'x' not found", "default"]),
        ({"name": "org/nothing"}, ["data.source.name = org/nothing", "404"]),
        ({"address": "http://127.0.0.1:9"}, ["data.source.name = org/sums", "refused", "data.source.revision"]),
    ],
)
def test_errors(read, source, words):
    message = read(**source)
    assert all(word in message for word in words), message
