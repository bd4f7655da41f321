"""Why requests ended with an error, kept until somebody tells their clients.

Owns: the reasons. Must not know: who finds them, who tells them.
"""

import re
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
        """Why a request failed last, by the name the API gave it.

        The engines' names are that with more around it: `[choice_]NAME[-prompt or _turn]-random`.
        """
        named = re.compile(rf"(\d+_)?{re.escape(request_id)}([-_]|$)")
        return next((why for name, why in reversed(self._reasons) if named.match(name)), None)
