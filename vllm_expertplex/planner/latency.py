"""Iteration times: components put together along the critical path, with TBO and SBO.

Owns: T_p and T_d of the ExpertPlex paper (section 6) for given servers, batch and SM share, and
eq. (4). Must not know: search, queues. Times in seconds; array arguments broadcast. `sms` is always
a part of what MoE servers have of their GPUs.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_expertplex.planner.assumptions import Assumptions
from vllm_expertplex.planner.hardware import Gpu
from vllm_expertplex.planner.kernels import DECODE, PREFILL, Kernels
from vllm_expertplex.planner.models import ModelSpec, Number
from vllm_expertplex.planner.network import Network, OneGroup
from vllm_expertplex.planner.routing import Routing
from vllm_expertplex.planner.sharing import Shares

NO_OVERLAP, SBO, TBO = "none", "sbo", "tbo"
Array = NDArray[Any]


class Parts(NamedTuple):
    """One iteration, taken apart. `total` is what overlap leaves of the parts plus `host`."""

    attention: Number
    shared: Number
    exchange: Number
    moe: Number
    host: Number
    total: Number


class Latency:
    """Iteration times of one model on one kind of GPU in a deployment of `nodes` nodes."""

    def __init__(
        self,
        model: ModelSpec,
        gpu: Gpu,
        kernels: Kernels,
        routing: Routing,
        assumptions: Assumptions,
        nodes: int,
        shares: Shares = Shares(),  # noqa: B008
    ) -> None:
        self.model, self.gpu, self.kernels = model, gpu, kernels
        self.routing, self.assumptions, self.shares = routing, assumptions, shares
        self.network = Network(model, gpu, assumptions, nodes)
        self.overlaps = (NO_OVERLAP, SBO, TBO) if model.shared_intermediate else (NO_OVERLAP, TBO)
        # Two batches at once are not served in decode; the paper's plans for GPUs of their own
        # have them all the same.
        self.decode_overlaps = self.overlaps if shares == Shares() else self.overlaps[:-1]

    @property
    def moe_sms(self) -> Number:
        """SMs that a MoE server has."""
        return np.rint(self.gpu.sms * self.shares.moe)

    def as_one_group(self, gpus: int) -> None:
        """Attention is tensor-parallel over the `gpus` GPUs that hold the experts."""
        n = self.network
        self.network = OneGroup(self.model, self.gpu, self.assumptions, n.nodes, gpus)

    def prefill(
        self,
        requests: Number,
        length: Number,
        sources: Number,
        servers: Array,
        sms: Number,
        tp: int = 1,
        overlap: str = NO_OVERLAP,
    ) -> Parts:
        """`requests` prompts of `length` tokens spread over `sources` prefill servers.

        servers: MoE servers. sms: share of their SMs.
        """
        each = np.ceil(requests / sources)
        return self.prefill_step(each, length, requests * length, servers, sms, tp, overlap)

    def prefill_step(
        self,
        each: Number,
        length: Number,
        tokens: Number,
        servers: Array,
        sms: Number,
        tp: int = 1,
        overlap: str = NO_OVERLAP,
    ) -> Parts:
        """`each` prompts of `length` on the fullest prefill server, `tokens` over all of them.

        A server sends at most `prefill_tokens` at a time; a longer batch makes several rounds
        through the MoE servers. Rounds are not rounded up: the last one costs its part.
        """
        rounds = np.maximum(1.0, each * length / self.assumptions.prefill_tokens)
        attention = self.kernels.prefill_attention(each, length, tp)
        attention = attention + self.kernels.head(each, tp)
        floor = self.model.layers * self.assumptions.attention_floor_prefill
        attention = on_part(attention, floor, self.shares.prefill)
        reduce = self.network.all_reduce(each * length / rounds, tp) * rounds * self.model.layers
        shared = self.kernels.shared_experts(each * length, tp) / self.shares.prefill
        half = 2.0 if overlap == TBO else 1.0  # micro-batches
        moe, exchange = self.routed(
            PREFILL, each * length / tp, tokens, servers, sms, rounds * half, hierarchical=True
        )
        host = self.assumptions.host_prefill
        return overlapped(overlap, attention + reduce, shared, exchange, moe, host)

    def decode(
        self,
        batch: Number,
        length: Number,
        sources: Number,
        servers: Array,
        sms: Number,
        tp: int = 1,
        overlap: str = NO_OVERLAP,
    ) -> Parts:
        """One token for each of `batch` requests at context `length` over `sources` servers."""
        each = np.ceil(batch / sources)
        return self.decode_step(each, length, batch, servers, sms, tp, overlap)

    def decode_step(
        self,
        each: Number,
        length: Number,
        batch: Number,
        servers: Array,
        sms: Number,
        tp: int = 1,
        overlap: str = NO_OVERLAP,
    ) -> Parts:
        """`each` queries at context `length` on the fullest decode server, `batch` over all.

        It reads memory; as many SMs as saturate it are all that decode's attention needs.
        """
        half = 2.0 if overlap == TBO else 1.0
        speed = np.minimum(1.0, self.shares.decode / self.assumptions.hbm_saturation)
        attention = self.kernels.decode_attention(each / half, length, tp) * half
        attention = attention + self.kernels.head(each, tp)
        floor = self.model.layers * self.assumptions.attention_floor_decode
        attention = on_part(attention, floor, speed)
        reduce = self.network.all_reduce(each / half, tp) * half * self.model.layers
        shared = self.kernels.shared_experts(each / half, tp) * half / speed
        moe, exchange = self.routed(
            DECODE, each / tp, batch, servers, sms, half, hierarchical=False
        )
        host = self.assumptions.host_decode
        return overlapped(overlap, attention + reduce, shared, exchange, moe, host)

    def whole_pass(self, tokens: Number, length: Number) -> float:
        """A forward pass over prompts of `length`, `tokens` in all, with every expert on one GPU:
        no exchange (AsyncEP). Without host time.
        """
        attention = self.kernels.prefill_attention(tokens / length, length, 1)
        shared = self.kernels.shared_experts(tokens, 1)
        tile = self.assumptions.contiguous_tile
        load = self.routing.load(np.array([1]), np.array([tokens]), tile)
        moe = self.kernels.routed_experts(PREFILL, load, 1.0)
        return float(np.squeeze(np.asarray(attention + shared + moe)))

    def routed(
        self,
        phase: str,
        per_source: Number,
        tokens: Number,
        servers: Array,
        sms: Number,
        rounds: Number,
        hierarchical: bool,
    ) -> tuple[Number, Number]:
        """(MoE time, exchange time) of all layers, the tokens going in `rounds` equal parts.

        per_source: tokens that the fullest attention GPU sends; a group of GPUs divides its own.
        """
        a = self.assumptions
        tile = a.contiguous_tile if phase == PREFILL else a.masked_tile
        load = self.routing.load(servers, np.asarray(tokens / rounds), tile)
        moe = self.kernels.routed_experts(phase, load, sms * self.shares.moe) * rounds
        exchange = self.network.exchange(
            per_source / rounds,
            tokens / rounds,
            self.routing.spread(servers),
            servers,
            hierarchical,
        )
        return moe, exchange * rounds * self.model.moe_layers

    def decode_budget(
        self, q: float, batch: float, servers: int, expected_batch: float, most: float
    ) -> float:
        """Eq. (4): the SM budget for this decode batch, in SMs, from the planned `q`.

        most: Q_max, which keeps prefill going.
        """
        tile, c = self.assumptions.masked_tile, self.assumptions.cluster
        count = np.array([servers])
        now = float(self.routing.load(count, np.array([batch]), tile).x_moe[0])
        planned = float(self.routing.load(count, np.array([expected_batch]), tile).x_moe[0])
        return min(most, float(np.ceil(q * now / planned / c) * c))


def on_part(seconds: Number, floor: float, speed: Number) -> Number:
    """Time at a part of a GPU's speed; of it, `floor` is launches, which take as long as ever."""
    return seconds + np.maximum(0.0, seconds - floor) * (1.0 / speed - 1.0)


def overlapped(
    overlap: str, attention: Number, shared: Number, exchange: Number, moe: Number, host: float
) -> Parts:
    """Combine the parts: TBO hides the shorter path, SBO the shorter of shared and routed."""
    routed = exchange + moe
    if overlap == TBO:
        busy = np.maximum(attention + shared, routed)
    elif overlap == SBO:
        busy = attention + np.maximum(shared, routed)
    else:
        busy = attention + shared + routed
    return Parts(attention, shared, exchange, moe, host, busy + host)
