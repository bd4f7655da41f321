"""Descriptors between processes that come, fail and go."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_expertplex.asyncep import descriptors
from vllm_expertplex.asyncep.descriptors import DescriptorServer, received


@pytest.fixture
def path(tmp_path: Path) -> Path:
    def export(name: str) -> tuple[str, int]:
        if name.startswith("missing"):
            raise KeyError(name)
        file = os.memfd_create(name)
        os.write(file, name.encode())
        return str(len(name)), file

    return DescriptorServer(tmp_path / "socket", export).path


def read(path: Path, name: str) -> tuple[str, str]:
    word, file = received(path, name)
    try:
        return word, os.pread(file, 100, 0).decode()
    finally:
        os.close(file)


def test_whoever_asks_by_name_gets_it_and_no_descriptor_is_left(path: Path) -> None:
    assert read(path, "first") == ("5", "first")
    before = len(os.listdir("/proc/self/fd"))
    for index in range(50):
        assert read(path, f"block-{index}") == (str(len(f"block-{index}")), f"block-{index}")
    # The server may still be about to close the last one's two.
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_what_is_not_there_is_named_and_others_are_served(path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"socket did not hand out missing-1: 'missing-1'"):
        received(path, "missing-1")
    assert read(path, "other") == ("5", "other")


def _silent(connection: socket.socket) -> None:
    pass


def _gone(connection: socket.socket) -> None:
    connection.close()


def _babbling(connection: socket.socket) -> None:
    connection.send(b"missing\xff\xfe")


@pytest.mark.parametrize("peer", [_silent, _gone, _babbling])
def test_a_peer_that_misbehaves_holds_nobody_up(
    path: Path, monkeypatch: pytest.MonkeyPatch, peer: Callable[[socket.socket], None]
) -> None:
    monkeypatch.setattr(descriptors, "_QUESTION_S", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(path))
        peer(connection)
        assert read(path, "other") == ("5", "other")


def test_a_process_that_is_gone_is_named(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as gone:
        gone.bind(str(tmp_path / "socket"))
    with pytest.raises(RuntimeError, match=r"asking .*socket for block: .*refused"):
        received(tmp_path / "socket", "block")
    with pytest.raises(RuntimeError, match=r"asking .*nothing for block: .*No such file"):
        received(tmp_path / "nothing", "block")


def test_an_answer_that_does_not_come_has_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "_ANSWER_S", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hung:
        hung.bind(str(tmp_path / "socket"))
        hung.listen()
        with pytest.raises(RuntimeError, match=r"asking .*socket for block: timed out"):
            received(tmp_path / "socket", "block")
