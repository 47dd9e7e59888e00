"""A bucket for tests: moto's S3 server in a thread of this process, which counts requests and can fail some of them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import boto3
import obstore
from moto.server import DomainDispatcherApplication, create_backend_app
from obstore.store import S3Store
from ranks.world import free_port, rank_environment
from werkzeug.serving import make_server

from leyden.checkpoint.format import bucket

BUCKET = "runs"


class Server:
    """An S3 server with one bucket.

    Attributes:
        requests: the method, path and range of each request so far.
        sent: the method, path and number of bytes in the body of each request so far.
        fails: returns True for a request that the server answers with 503.
        loses: returns True for a request that the server carries out, and answers with 503.
        cuts: returns True for a request in which the server closes the connection.
        refuses: returns a status and the body of an answer for a request that it does not carry out; else None.
        is_conditional: whether the server heeds the condition of a request, If-None-Match.
        before: called before a request is carried out, with its method and path.
        after: called once a request is carried out and before it is answered, likewise.
        environ: the variables with which a process finds the server.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str]] = []
        self.sent: list[tuple[str, str, int]] = []
        self.fails: Callable[[str, str], bool] = lambda method, path: False
        self.loses: Callable[[str, str], bool] = lambda method, path: False
        self.cuts: Callable[[str, str], bool] = lambda method, path: False
        self.refuses: Callable[[str, str], tuple[str, bytes] | None] = lambda method, path: None
        self.is_conditional = True
        self.before: Callable[[str, str], object] = lambda method, path: None
        self.after: Callable[[str, str], object] = lambda method, path: None
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
        self.sent.append((method, path, int(environ.get("CONTENT_LENGTH") or 0)))
        if self.fails(method, path):
            start("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        if self.cuts(method, path):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return []
        refusal = self.refuses(method, path)
        if refusal is not None:
            start(refusal[0], [("Content-Length", str(len(refusal[1])))])
            return [refusal[1]]
        if not self.is_conditional:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        self.before(method, path)
        if self.loses(method, path):
            list(self._app(environ, lambda status, headers: None))
            start("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        answer: Iterable[bytes] = self._app(environ, start)
        self.after(method, path)
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
        # moto keeps its objects in global variables.
        urlopen(f"{server.environ['AWS_ENDPOINT_URL']}/moto-api/reset", data=b"").close()
        # Stores keep the environment of their first use.
        bucket.store_of.cache_clear()
        boto3.client("s3", endpoint_url=server.environ["AWS_ENDPOINT_URL"]).create_bucket(Bucket=BUCKET)
        yield server
    finally:
        server.close()


class Client:
    """A process that trains in forks of itself, so that a test can kill a run at any request.

    The process has imported everything, and has sent no request: the threads of obstore would not survive a fork.

    Args:
        **environ: additional environment variables of the process.
    """

    def __init__(self, **environ: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("bucket_client.py")],
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, begin: Callable[[int], None] = lambda pid: None, **arguments: Any) -> int:
        """Runs a training to its end, and returns its exit status.

        Args:
            begin: called with the process ID before the training begins.
            **arguments: the arguments of `bucket_client.train`.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(arguments), file=self._process.stdin, flush=True)
        begin(int(self._process.stdout.readline()))
        print("go", file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Clients:
    """Two ranks, each of which trains in forks of a Client of its own."""

    def __init__(self) -> None:
        self._clients = [Client(), Client()]

    def run(self, begin: Mapping[int, Callable[[int], None]] | None = None, **arguments: Any) -> list[int]:
        """Runs a training to its end, and returns the exit status of each rank.

        Args:
            begin: by rank, called with its process ID before it begins.
            **arguments: the arguments of `bucket_client.train`.
        """
        port, begins = free_port(), {0: lambda pid: None, 1: lambda pid: None, **(begin or {})}
        with ThreadPoolExecutor(2) as pool:
            runs = [
                pool.submit(client.run, begins[rank], environ=rank_environment(rank, 2, port), **arguments)
                for rank, client in enumerate(self._clients)
            ]
            return [run.result() for run in runs]

    def close(self) -> None:
        for client in self._clients:
            client.close()


def upload(store: Any, folder: Path, key: str) -> None:
    """Copies a folder into a bucket."""
    for file in folder.rglob("*"):
        if file.is_file():
            obstore.put(store, f"{key}/{file.relative_to(folder).as_posix()}", file.read_bytes())
