"""A bucket for tests: moto's S3 server in a thread of this process, which counts requests and can fail some of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import boto3
import obstore
from moto.server import DomainDispatcherApplication, create_backend_app
from obstore.store import S3Store
from werkzeug.serving import make_server

from leyden.checkpoint.format import bucket

BUCKET = "runs"


class Server:
    """An S3 server with one bucket.

    Attributes:
        requests: the method, path and range of each request so far.
        fails: returns True for a request that the server answers with 503.
        environ: the variables with which a process finds the server.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str]] = []
        self.fails: Callable[[str, str], bool] = lambda method, path: False
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        address = f"http://127.0.0.1:{self._server.server_port}"
        secrets = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        self.environ = {"AWS_ENDPOINT_URL": address, "AWS_REGION": "us-east-1", **secrets}

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path, environ.get("HTTP_RANGE", "")))
        if self.fails(method, path):
            start("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        answer: Iterable[bytes] = self._app(environ, start)
        return answer

    def store(self) -> Any:
        """Returns obstore's store of the bucket."""
        return S3Store(BUCKET, client_options={"allow_http": True})

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextlib.contextmanager
def serving(monkeypatch: Any) -> Iterator[Server]:
    """Runs a server with an empty bucket, which this process and its children find by their environment."""
    server = Server()
    try:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        # Stores keep the environment of their first use.
        bucket.store_of.cache_clear()
        boto3.client("s3", endpoint_url=server.environ["AWS_ENDPOINT_URL"]).create_bucket(Bucket=BUCKET)
        yield server
    finally:
        server.close()


def upload(store: Any, folder: Path, key: str) -> None:
    """Copies a folder into a bucket."""
    for file in folder.rglob("*"):
        if file.is_file():
            obstore.put(store, f"{key}/{file.relative_to(folder).as_posix()}", file.read_bytes())
