"""What a person and Prometheus can see of an AsyncEP deployment.

Owns: reading its counters and putting them in those two forms. Must not know: how they come about.
"""

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import Metric

from vllm_expertplex import metrics
from vllm_expertplex.asyncep.client import AsyncEPClient
from vllm_expertplex.serve.status import per_server, samples, server_info, server_row


class AsyncEPReporter:
    """Reads the deployment whenever it is asked; costs nothing in between."""

    def __init__(self, client: AsyncEPClient) -> None:
        self._client = client

    @property
    def failure(self) -> str | None:
        return self._client.failure

    def status(self) -> dict[str, Any]:
        client = self._client
        threshold = client.deployment.threshold
        return {
            "layout": f"{len(client.deployment.servers)} engines",
            "servers": self._rows(),
            "threshold": {
                "flops_per_layer": threshold.flops,
                "tokens": client.deployment.flops.tokens_for(threshold.flops),
                "gather_s": threshold.gather_s,
                "flops_per_s": threshold.flops_per_s,
            },
            "held": client.frontend.held,
            "batches": client.batches,
            "failure": self.failure,
        }

    def _rows(self) -> list[dict[str, Any]]:
        client = self._client
        deployment, backlog = client.deployment, client.frontend.backlog()
        rows = []
        for index, server in enumerate(deployment.servers):
            rows.append(
                server_row(
                    server,
                    deployment.records[server.name],
                    index,
                    server.name in deployment.lost,
                    tokens=client.tokens[index],
                    cached_tokens=client.cached_tokens[index],
                    prefix_blocks=client.index.blocks(index),
                    backlog_flops=backlog.get(index, 0.0),
                    **deployment.boards[index].read()._asdict(),
                )
            )
        return rows

    def collect(self) -> Iterator[Metric]:
        client, rows = self._client, self._rows()
        yield server_info(rows)
        yield per_server(rows, metrics.WEIGHT_BYTES, "weight_bytes")
        yield per_server(rows, metrics.TOKENS, "tokens")
        yield per_server(rows, metrics.CACHED_TOKENS, "cached_tokens")
        yield per_server(rows, metrics.BACKLOG_FLOPS, "backlog_flops")
        yield per_server(rows, metrics.GATHERS, "gathers")
        yield per_server(rows, metrics.GATHER_SECONDS, "gather_ns", 1e-9)
        yield per_server(rows, metrics.GATHERED_BYTES, "gathered_bytes")
        yield per_server(rows, metrics.GATHER_WAIT_SECONDS, "waited_ns", 1e-9)
        yield samples(metrics.THRESHOLD_FLOPS, [((), client.deployment.threshold.flops)])
        yield samples(metrics.HELD_REQUESTS, [((), client.frontend.held)])
        yield samples(metrics.BATCHES, [((), client.batches)])
