"""Which server of a role takes the next request.

Owns: the load of each server, as the client knows it. Must not know: requests' contents.
"""

from collections.abc import Mapping


class NoServerLeft(RuntimeError):
    """Every server of a role is gone."""


class Router:
    """Sends work to the live server that would have least to do with it; ties go round.

    Load is in tokens: a prompt's tokens at a prefill server, one per request at a decode server.
    """

    def __init__(self, role: str, servers: range) -> None:
        self._role = role
        self._load = dict.fromkeys(servers, 0)
        self._next = servers.start

    def take(self, load: int, saved: Mapping[int, int] | None = None) -> int:
        """Choose a server and charge it; give it back with `release`. Raises NoServerLeft.

        `saved`: how much of `load` each server need not do; what it is charged is less by that.
        """
        if not self._load:
            raise NoServerLeft(f"no {self._role} server is left")
        count = max(self._load) + 1
        then = {s: done + load - (saved[s] if saved else 0) for s, done in self._load.items()}
        chosen = min(then, key=lambda s: (then[s], (s - self._next) % count))
        self._load[chosen] = then[chosen]
        self._next = chosen + 1
        return chosen

    def release(self, server: int, load: int) -> None:
        if server in self._load:
            self._load[server] -= load

    def remove(self, server: int) -> None:
        """Never choose `server` again: it is gone."""
        self._load.pop(server, None)

    @property
    def servers(self) -> list[int]:
        return list(self._load)

    @property
    def load(self) -> dict[int, int]:
        return dict(self._load)
