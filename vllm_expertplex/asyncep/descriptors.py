"""File descriptors that a process hands to others by name, over a Unix socket.

Owns: that socket, and what is said through it. Must not know: what a descriptor stands for.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

_ANSWER_S = 30.0
_QUESTION_S = 2.0  # one that is silent for so long holds up the others no longer
_BYTES = 1024  # of a message


class DescriptorServer:
    """Answers at the socket `path` for as long as the process lives.

    `export` makes, from a name, a word about it and a descriptor, which is closed once it is sent;
    whoever asked is told what it raises.
    """

    def __init__(self, path: Path, export: Callable[[str], tuple[str, int]]) -> None:
        self.path, self._export = path, export
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(path))
        self._socket.listen(128)
        threading.Thread(target=self._serve, name="asyncep-descriptors", daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            # Whoever hangs up, or is silent, has an error of its own.
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_QUESTION_S)
                self._answer(connection, connection.recv(_BYTES).decode(errors="replace"))

    def _answer(self, connection: socket.socket, name: str) -> None:
        try:
            word, descriptor = self._export(name)
        except Exception as error:  # whatever it is, the next one is served
            connection.send(str(error).encode()[:_BYTES])
            return
        try:
            socket.send_fds(connection, [word.encode()], [descriptor])
        finally:
            os.close(descriptor)


def received(path: Path, name: str) -> tuple[str, int]:
    """The word and the descriptor that the process with the socket at `path` has for `name`; the
    descriptor is the caller's to close.

    Raises RuntimeError where that process is gone, or says why it has none.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(str(path))
            connection.send(name.encode())
            word, descriptors, _, _ = socket.recv_fds(connection, _BYTES, 1)
        except OSError as error:
            raise RuntimeError(f"asking {path} for {name}: {error}") from None
    if not descriptors:
        reason = word.decode(errors="replace") or "no answer"
        raise RuntimeError(f"{path} did not hand out {name}: {reason}")
    return word.decode(), descriptors[0]
