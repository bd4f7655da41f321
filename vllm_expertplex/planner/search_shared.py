"""Layouts whose servers share GPUs: the shares and SM budget of the highest goodput.

Owns: the search over `sharing.py`'s ways. Must not know: how rates come about.
"""

from collections.abc import Sequence

import numpy as np

from vllm_expertplex.layout import Layout
from vllm_expertplex.planner.rates import Rate
from vllm_expertplex.planner.search import Candidate, pick
from vllm_expertplex.planner.setup import Setting
from vllm_expertplex.planner.sharing import Shares, Sharing, layouts, ways

Found = tuple[Sharing, Candidate]


def search_shared(setting: Setting, gpus: int, layout: Layout | None = None) -> list[Found]:
    """The best of every layout of `gpus` shared GPUs (or of `layout`) that serves the load, best
    layout first. Attention is not tensor-parallel.
    """
    found = [
        best_way(setting, ways(each, setting.gpu.sms))
        for each in ([layout] if layout else layouts(gpus))
    ]
    return sorted((f for f in found if f), key=lambda f: -f[1].goodput)


def best_way(setting: Setting, ways: Sequence[Sharing]) -> Found | None:
    """The best of these ways to share, all of one layout, and its SM budget; None where no GPU
    holds all of its servers, or none keeps the targets. All are evaluated at once.
    """
    sms, step = setting.gpu.sms, setting.assumptions.sm_step
    tried = [
        (way, shares, q)
        for way, shares in ((way, way.shares(sms)) for way in ways)
        for q in range(step, round(sms * float(shares.moe)), step)
    ]
    if not tried:
        return None
    layout = tried[0][0].layout
    problem = setting._replace(sharing=tried[0][0]).problem(layout.moe)
    if problem.memory.attention_usable < problem.memory.attention_server(1):
        return None
    problem.latency.shares = Shares(*np.array([shares for _, shares, _ in tried]).T)
    q = np.array([budget for _, _, budget in tried])
    p, d, e = (np.full_like(q, n) for n in (layout.prefill, layout.decode, layout.moe))
    prefill, decode = problem.prefill_rate(p, e, q, 1), problem.decode_rate(d, e, q, 1)
    best = int(np.argmax(np.minimum(prefill.rate, decode.rate)))
    problem = setting._replace(sharing=tried[best][0]).problem(layout.moe)
    one = slice(best, best + 1)
    candidate = pick(
        problem, p[one], d[one], e[one], q[one], 1, 1,
        Rate(*(x[one] for x in prefill)), Rate(*(x[one] for x in decode)),
    )  # fmt: skip
    return candidate and (tried[best][0], candidate)
