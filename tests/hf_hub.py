"""A stand-in for the hub on the loopback: the requests of huggingface_hub that create a repository and upload to it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """What the stand-in has received.

    Attributes:
        address: its address, for HF_ENDPOINT.
        blobs: the contents of large files, by SHA-256.
        sent: the SHA-256 of each large file, in the order of upload.
        commits: the files of each commit by path; of a large file its SHA-256.
        created: the requests to create a repository.
        refuses: names of requests that are refused ("create", "put"); emptied by the test that wants a second try.
        tokens: the tokens that requests had.
    """

    address: str = ""
    blobs: dict[str, bytes] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)
    commits: list[dict[str, bytes | str]] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)
    refuses: set[str] = field(default_factory=set)
    tokens: set[str] = field(default_factory=set)

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """Returns the status and the JSON of the answer to a request."""
        if path == "/api/repos/create":
            if "create" in self.refuses:
                return 403, {"error": "this token may not write"}
            self.created.append(json.loads(body))
            return 200, {"url": f"{self.address}/me/model"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if "/preupload/" in path:
            files = [
                {"path": one["path"], "uploadMode": _mode(one["path"]), "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            return 200, {"files": files}
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self._place_for(one) for one in json.loads(body)["objects"]]}
        if "/commit/" in path:
            self._commit([json.loads(line) for line in body.splitlines() if line])
            oid = hashlib.sha1(body).hexdigest()
            return 200, {"commitUrl": f"{self.address}/me/model/commit/{oid}", "commitOid": oid}
        return 404, {"error": path}

    def put(self, digest: str, data: bytes) -> int:
        if "put" in self.refuses and self.sent:
            return 400
        self.blobs[digest] = data
        self.sent.append(digest)
        return 200

    def _place_for(self, file: dict[str, Any]) -> dict[str, Any]:
        if file["oid"] in self.blobs:
            return file
        return {**file, "actions": {"upload": {"href": f"{self.address}/put/{file['oid']}"}}}

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        import base64

        files: dict[str, bytes | str] = {}
        for line in lines:
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "lfsFile":
                assert line["value"]["oid"] in self.blobs
                files[line["value"]["path"]] = line["value"]["oid"]
        self.commits.append(files)


def _mode(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"


@contextmanager
def serving() -> Iterator[Hub]:
    """Serves a hub on a free port within the block."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _reply(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _body(self) -> bytes:
            hub.tokens.add(self.headers.get("Authorization", ""))
            if self.headers.get("Transfer-Encoding") == "chunked":
                data = b""
                while size := int(self.rfile.readline().strip() or b"0", 16):
                    data += self.rfile.read(size)
                    self.rfile.readline()
                return data
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def do_POST(self) -> None:
            self._reply(*hub.answer(self.path.partition("?")[0], self._body()))

        def do_PUT(self) -> None:
            self._reply(hub.put(self.path.rpartition("/")[2], self._body()), {})

        def log_message(self, *args: Any) -> None:
            """Stays silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
