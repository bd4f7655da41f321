"""Writes what workers did as a trace file for https://ui.perfetto.dev or chrome://tracing.

Owns: the file format (Chrome JSON trace events). Must not know: scheduling.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from vllm_expertplex.layout import PHASE_DECODE

# (start_ns, end_ns, phase, stage, layer, sources, ticket)
Event = tuple[int, int, int, str, int, int, int]


def write_trace(path: Path, workers: Sequence[tuple[int, Sequence[Event]]]) -> None:
    """One track per worker, from (events lost, events) of each; named and coloured by phase."""
    encoder, separator = msgspec.json.Encoder(), b""
    with path.open("wb") as file:
        file.write(b'{"displayTimeUnit": "ns", "traceEvents": [\n')
        for event in _events(workers):
            file.write(separator + encoder.encode(event))
            separator = b",\n"
        file.write(b"\n]}\n")


def _events(workers: Sequence[tuple[int, Sequence[Event]]]) -> Iterator[dict[str, object]]:
    pid = os.getpid()
    for worker, (lost, events) in enumerate(workers):
        name = f"worker {worker}" + (f" (earliest {lost} tiles not kept)" if lost else "")
        yield {
            "ph": "M",
            "pid": pid,
            "tid": worker,
            "name": "thread_name",
            "args": {"name": name},
        }
        for start, end, phase, stage, layer, sources, ticket in events:
            decode = phase == PHASE_DECODE
            yield {
                "ph": "X",
                "pid": pid,
                "tid": worker,
                "ts": start / 1000,
                "dur": (end - start) / 1000,
                "name": "decode" if decode else "prefill",  # Perfetto colours by name
                "cname": "thread_state_running" if decode else "thread_state_iowait",
                "cat": stage,
                "args": {
                    "stage": stage,
                    "layer": layer,
                    "tile": ticket,
                    "sources": [s for s in range(sources.bit_length()) if sources >> s & 1],
                },
            }
