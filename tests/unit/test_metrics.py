"""The table of metrics: names that Prometheus takes, each once, each with help."""

import re

from vllm_expertplex import metrics

ALL = [value for value in vars(metrics).values() if isinstance(value, metrics.Metric)]


def test_there_are_metrics() -> None:
    assert len(ALL) > 10


def test_names_are_unique_and_well_formed() -> None:
    names = [metric.name for metric in ALL]
    assert len(set(names)) == len(names)
    for metric in ALL:
        assert re.fullmatch(r"expertplex:[a-z][a-z_]*", metric.name)
        # The client library appends it to counters; twice would be wrong.
        assert not metric.name.endswith("_total")
        assert metric.kind in ("gauge", "counter")
        assert metric.help.endswith(".")


def test_metrics_of_servers_carry_role_and_rank() -> None:
    of_all = (
        *(metrics.REQUESTS, metrics.RELEASED, metrics.HANDOFFS, metrics.HANDOFF_SECONDS),
        *(metrics.THRESHOLD_FLOPS, metrics.HELD_REQUESTS, metrics.BATCHES),
    )
    for metric in ALL:
        if metric not in of_all:
            assert metric.labels[:2] == ("role", "rank")
