"""Why requests ended with an error, kept until somebody tells their clients.

Owns: the reasons. Must not know: who finds them, who tells them.
"""

from collections import deque

_KEPT = 4096  # clients that went away never ask


class Failures:
    """Reasons by request."""

    def __init__(self) -> None:
        self._reasons: deque[tuple[str, str]] = deque(maxlen=_KEPT)

    def add(self, request_id: str, reason: str) -> None:
        """`request_id` is the engines' name of a request or of one of its choices."""
        self._reasons.append((request_id, reason))

    def reason(self, request_id: str) -> str | None:
        """Why a request failed, by the name the API gave it: the engines' names contain that."""
        for name, reason in self._reasons:
            if request_id in name:
                return reason
        return None
