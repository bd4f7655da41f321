"""The ring: what is read is what was written, or is said not to be there."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from vllm_expertplex.asyncep.memory import HostChannel, HostMemory
from vllm_expertplex.asyncep.ring import Prefetcher, Ring

_SIZE = 4096
_MEMORY, _CHANNEL = HostMemory(), HostChannel()


def _part(layer: int) -> np.ndarray:
    return np.full(_SIZE, layer, np.uint8)


def _copy(into: np.ndarray):
    def take(part: np.ndarray) -> int:
        np.copyto(into, part)
        return part.size

    return take


def test_a_peer_reads_what_is_there_and_nothing_else(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring", 2, _SIZE, _MEMORY, create=True)
    peer = Ring(tmp_path / "ring", 2, _SIZE, _MEMORY)
    out = np.zeros(_SIZE, np.uint8)
    assert peer.read(3, _SIZE, _copy(out)) is None
    ring.write(0, 3, _part(3), _CHANNEL)
    assert peer.read(3, _SIZE, _copy(out)) == _SIZE
    assert (out == 3).all()
    ring.write(0, 5, _part(5), _CHANNEL)
    assert peer.read(3, _SIZE, _copy(out)) is None


def test_a_slot_overwritten_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring", 1, _SIZE, _MEMORY, create=True)
    peer = Ring(tmp_path / "ring", 1, _SIZE, _MEMORY)
    ring.write(0, 3, _part(3), _CHANNEL)

    def slow(part: np.ndarray) -> int:
        ring.write(0, 4, _part(4), _CHANNEL)
        return part.size

    assert peer.read(3, _SIZE, slow) is None


def test_readers_never_see_a_mixture(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring", 2, _SIZE, _MEMORY, create=True)
    peer = Ring(tmp_path / "ring", 2, _SIZE, _MEMORY)
    stop = threading.Event()

    def write() -> None:
        layer = 0
        while not stop.is_set():
            ring.write(layer % 2, layer % 5, _part(layer % 5), _CHANNEL)
            layer += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        out, found = np.zeros(_SIZE, np.uint8), 0
        deadline = time.monotonic() + 10
        while found < 300 and time.monotonic() < deadline:
            for layer in range(5):
                if peer.read(layer, _SIZE, _copy(out)) is not None:
                    found += 1
                    assert (out == layer).all()
    finally:
        stop.set()
        writer.join()
    assert found >= 300


def test_the_next_layers_are_fetched_ahead(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring", 3, _SIZE, _MEMORY, create=True)
    prefetcher = Prefetcher(ring, 4, _part, _CHANNEL)
    out = np.zeros(_SIZE, np.uint8)

    def present(layer: int) -> bool:
        return ring.read(layer, _SIZE, _copy(out)) is not None

    def eventually(layer: int) -> bool:
        deadline = time.monotonic() + 5
        while not present(layer) and time.monotonic() < deadline:
            time.sleep(1e-3)
        return present(layer)

    for step in range(12):
        # At this point layers step .. step + 2 (modulo 4) are due, and the one before is not.
        assert all(eventually((step + ahead) % 4) for ahead in range(3))
        assert not present((step + 3) % 4)
        prefetcher.gathered()
    prefetcher.close()


def test_waiting_for_the_next_layer_never_ends_too_early(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring", 2, _SIZE, _MEMORY, create=True)
    slow = threading.Event()

    def part(layer: int) -> np.ndarray:
        slow.wait(1e-3)
        return _part(layer)

    prefetcher = Prefetcher(ring, 3, part, _CHANNEL)
    out = np.zeros(_SIZE, np.uint8)
    for step in range(20):
        prefetcher.wait(5)
        assert ring.read(step % 3, _SIZE, _copy(out)) == _SIZE
        assert (out == step % 3).all()
        prefetcher.gathered()
    prefetcher.close()


def test_what_cannot_be_fetched_is_said(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring", 1, _SIZE, _MEMORY, create=True)
    stuck = threading.Event()

    def part(layer: int) -> np.ndarray:
        assert stuck.wait(10)
        raise ValueError("no such layer")

    prefetcher = Prefetcher(ring, 3, part, _CHANNEL)
    with pytest.raises(TimeoutError, match=r"not fetched within 0\.05 s"):
        prefetcher.wait(0.05)
    stuck.set()
    with pytest.raises(RuntimeError, match="no such layer"):
        prefetcher.wait(5)
