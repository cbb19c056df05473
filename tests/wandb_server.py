"""A server in the place of wandb.ai: it answers the client, and keeps what it gets."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "me"


class WandbServer(ThreadingHTTPServer):
    """``history``: rows of the run; ``runs``: what the client said of it; ``files``: what it
    uploaded, by name."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.history: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.keys: set[str] = set()
        self.operations: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def graphql(self, query: str, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of one operation; null for what is not known, as an older server has it. Raises
        ``LookupError`` for artifacts."""
        self.operations.append(operation)
        if "Artifact" in operation:
            raise LookupError("this server keeps no artifacts")
        if operation == "Viewer":
            teams = {"edges": []}
            user = {"id": "u", "entity": ENTITY, "username": ENTITY, "email": "", "flags": "{}"}
            return {"viewer": {**user, "teams": teams}}
        if operation == "UpsertBucket":
            return {"upsertBucket": {"bucket": self._bucket(variables), "inserted": True}}
        if operation == "CreateRunFiles":
            files = [
                {"name": name, "uploadUrl": f"{self.url}/upload/{name}"}
                for name in variables["files"]
            ]
            return {"createRunFiles": {"runID": "id", "uploadHeaders": [], "files": files}}
        fields = [line.partition("(")[0].strip() for line in query.split("{")[1:2]]
        return dict.fromkeys(fields)

    def _bucket(self, variables: dict[str, Any]) -> dict[str, Any]:
        self.runs.append(variables)
        project = {
            "id": "p", "name": variables["project"], "entity": {"id": "e", "name": ENTITY},
        }  # fmt: skip
        return {
            "id": "id", "name": variables["name"], "displayName": variables["displayName"],
            "description": "", "config": "{}", "sweepName": None, "historyLineCount": 0,
            "project": project,
        }  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    server: WandbServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        body = self._body()
        if self.path == "/graphql":
            self.server.keys.add(self.headers.get("Authorization", ""))
            asked = json.loads(body)
            query = asked["query"]
            name = asked.get("operationName") or query.split("(")[0].split()[1]
            try:
                data = self.server.graphql(query, name, asked.get("variables") or {})
            except LookupError as error:
                self._answer({"errors": [{"message": str(error)}]})
            else:
                self._answer({"data": data})
            return

        if self.path.endswith("/file_stream"):
            rows = json.loads(body).get("files", {}).get("wandb-history.jsonl", {})
            self.server.history += map(json.loads, rows.get("content", []))
        self._answer({})

    def do_PUT(self) -> None:
        self.server.files[self.path.removeprefix("/upload/")] = self._body()
        self._answer({})

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _answer(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """No line per request."""


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """A server in a thread, until the block ends."""
    server = WandbServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
