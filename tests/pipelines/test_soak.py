"""What a soak notes of a run's processes, and when it says that one holds more and more."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path

import psutil
import pytest

from benchmarks.parts import soak
from benchmarks.parts.chaos import MAX_STALENESS, Size
from benchmarks.parts.soak import MEMORY, OTHERS, Look, expected_connections, held, look

HOUR_S = 3600.0


def hour(
    megabytes: float, more_mb: float, more_files: float = 0.0, more_connections: float = 0.0
) -> list[Look]:
    """An hour of a process that has taken so much more by its end, in equal steps."""
    shares = [n / 60 for n in range(61)]
    return [
        Look(s * HOUR_S, megabytes + s * more_mb, 20 + s * more_files, s * more_connections)
        for s in shares
    ]


def test_what_grows_is_told_from_what_goes_up_and_down() -> None:
    assert not held(hour(500, 0), HOUR_S).grows
    assert held(hour(500, 400), HOUR_S).mb_an_hour == pytest.approx(400)
    assert held(hour(500, 400), HOUR_S).grows
    assert held(hour(500, 0, more_files=60), HOUR_S).grows
    waves = [one._replace(mb=one.mb + 30 * (n % 2)) for n, one in enumerate(hour(500, 0))]
    assert not held(waves, HOUR_S).grows


def test_connections_of_turns_are_no_growth_and_more_than_these_are() -> None:
    """A run whose rollouts go faster has more turns at a time, up to what its queue allows."""
    expected = expected_connections(Size(prompts=4, group_size=8))
    assert expected == 4 * (MAX_STALENESS + 1) * 8 + OTHERS
    faster = held(hour(500, 0, more_connections=expected), HOUR_S, expected)
    assert faster.connections_an_hour == pytest.approx(expected)
    assert faster.descriptors_an_hour == 0
    assert not faster.grows
    assert held(hour(500, 0, more_connections=expected + 5), HOUR_S, expected).grows
    many = [one._replace(connections=expected + 50) for one in hour(500, 0)]
    assert not held(many, HOUR_S, expected).grows, "as many all the time"


def test_a_connection_counts_apart_until_its_other_end_has_closed_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        looks: dict[str, list[Look]] = {}

        def seen() -> Look:
            look(psutil.Process(), [], 0.0, looks)
            return looks["controller"][-1]

        before = seen()
        with socket.create_connection(server.getsockname()) as near:
            far, _ = server.accept()
            during = seen()
            far.close()
            left = seen()
            assert near.recv(1) == b""
    assert (during.connections - before.connections, during.descriptors) == (2, before.descriptors)
    assert left.connections == before.connections
    assert left.descriptors == before.descriptors + 1, "our end stays open"


def test_what_was_taken_in_the_first_half_is_no_growth() -> None:
    start = [
        one._replace(mb=one.mb if one.seconds > HOUR_S / 2 else one.seconds)
        for one in hour(2000, 0)
    ]
    assert not held(start, HOUR_S).grows


def test_files_in_shared_memory_that_go_meanwhile_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        (Path(name) / "v1").mkdir()
        (Path(name) / "v1" / "weights").write_bytes(b"\0" * 3_000_000)
        (Path(name) / "v2").mkdir()
        (Path(name) / "v2" / "weights").write_bytes(b"\0" * 1_000_000)
        lock = os.open(name, os.O_RDONLY)  # as a run holds its folder
        scan = os.scandir

        def and_then_v1_goes(path: str) -> object:
            found = list(scan(path))
            if path == name:
                shutil.rmtree(Path(name) / "v1")
            return memory_scan(found)

        monkeypatch.setattr(soak.os, "scandir", and_then_v1_goes)
        looks: dict[str, list[Look]] = {}
        try:
            look(psutil.Process(), [], 0.0, looks)
        finally:
            os.close(lock)
    assert looks["shared memory"] == [Look(0.0, 1.0, 1.0)]
    assert looks["controller"][0].descriptors > 0


class memory_scan:
    def __init__(self, found: list[os.DirEntry[str]]) -> None:
        self._found = iter(found)

    def __enter__(self) -> memory_scan:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> memory_scan:
        return self

    def __next__(self) -> os.DirEntry[str]:
        return next(self._found)

    def close(self) -> None:
        pass
