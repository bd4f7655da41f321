"""What a person and Prometheus can see of a deployment: `/expertplex/status` and `/metrics`.

Owns: reading counters and putting them in those two forms. Must not know: how they come about.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from vllm_expertplex import metrics
from vllm_expertplex.client.core_client import ExpertPlexClient
from vllm_expertplex.layout import PHASES, Server
from vllm_expertplex.moe_server.backend import COUNTERS
from vllm_expertplex.serve.records import ServerRecord


class Reporter(Protocol):
    """What a deployment says of itself; `collect` is prometheus_client's interface."""

    @property
    def failure(self) -> str | None: ...

    def status(self) -> dict[str, Any]: ...

    def collect(self) -> Iterator[Metric]: ...


_reporter: Reporter | None = None


def publish(reporter: Reporter) -> None:
    """Make `reporter` speak for the deployment of this process."""
    global _reporter
    _reporter = reporter
    REGISTRY.register(reporter)  # type: ignore[arg-type]


def failure() -> str | None:
    """Why the deployment cannot serve any more; None while it can, or never was up."""
    return None if _reporter is None else _reporter.failure


def attach(app: Any) -> None:
    """Add `GET /expertplex/status` to vLLM's FastAPI app."""

    @app.get("/expertplex/status")
    async def status() -> dict[str, Any]:
        """Layout, and every server with what it holds and has done."""
        assert _reporter is not None
        return _reporter.status()


def samples(
    metric: metrics.Metric, values: Iterable[tuple[tuple[Any, ...], float | None]]
) -> Metric:
    """The values of `metric` by labels, as prometheus_client wants them; None is no value."""
    kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in values:
        if value is not None:
            family.add_metric([str(label) for label in labels], value)
    return family


def server_row(
    server: Server, record: ServerRecord, engine: int | None, lost: bool, **more: Any
) -> dict[str, Any]:
    """What is said of any server, and `more` of this one."""
    return {
        "role": server.role,
        "rank": server.rank,
        "engine": engine,
        "pid": record.pid,
        "device": record.device,
        "weight_bytes": record.weight_bytes,
        **more,
        "state": "lost" if lost else "ready",
    }


def server_info(rows: list[dict[str, Any]]) -> Metric:
    """Which servers there are, of `server_row`s."""

    def labels(row: dict[str, Any]) -> tuple[Any, ...]:
        engine = "" if row["engine"] is None else row["engine"]
        return row["role"], row["rank"], engine, row["pid"], row["device"]

    ready = (row for row in rows if row["state"] == "ready")
    return samples(metrics.SERVER_INFO, ((labels(row), 1.0) for row in ready))


def per_server(
    rows: list[dict[str, Any]], metric: metrics.Metric, field: str, unit: float = 1
) -> Metric:
    """A field of `server_row`s, times `unit`, by role and rank; None is no value."""
    values = (((row["role"], row["rank"]), row[field]) for row in rows)
    return samples(metric, ((key, None if v is None else v * unit) for key, v in values))


def servers(client: ExpertPlexClient) -> list[dict[str, Any]]:
    """One row per server; bytes, blocks and tokens as plain numbers, None where it has none."""
    deployment = client.deployment
    rows = []
    for index, server in enumerate(deployment.layout.attention_servers):
        blocks = deployment.configs[index].cache_config.num_gpu_blocks or 0
        rows.append(
            server_row(
                server,
                deployment.records[server.name],
                index,
                server.name in deployment.lost,
                kv_blocks=blocks,
                kv_blocks_used=round(blocks * client.kv_usage[index]),
                tokens=client.tokens[index],
            )
        )
    for server, board in zip(deployment.layout.moe_servers, deployment.boards, strict=True):
        rows.append(
            server_row(
                server,
                deployment.records[server.name],
                None,
                server.name in deployment.lost,
                kv_blocks=None,
                kv_blocks_used=None,
                tokens=sum(board.counters(phase)["tokens"] for phase in PHASES.values()),
            )
        )
    return rows


class ExpertPlexReporter:
    """Reads the deployment whenever it is asked; costs nothing in between."""

    def __init__(self, client: ExpertPlexClient) -> None:
        self._client = client

    @property
    def failure(self) -> str | None:
        return self._client.failure

    def status(self) -> dict[str, Any]:
        return {
            "layout": str(self._client.deployment.layout),
            "servers": servers(self._client),
            "requests": self._client.table.count(),
            "failure": self.failure,
        }

    def collect(self) -> Iterator[Metric]:
        client = self._client
        rows = servers(client)
        yield server_info(rows)
        yield per_server(rows, metrics.WEIGHT_BYTES, "weight_bytes")
        yield per_server(rows, metrics.KV_BLOCKS, "kv_blocks")
        yield per_server(rows, metrics.KV_BLOCKS_USED, "kv_blocks_used")
        yield per_server(rows, metrics.TOKENS, "tokens")
        yield samples(
            metrics.REQUESTS, (((state,), n) for state, n in client.table.count().items())
        )
        yield samples(metrics.RELEASED, [((), client.table.released)])
        yield samples(metrics.HANDOFFS, [((), client.table.handoffs)])
        yield samples(metrics.HANDOFF_SECONDS, [((), client.table.handoff_s)])
        yield from self._moe_servers()
        yield from self._remote_layers()

    def _moe_servers(self) -> Iterator[Metric]:
        deployment = self._client.deployment
        boards = list(zip(deployment.layout.moe_servers, deployment.boards, strict=True))
        yield samples(
            metrics.HEARTBEAT_AGE,
            (((s.role, s.rank), max(0.0, board.heartbeat_age_s())) for s, board in boards),
        )
        counters = [
            ((s.role, s.rank, phase), board.counters(number))
            for s, board in boards
            for phase, number in PHASES.items()
        ]
        yield samples(metrics.MOE_OPERATIONS, ((key, c["operations"]) for key, c in counters))
        yield samples(metrics.MOE_BUSY_SECONDS, ((key, c["busy_ns"] * 1e-9) for key, c in counters))
        values = [((s.role, s.rank), board.backend_counters()) for s, board in boards]
        for index, (name, divisor, text) in enumerate(COUNTERS):
            yield samples(
                metrics.backend_metric(name, text),
                ((key, counted[index] / divisor) for key, counted in values),
            )

    def _remote_layers(self) -> Iterator[Metric]:
        deployment = self._client.deployment
        if not deployment.slots:
            return  # on GPUs, where nobody on the host sees a layer
        counters = [
            ((s.role, s.rank), deployment.layer_counters(s))
            for s in deployment.layout.attention_servers
        ]
        yield samples(metrics.MOE_LAYERS, ((key, c["operations"]) for key, c in counters))
        for metric, field in (
            (metrics.DISPATCH_SECONDS, "dispatch_ns"),
            (metrics.WAIT_SECONDS, "wait_ns"),
            (metrics.COMBINE_SECONDS, "combine_ns"),
        ):
            yield samples(metric, ((key, c[field] * 1e-9) for key, c in counters))
