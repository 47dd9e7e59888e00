"""Checks, before ranks start on several machines, that all reach the main machine and run the same versions.

The main machine listens where the ranks will meet. Every other machine sends it one line of JSON. It answers with one
line: the first mistake found, the same for all machines, or nothing.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from leyden.core.errors import ConfigurationError

COMPARED = {
    "leyden": "leyden",
    "torch": "torch",
    "python": "Python",
    "machines": "--num_machines",
    "backend": "the backend",
}
"""Facts that must be the same on all machines, with their names in an error."""
MAX_LINE = 65536


@dataclass(frozen=True, slots=True)
class Facts:
    """What a machine reports about itself.

    Attributes:
        rank: its number; None if the rendezvous assigns it.
        host: its host name.
        values: the facts to compare, by the keys of `COMPARED`.
    """

    rank: int | None
    host: str
    values: dict[str, str]

    @property
    def name(self) -> str:
        return self.host if self.rank is None else f"machine {self.rank} ({self.host})"


def facts_of(rank: int | None, machines: int, backend: str) -> Facts:
    """Collects the facts of this machine."""
    values = {
        "leyden": sys.modules["leyden"].__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machines": str(machines),
        "backend": backend,
    }
    return Facts(rank, socket.gethostname(), values)


def check(facts: Facts, machines: int, address: str, port: int, timeout: float) -> None:
    """Meets the other machines and compares their facts.

    Args:
        facts: those of this machine.
        machines: number of machines.
        address: of the main machine: number 0, or without numbers the machine with this address.
        port: of the main machine.
        timeout: seconds to wait for the other machines.

    Raises:
        ConfigurationError: if a machine does not connect, cannot be reached or differs; names it.
    """
    # An endpoint has the brackets of an IPv6 address.
    address = address.strip("[]")
    server = _listen(facts, machines, address, port)
    if server is None:
        _visit(facts, address, port, timeout)
        return
    guests: list[tuple[socket.socket, Facts]] = []
    with closing(server):
        try:
            _receive(server, guests, machines, timeout)
            wrong = _mistake(facts, [guest for _, guest in guests], machines, address, port, timeout)
            for connection, _ in guests:
                _answer(connection, wrong)
        finally:
            for connection, _ in guests:
                connection.close()
    if wrong:
        raise ConfigurationError(wrong)


def _listen(facts: Facts, machines: int, address: str, port: int) -> socket.socket | None:
    """Opens the socket of the main machine; returns None on the others."""
    if facts.rank not in (0, None):
        return None
    try:
        if facts.rank == 0:
            # It may be behind another address than its own, IPv4 or IPv6.
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            return socket.create_server(("", port), family=family, backlog=machines, dualstack_ipv6=both)
        # Without numbers, the address says which machine is main.
        [family, *_], *_ = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        return socket.create_server((address, port), family=family, backlog=machines)
    except OSError as error:
        if facts.rank is None:
            return None
        raise ConfigurationError(
            f"machine 0 ({facts.host}) cannot listen on port {port} ({os.strerror(error.errno or 0)}): give another "
            "--main_process_port on all machines."
        ) from error


def _receive(server: socket.socket, guests: list[tuple[socket.socket, Facts]], machines: int, timeout: float) -> None:
    """Adds the machines that send a line to the guests; closes connections that send anything else."""
    end = time.monotonic() + timeout
    announced = False
    while len(guests) < machines - 1:
        left = end - time.monotonic()
        if left <= 0:
            return
        # The first wait is short, so that the screen soon says what this machine is waiting for.
        server.settimeout(left if announced else min(left, 2.0))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            if not announced:
                missing = machines - 1 - len(guests)
                _say(f"waiting for {missing} other machine{'s' * (machines > 2)}, up to {timeout:.0f} s")
                announced = True
            continue
        connection.settimeout(min(10.0, max(left, 1.0)))
        try:
            found = json.loads(_line(connection))
            guests.append((connection, Facts(found["rank"], str(found["host"]), dict(found["values"]))))
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()


def _mistake(main: Facts, others: list[Facts], machines: int, address: str, port: int, timeout: float) -> str:
    """Describes the first mistake among the machines that connected; returns "" if there is none."""
    if len(others) < machines - 1:
        came = {facts.rank for facts in others}
        missing = [str(rank) for rank in range(1, machines) if rank not in came] if main.rank is not None else []
        who = (
            f"machine{'s' * (len(missing) > 1)} {', '.join(missing)}"
            if missing
            else f"{machines - 1 - len(others)} of {machines} machines"
        )
        return (
            f"{who} did not connect to {address}:{port} within {timeout:.0f} s: start `leyden launch` there too, with "
            f"--main_process_ip {address} --main_process_port {port}, and open that port in the firewall."
        )
    ranks = [facts.rank for facts in (main, *others) if facts.rank is not None]
    for facts in others:
        if facts.rank is not None and (facts.rank >= machines or ranks.count(facts.rank) > 1):
            return (
                f"{facts.name} has the number of another machine, or one that is not in 0 to {machines - 1}: give each "
                "machine its own --machine_rank."
            )
        for key, name in COMPARED.items():
            here, there = main.values.get(key), facts.values.get(key)
            if here != there:
                return f"{facts.name} differs: {name} is {there} there, and {here} on {main.name}. Make them the same."
    return ""


def _answer(connection: socket.socket, wrong: str) -> None:
    with suppress(OSError):
        connection.sendall(json.dumps({"wrong": wrong}).encode() + b"\n")
        # The guest closes first: if the server does, its port cannot be bound again for a while.
        connection.settimeout(5.0)
        connection.recv(1)


def _say(text: str) -> None:
    print(f"leyden launch: {text}", file=sys.stderr, flush=True)


def _visit(facts: Facts, address: str, port: int, timeout: float) -> None:
    """Connects to the main machine, trying again until it listens."""
    end = time.monotonic() + timeout
    announced = False
    line = json.dumps(asdict(facts)).encode() + b"\n"
    while True:
        try:
            with socket.create_connection(
                (address, port), timeout=max(0.1, min(10.0, end - time.monotonic()))
            ) as there:
                there.sendall(line)
                there.settimeout(max(1.0, end - time.monotonic() + 10))
                reply: dict[str, Any] = json.loads(_line(there))
                break
        except socket.gaierror as error:
            # Kubernetes publishes a pod's name when it starts the pod.
            unknown = f"{facts.name} does not know the host {address!r} ({error.strerror})"
            if time.monotonic() > end:
                raise ConfigurationError(f"{unknown}: give the main machine's IP address.") from error
            if not announced:
                _say(f"{unknown}: trying again for up to {timeout:.0f} s")
                announced = True
            time.sleep(0.2)
        except (OSError, ValueError) as error:
            if time.monotonic() > end:
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                raise ConfigurationError(
                    f"{facts.name} could not reach the main machine at {address}:{port} within {timeout:.0f} s "
                    f"({reason}): start `leyden launch` there, check --main_process_ip, and open the port in its "
                    "firewall."
                ) from error
            time.sleep(0.2)
    if reply.get("wrong"):
        raise ConfigurationError(str(reply["wrong"]))


def _line(connection: socket.socket) -> bytes:
    """Reads one line; one that does not end is cut, and no JSON."""
    with connection.makefile("rb") as lines:
        return lines.readline(MAX_LINE)
