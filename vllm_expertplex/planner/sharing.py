"""GPUs that attention servers and MoE servers share: what each role has of their SMs.

Owns: those shares, by the serve command's own rule (`serve/placement.py`), and the ways to share
that a plan tries. Must not know: times, memory, search.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vllm_expertplex.layout import DECODE, PREFILL, Layout
from vllm_expertplex.planner.models import Number
from vllm_expertplex.serve.placement import place

PERCENTS: Sequence[int] = tuple(range(30, 81, 5))  # of SMs, to try


def sms_of(percent: int, sms: int) -> int:
    """That part of a GPU's SMs: CUDA rounds down to pairs."""
    return sms * percent // 200 * 2


class Shares(NamedTuple):
    """Each role's part of its GPUs' SMs, (0-1]; arrays for many ways to share at once."""

    moe: Number = 1.0
    prefill: Number = 1.0
    decode: Number = 1.0


class Sharing(NamedTuple):
    """A layout on as many GPUs as MoE servers, and the options that share out their SMs."""

    layout: Layout
    moe_sm_percent: int
    prefill_sm_percent: int

    @property
    def crowded(self) -> bool:
        """Whether a prefill and a decode server are on one GPU: `prefill_sm_percent` matters."""
        return self.layout.prefill + self.layout.decode > self.layout.moe

    @property
    def readers(self) -> int:
        """Attention servers on the fullest GPU."""
        return 2 if self.crowded else 1

    def shares(self, sms: int) -> Shares:
        """Of the server of each role that has least.

        Decode sees all SMs that MoE servers leave, and is counted with those that prefill leaves,
        too: the others are its own only while prefill on its GPU has no work.
        """
        gpus = [str(n) for n in range(self.layout.moe)]
        places = place(self.layout, gpus, self.prefill_sm_percent, self.moe_sm_percent)
        held = {name: sms_of(p.sm_percent, sms) for name, p in places.items()}
        attention = self.layout.attention_servers
        prefill = {places[s.name].gpu: held[s.name] for s in attention if s.role == PREFILL}
        decode = min(
            held[s.name] - prefill.get(places[s.name].gpu, 0) for s in attention if s.role == DECODE
        )
        moe = min(held[s.name] for s in self.layout.moe_servers)
        return Shares(moe / sms, min(prefill.values()) / sms, decode / sms)


def layouts(gpus: int) -> Iterator[Layout]:
    """A MoE server on every GPU, and at most one prefill and one decode server."""
    for prefill in range(1, gpus + 1):
        for decode in range(1, gpus + 1):
            yield Layout(prefill, decode, gpus)


def ways(layout: Layout, sms: int) -> list[Sharing]:
    """Every way to share GPUs of `sms` SMs that leaves each role some."""
    crowded = Sharing(layout, 50, 50).crowded
    tried = [
        Sharing(layout, moe, prefill)
        for moe in PERCENTS
        for prefill in (PERCENTS if crowded else (100,))
    ]
    return [way for way in tried if min(way.shares(sms)) > 0]
