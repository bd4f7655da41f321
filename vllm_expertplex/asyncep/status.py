"""What a person and Prometheus can see of an AsyncEP deployment.

Owns: reading its counters and putting them in those two forms. Must not know: how they come about.
"""

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import Metric

from vllm_expertplex.asyncep.client import AsyncEPClient


class AsyncEPReporter:
    """Reads the deployment whenever it is asked; costs nothing in between."""

    def __init__(self, client: AsyncEPClient) -> None:
        self._client = client

    @property
    def failure(self) -> str | None:
        return self._client.failure

    def status(self) -> dict[str, Any]:
        deployment = self._client.deployment
        rows = []
        for index, server in enumerate(deployment.servers):
            record, counters = deployment.records[server.name], deployment.boards[index].read()
            rows.append(
                {
                    "role": server.role,
                    "rank": server.rank,
                    "pid": record.pid,
                    "device": record.device,
                    "weight_bytes": record.weight_bytes,
                    "state": "lost" if server.name in deployment.lost else "ready",
                    **counters._asdict(),
                }
            )
        return {"layout": f"{len(rows)} engines", "servers": rows, "failure": self.failure}

    def collect(self) -> Iterator[Metric]:
        yield from ()
