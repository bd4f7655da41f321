"""Deployment layouts `xPyDzE` and the placement of experts on MoE servers.

Owns: parsing a layout, naming its servers, and the expert -> (server, slot) map.
Must not know: vLLM, processes, tensors.
"""

import re
from collections.abc import Iterable, Iterator

import msgspec

_LAYOUT = re.compile(r"(?:(\d+)P)(?:(\d+)D)(?:(\d+)E)", re.IGNORECASE)

PREFILL = "prefill"
DECODE = "decode"
MOE = "moe"

# A phase is a small integer in every queue, buffer and metric.
PHASE_DECODE = 0
PHASE_PREFILL = 1
PHASES = {DECODE: PHASE_DECODE, PREFILL: PHASE_PREFILL}


class Server(msgspec.Struct, frozen=True, order=True):
    """One server of a layout: its role and its position (`rank`) within that role."""

    role: str
    rank: int

    @property
    def name(self) -> str:
        """A name for messages, files and tables: `prefill-0`, `decode-1`, `moe-0`."""
        return f"{self.role}-{self.rank}"


class SlotOwner(msgspec.Struct, frozen=True):
    """Whose a slot is: an attention server, which microbatch of its steps, and which of its
    tensor-parallel ranks.
    """

    server: Server
    microbatch: int = 0
    tp_rank: int = 0

    @property
    def name(self) -> str:
        """`prefill-0`; `prefill-0.1`: its second microbatch; `prefill-0-tp1`: its second rank."""
        rank = f"-tp{self.tp_rank}" if self.tp_rank else ""
        return f"{self.server.name}{rank}" + (f".{self.microbatch}" if self.microbatch else "")

    @property
    def source(self) -> "SlotOwner":
        """Who, to a MoE server's scheduler, sends the operations: a rank's microbatches are one
        source, because they come after one another; ranks are several, because they do not.
        """
        return SlotOwner(self.server, tp_rank=self.tp_rank)


def senders(owners: Iterable[SlotOwner]) -> list[SlotOwner]:
    """Who sends operations to a MoE server; the index is the source in its scheduler."""
    return list(dict.fromkeys(owner.source for owner in owners))


class Layout(msgspec.Struct, frozen=True):
    """How many prefill, decode and MoE servers a deployment has; each at least one."""

    prefill: int
    decode: int
    moe: int

    def __post_init__(self) -> None:
        if min(self.prefill, self.decode, self.moe) < 1:
            raise ValueError(
                f"layout {self}: every role needs at least one server; use for example 1P1D1E"
            )

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read `xPyDzE`, for example `1P3D4E`. Raises ValueError naming the expected form."""
        match = _LAYOUT.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"layout {text!r}: expected xPyDzE, the numbers of prefill, decode and MoE "
                "servers, for example 1P1D1E or 1P3D4E"
            )
        return cls(*(int(group) for group in match.groups()))

    def __str__(self) -> str:
        return f"{self.prefill}P{self.decode}D{self.moe}E"

    @property
    def attention_servers(self) -> list[Server]:
        """Prefill servers, then decode servers; the index is the `source` on every MoE server."""
        return [
            *(Server(PREFILL, rank) for rank in range(self.prefill)),
            *(Server(DECODE, rank) for rank in range(self.decode)),
        ]

    @property
    def moe_servers(self) -> list[Server]:
        return [Server(MOE, rank) for rank in range(self.moe)]

    def __iter__(self) -> Iterator[Server]:
        yield from self.attention_servers
        yield from self.moe_servers


class ExpertMap(msgspec.Struct, frozen=True):
    """Where each routed expert lives: `server[e]` and its position `slot[e]` there.

    `epoch` counts re-placements, so that two sides can tell whether they hold the same map.
    """

    server: list[int]
    slot: list[int]
    epoch: int = 0

    @classmethod
    def contiguous(cls, experts: int, servers: int) -> "ExpertMap":
        """Spread `experts` over `servers` in runs whose lengths differ by at most one."""
        if not 1 <= servers <= experts:
            raise ValueError(
                f"{experts} experts cannot be spread over {servers} MoE servers; "
                f"use between 1 and {experts} (the number before E in the layout)"
            )
        base, longer = divmod(experts, servers)
        server: list[int] = []
        slot: list[int] = []
        for rank in range(servers):
            count = base + (rank < longer)
            server += [rank] * count
            slot += range(count)
        return cls(server, slot)

    def local_experts(self, rank: int) -> list[int]:
        """Global ids of the experts on MoE server `rank`, in slot order."""
        return [e for e, server in enumerate(self.server) if server == rank]
