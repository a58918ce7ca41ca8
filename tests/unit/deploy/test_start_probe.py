"""The request that the supervisor sends before it calls a cluster ready, answered by a script in the router's place."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config import load_cluster
from common.config.admin_listener import admin_listeners
from deploy.children import Child
from deploy.process_table import read_table
from deploy.supervisor import StartError, Supervisor

# A router without nodes. Each of its attempts yields the first token of a prompt; unless hand-overs work, another one
# follows. It ends after an answer with an error, so that the supervisor need not wait for its deadline.
ROUTER = """
import http.server, json, os, signal, socketserver, sys
path, attempts, works, status = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True", int(sys.argv[-1])
signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["max_tokens"]
        failed = asked > attempts and not works
        body = {"error": {"code": "transfer_failed"}} if failed else {"usage": {"completion_tokens": asked}}
        self.send_response(503 if failed else 200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
        if failed:
            self.wfile.flush()
            print("no hand-over works", file=sys.stderr)
            os._exit(1)
server = socketserver.UnixStreamServer(path, Handler)
os.write(status, b'{"phase":"ready"}\\n')
server.serve_forever()
"""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short directory, since the path of a socket has a bound, with the script on the path of modules."""
    with tempfile.TemporaryDirectory(prefix="td") as directory:
        (Path(directory) / "scripted_router.py").write_text(ROUTER)
        (Path(directory) / "m").mkdir()
        monkeypatch.setenv("PYTHONPATH", directory)
        yield Path(directory)


def supervisor_of(place: Path, attempts: int, works: bool) -> Supervisor:
    file = place / "c.yaml"
    file.write_text(
        f"model: {{path: m}}\nprocess: {{run_dir: {place / 'run'}}}\nrouter: {{max_attempts: {attempts}}}\n"
    )
    resolved = load_cluster(file)
    supervisor = Supervisor(resolved, [])
    arguments = ["scripted_router", str(admin_listeners(resolved).socket), str(attempts), str(works)]
    supervisor.supervise([Child("router", arguments, supervisor.run_dir / "logs" / "router.log")])
    return supervisor


@pytest.mark.parametrize("attempts", [1, 3, 10])
def test_a_cluster_without_hand_over_is_not_ready(place: Path, attempts: int) -> None:
    """Each attempt of a request yields one token on its prefill node, although no decode node ever gets the pages."""
    supervisor = supervisor_of(place, attempts, works=False)
    said = ""
    try:
        supervisor.start(lambda children: None, lambda text: None)
        supervisor.stop()
    except StartError as error:
        said = str(error)
    assert said.strip() == "router ended with exit code 1: no hand-over works"


@pytest.mark.parametrize("attempts", [1, 3, 10])
def test_a_cluster_that_hands_over_is_ready(place: Path, attempts: int) -> None:
    supervisor = supervisor_of(place, attempts, works=True)
    supervisor.start(lambda children: None, lambda text: None)
    try:
        table = read_table(supervisor.run_dir)
        assert table is not None
        assert table.state == "ready"
    finally:
        supervisor.stop()
