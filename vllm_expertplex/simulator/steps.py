"""Iteration times for the simulator: the planner's latency model asked for one batch at a time.

Owns: describing a mixed batch, rounding and remembering answers. Must not know: queues.
"""

from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from vllm_expertplex.planner.kernels import PREFILL
from vllm_expertplex.planner.latency import NO_OVERLAP, Latency, overlapped


class Knobs(msgspec.Struct, frozen=True):
    """What a fit may add to the model: seconds per layer of each phase, KV bytes less per GPU.

    All zero unless a run says otherwise; every run that sets one names it.
    """

    prefill_layer: float = 0.0
    decode_layer: float = 0.0
    kv_reserve: float = 0.0


class Timing(NamedTuple):
    """One iteration in seconds, and the part of it that MoE servers work."""

    total: float
    moe: float


class Work(NamedTuple):
    """Prompt tokens of one server's batch, and the sum of squared lengths (attention grows so)."""

    tokens: float
    squares: float

    def plus(self, start: int, stop: int) -> "Work":
        """With the tokens `start`..`stop` of one prompt added."""
        return Work(self.tokens + stop - start, self.squares + stop**2 - start**2)


NOTHING = Work(0.0, 0.0)


class Steps(Protocol):
    """Times of iterations. `sms`: share of the MoE servers' SMs."""

    def prefill(self, work: Work, tokens: float, sms: float, beside: float = 0.0) -> Timing:
        """`work` on the fullest server, `tokens` over all servers that run now.

        `beside`: requests that decode meanwhile, for times in which `sms` says too little.
        """

    def decode(self, each: float, batch: float, length: float, sms: float) -> Timing:
        """`each` queries at context `length` on the fullest server, `batch` over all."""

    def handoff(self, iteration: float) -> float:
        """Seconds from prefill to decode beyond the KV's time on the link.

        `iteration`: seconds of the decode iteration that runs, 0 when none does.
        """


class ModelSteps:
    """`Steps` for `servers` MoE servers, attention on `tp` GPUs each, from the latency model.

    Batches above 64 and contexts are rounded to 1 %, so that answers can be remembered.
    """

    def __init__(
        self,
        latency: Latency,
        servers: int,
        tp: int = 1,
        prefill_overlap: str | None = None,
        decode_overlap: str | None = None,
        knobs: Knobs | None = None,
    ) -> None:
        self.latency, self.tp = latency, tp
        self.servers = np.array([servers])
        self.knobs = knobs or Knobs()
        self._overlaps = {
            "prefill": (prefill_overlap,) if prefill_overlap else latency.overlaps,
            "decode": (decode_overlap,) if decode_overlap else latency.decode_overlaps,
        }
        self._known: dict[tuple[float, ...], Timing] = {}

    def prefill(self, work: Work, tokens: float, sms: float, beside: float = 0.0) -> Timing:
        length = _rounded(work.squares / work.tokens)
        each = _rounded(work.tokens) / length
        key = (0.0, each, length, _rounded(tokens), round(sms, 2))
        if key not in self._known:
            self._known[key] = self._fastest(
                "prefill", each, length, np.array([key[3]]), max(key[4], 0.02)
            )
        return self._known[key]

    def decode(self, each: float, batch: float, length: float, sms: float) -> Timing:
        key = (1.0, _rounded(each), _rounded(length), _rounded(batch), round(sms, 2))
        if key not in self._known:
            self._known[key] = self._fastest(
                "decode", key[1], key[2], np.array([key[3]]), max(key[4], 0.02)
            )
        return self._known[key]

    def handoff(self, iteration: float) -> float:
        return 0.0

    def _fastest(
        self, phase: str, each: float, length: float, total: np.ndarray, sms: float
    ) -> Timing:
        step = self.latency.prefill_step if phase == "prefill" else self.latency.decode_step
        extra = self.knobs.prefill_layer if phase == "prefill" else self.knobs.decode_layer
        timings = []
        for overlap in self._overlaps[phase]:
            parts = step(each, length, total, self.servers, sms, self.tp, overlap)
            timings.append(Timing(_scalar(parts.total), _scalar(parts.moe)))
        best = min(timings)
        return best._replace(total=best.total + extra * self.latency.model.layers)

    def mixed(self, work: Work, each: float, length: float, tokens: float, batch: float) -> Timing:
        """Chunked prefill: prompt chunks and decode queries in one iteration on all SMs."""
        if not tokens:
            return self.decode(each, batch, length, 1.0)
        chunk = _rounded(work.squares / work.tokens) if work.tokens else 1.0
        key = (2.0, _rounded(work.tokens), chunk, _rounded(each), _rounded(length),
               _rounded(tokens), _rounded(batch))  # fmt: skip
        if key not in self._known:
            kernels, assume = self.latency.kernels, self.latency.assumptions
            attention = kernels.prefill_attention(key[1] / chunk, chunk, self.tp)
            if each:
                attention = attention + kernels.decode_attention(each, length, self.tp)
            attention = attention + kernels.head(each + 1, self.tp)
            fullest = key[1] + key[3]
            reduce = self.latency.network.all_reduce(fullest, self.tp)
            attention = attention + reduce * self.latency.model.layers
            shared = kernels.shared_experts(fullest, self.tp)
            total = np.array([key[5] + key[6]])
            moe, exchange = self.latency.routed(
                PREFILL, fullest / self.tp, total, self.servers, 1.0, 1.0, hierarchical=True
            )
            host = assume.host_prefill
            parts = overlapped(NO_OVERLAP, attention, shared, exchange, moe, host)
            extra = self.knobs.prefill_layer * self.latency.model.layers
            self._known[key] = Timing(_scalar(parts.total) + extra, _scalar(parts.moe))
        return self._known[key]


def _rounded(value: float) -> float:
    """To 1 % above 64, to an integer or tenth below."""
    if value <= 64:
        return round(value, 1)
    return float(np.exp(round(float(np.log(value)) * 100) / 100))


def _scalar(value: object) -> float:
    return float(np.squeeze(np.asarray(value)))
