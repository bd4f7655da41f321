"""Time of dispatch, combine, all-reduce and KV transfer, from bytes and link rates.

Owns: which bytes cross which link, the hierarchical prefill path. Nothing is profiled
(ExpertPlex paper, section 6). Must not know: kernels. Times are seconds per layer.
"""

import numpy as np

from vllm_expertplex.planner.assumptions import Assumptions
from vllm_expertplex.planner.hardware import Gpu
from vllm_expertplex.planner.models import ModelSpec, Number

SCALES = 4.0 / 128  # FP8 1x128 activation scales, bytes per element


class Network:
    """Links of one deployment of `nodes` nodes; every node holds the same share of MoE servers."""

    def __init__(self, model: ModelSpec, gpu: Gpu, assumptions: Assumptions, nodes: int) -> None:
        self.model, self.gpu, self.assumptions, self.nodes = model, gpu, assumptions, nodes
        wide = 1.0 + SCALES if model.expert_bytes < 1.5 else 2.0
        self._out = model.hidden * wide  # dispatch: one token to one MoE server
        self._back = (
            model.hidden * assumptions.combine_bytes
        )  # combine: one partial sum from one MoE server

    def exchange(
        self,
        tokens_per_source: Number,
        tokens: Number,
        spread: Number,
        servers: Number,
        hierarchical: bool,
    ) -> Number:
        """Dispatch and combine of one layer.

        spread: MoE servers one token reaches. The slower of the source's and the MoE server's link
        counts. Between nodes a token goes over RDMA once per remote node on the hierarchical path
        (prefill), else once per remote MoE server.
        """
        a = self.assumptions
        remote = 1.0 - 1.0 / self.nodes
        payload = self._out + self._back
        busiest = np.maximum(tokens_per_source, tokens / servers)  # tokens x servers per link
        nvlink = busiest * spread * (1.0 if hierarchical else 1.0 - remote) * payload
        fixed = 2.0 * a.signal + a.exchange_floor
        if self.nodes == 1:
            return fixed + nvlink / self.gpu.nvlink
        crossings = spread * remote
        if hierarchical:
            crossings = np.minimum(crossings, self.nodes * (1.0 - (remote) ** spread) * remote)
        rdma = busiest * crossings * payload / self.gpu.rdma
        return fixed + 2.0 * a.rdma_latency + np.maximum(nvlink / self.gpu.nvlink, rdma)

    def all_reduce(self, tokens: Number, gpus: int) -> Number:
        """One tensor-parallel all-reduce of the 16-bit hidden state over `gpus` GPUs.

        Between nodes every GPU's NIC carries its part of the node's.
        """
        if gpus == 1:
            return 0.0 * tokens
        size = tokens * self.model.hidden * 2.0
        inside = min(gpus, self.gpu.gpus_per_node)
        nodes = -(-gpus // inside)
        nvlink = 2.0 * (inside - 1) / inside * size / self.gpu.nvlink
        rdma = 2.0 * (nodes - 1) / nodes * size / inside / self.gpu.rdma
        return self.assumptions.allreduce_floor + np.maximum(nvlink, rdma)

    def kv_transfer(self, length: Number) -> Number:
        """Moving one request's KV cache from prefill to decode, whole."""
        m = self.model
        size = m.kv_bytes_per_token * length + m.kv_bytes_per_request
        return size / (self.gpu.nvlink if self.nodes == 1 else self.gpu.rdma)

    def weight_gather(self, gpus: int) -> float:
        """AsyncEP: collecting the other GPUs' shards of one layer's experts over NVLink."""
        layer = self.model.experts * self.model.expert_weight_bytes
        link = self.gpu.nvlink if gpus <= self.gpu.gpus_per_node else self.gpu.rdma
        return layer * (gpus - 1) / gpus / link


class OneGroup(Network):
    """Where one tensor-parallel group of `gpus` GPUs holds the experts as well: every GPU has all
    tokens, and what its experts make of them is summed by all-reduce.
    """

    def __init__(
        self, model: ModelSpec, gpu: Gpu, assumptions: Assumptions, nodes: int, gpus: int
    ) -> None:
        super().__init__(model, gpu, assumptions, nodes)
        self.gpus = gpus

    def exchange(
        self,
        tokens_per_source: Number,
        tokens: Number,
        spread: Number,
        servers: Number,
        hierarchical: bool,
    ) -> Number:
        return self.all_reduce(tokens, self.gpus)
