"""The preflight check before several machines start: each reaches the main one, and a machine that differs is named."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from ranks.world import free_port

from leyden import ConfigurationError
from leyden.cli.launch.preflight import Facts, check, facts_of

VALUES = {"leyden": "1", "torch": "2.13", "python": "3.11", "machines": "3", "backend": "static"}


def check_all(
    machines: list[Facts], count: int, timeout: float = 30.0, port: int | None = None, address: str = "127.0.0.1"
) -> list[str]:
    """Runs the check on all machines at once; returns each error, or "" without one."""
    port = port or free_port()

    def one(facts: Facts) -> str:
        try:
            check(facts, count, address, port, timeout)
        except ConfigurationError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(machines)) as pool:
        return list(pool.map(one, machines))


def machines(count: int = 3) -> list[Facts]:
    return [Facts(rank, f"host{rank}", VALUES) for rank in range(count)]


def test_identical_machines_pass_the_preflight() -> None:
    assert check_all(machines(), 3) == ["", "", ""]


def test_machines_without_a_rank_pass_the_preflight() -> None:
    """The first process on the host of the main address becomes the main machine and waits for the others."""
    assert check_all([Facts(None, f"host{index}", VALUES) for index in range(3)], 3) == ["", "", ""]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
@pytest.mark.parametrize("address", ["::1", "[::1]"])
def test_machines_meet_at_an_ipv6_address(address: str) -> None:
    for ranks in ([0, 1], [None, None]):
        assert check_all([Facts(rank, "host", VALUES) for rank in ranks], 2, 10.0, address=address) == ["", ""]


@pytest.mark.parametrize("key", ["leyden", "torch", "python", "machines"])
def test_every_machine_names_the_one_that_differs(key: str) -> None:
    odd = machines()
    odd[2] = dataclasses.replace(odd[2], values={**VALUES, key: "other"})
    words = check_all(odd, 3)
    assert len(set(words)) == 1
    assert words[0].startswith("machine 2 (host2) differs: ")
    assert "other there" in words[0] and VALUES[key] in words[0]


def test_a_missing_machine_is_named() -> None:
    words = check_all(machines()[:2], 3, timeout=1.0)
    assert all("machine 2 did not connect" in word for word in words)


def test_machines_with_the_same_rank_fail_the_preflight() -> None:
    twice = [*machines(2), Facts(1, "host2", VALUES)]
    assert all("its own --machine_rank" in word for word in check_all(twice, 3))


def test_an_unreachable_main_machine_is_named() -> None:
    [words] = check_all(machines()[1:2], 3, timeout=0.5)
    assert words.startswith("machine 1 (host1) could not reach the main machine at 127.0.0.1:")


def test_an_unknown_host_is_named_at_once_and_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Kubernetes may publish the name of the main pod after the other pods have started."""
    with pytest.raises(ConfigurationError, match="does not know the host 'no-such-host.invalid'.*IP address"):
        check(machines()[1], 3, "no-such-host.invalid", 1, 0.5)
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith("leyden launch: machine 1 (host1) does not know the host")


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        [words] = check_all(machines()[:1], 3, port=other.getsockname()[1])
    assert "machine 0 (host0) cannot listen on port" in words


def test_a_foreign_connection_is_closed() -> None:
    port = free_port()

    def foreign_client() -> bytes:
        for _ in range(1000):
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                    connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
                    return connection.recv(100)
            except ConnectionRefusedError:
                time.sleep(0.01)
        return b"not connected"

    with ThreadPoolExecutor(1) as pool:
        visit = pool.submit(foreign_client)
        # The main machine listens until its last peer connects, which happens after the foreign connection is closed.
        main = ThreadPoolExecutor(1).submit(check, machines()[0], 2, "127.0.0.1", port, 30.0)
        with contextlib.suppress(ConnectionResetError):
            assert visit.result() == b""
        check(dataclasses.replace(machines()[1]), 2, "127.0.0.1", port, 30.0)
        main.result()


def test_facts_of_this_machine_are_complete() -> None:
    facts = facts_of(0, 2, "static")
    assert set(facts.values) == set(VALUES)
    assert facts.values["machines"] == "2"
    assert facts.host == socket.gethostname()
