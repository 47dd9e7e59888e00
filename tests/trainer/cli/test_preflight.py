"""The preflight before several machines start: each reaches the main one, and the odd one is named."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from ranks.world import free_port

from leyden import ConfigurationError
from leyden.trainer.cli.launch.preflight import Facts, check, facts_of

VALUES = {"leyden": "1", "torch": "2.13", "python": "3.11", "machines": "3", "backend": "static"}


def meet(machines: list[Facts], count: int, timeout: float = 30.0, port: int | None = None) -> list[str]:
    """What each machine is told, all of them at once; "" where all is well."""
    port = port or free_port()

    def one(facts: Facts) -> str:
        try:
            check(facts, count, "127.0.0.1", port, timeout, lambda text: None)
        except ConfigurationError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(machines)) as pool:
        return list(pool.map(one, machines))


def machines(count: int = 3) -> list[Facts]:
    return [Facts(rank, f"host{rank}", VALUES) for rank in range(count)]


def test_alike_machines_pass() -> None:
    assert meet(machines(), 3) == ["", "", ""]


def test_nobody_needs_a_number() -> None:
    """The one whose address it is, and who comes first, waits for the others."""
    assert meet([Facts(None, f"host{index}", VALUES) for index in range(3)], 3) == ["", "", ""]


@pytest.mark.parametrize("key", ["leyden", "torch", "python", "machines"])
def test_the_machine_that_differs_is_named_everywhere(key: str) -> None:
    odd = machines()
    odd[2] = dataclasses.replace(odd[2], values={**VALUES, key: "other"})
    words = meet(odd, 3)
    assert len(set(words)) == 1
    assert words[0].startswith("machine 2 (host2) differs: ")
    assert "other there" in words[0] and VALUES[key] in words[0]


def test_a_machine_that_does_not_come_is_named() -> None:
    words = meet(machines()[:2], 3, timeout=1.0)
    assert all("machine 2 did not connect" in word for word in words)


def test_machines_with_the_same_number_are_refused() -> None:
    twice = [*machines(2), Facts(1, "host2", VALUES)]
    assert all("its own --machine_rank" in word for word in meet(twice, 3))


def test_a_main_machine_that_is_not_reached_is_named() -> None:
    [words] = meet(machines()[1:2], 3, timeout=0.5)
    assert words.startswith("machine 1 (host1) could not reach the main machine at 127.0.0.1:")
    with pytest.raises(ConfigurationError, match="does not know the host"):
        check(machines()[1], 3, "no-such-host.invalid", 1, 0.5, lambda text: None)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        [words] = meet(machines()[:1], 3, port=other.getsockname()[1])
    assert "machine 0 (host0) cannot listen on port" in words


def test_a_stranger_is_sent_away() -> None:
    port = free_port()

    def stranger() -> bytes:
        for _ in range(1000):
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=10) as there:
                    there.sendall(b"GET / HTTP/1.0\r\n\r\n")
                    return there.recv(100)
            except ConnectionRefusedError:
                continue
        return b"never let in"

    with ThreadPoolExecutor(1) as pool:
        visit = pool.submit(stranger)
        # The main machine is there until its last guest came, who comes after the stranger was sent away.
        main = ThreadPoolExecutor(1).submit(check, machines()[0], 2, "127.0.0.1", port, 30.0, lambda text: None)
        with contextlib.suppress(ConnectionResetError):
            assert visit.result() == b""
        check(dataclasses.replace(machines()[1]), 2, "127.0.0.1", port, 30.0, lambda text: None)
        main.result()


def test_the_facts_of_this_machine_have_all_values() -> None:
    facts = facts_of(0, 2, "static")
    assert set(facts.values) == set(VALUES)
    assert facts.values["machines"] == "2"
    assert facts.host == socket.gethostname()
