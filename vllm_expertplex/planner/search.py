"""Algorithm 1 of the ExpertPlex paper: the layout and SM budget of the highest goodput.

Owns: the layouts tried, the exhaustive search and a separable one that finds the same optimum.
Must not know: how rates come about (`rates.py`), how results are shown.

The separable search rests on two facts. For fixed MoE servers E, SM budget q and tensor
parallelism, the prefill rate depends on the prefill servers P only and does not fall when P grows:
every batch stays feasible and no iteration gets longer. The decode rate likewise does not fall with
D. As D is what E and P leave, goodput min(rising, falling) is largest where the two cross, which
bisection over P finds, for all (E, q) at once.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_expertplex.layout import Layout
from vllm_expertplex.planner.rates import Problem, Rate, between

Array = NDArray[Any]
Progress = Callable[[float], None]


class Space(NamedTuple):
    """Layouts to try. `unit`: every role's GPUs are a multiple of it (nodes, when alike)."""

    gpus: int
    unit: int
    budgets: tuple[int, ...]
    tp: tuple[int, ...] = (1, 2, 4, 8)  # those that divide the model's heads


class Candidate(NamedTuple):
    """One layout with its batches and rates. Rates in requests/s of the whole deployment."""

    prefill: int
    decode: int
    moe: int
    tp_prefill: int
    tp_decode: int
    q: int
    goodput: float
    prefill_rate: float
    decode_rate: float
    prefill_batch: int
    decode_batch: int
    prefill_overlap: str
    decode_overlap: str

    @property
    def layout(self) -> str:
        return f"{self.prefill}P{self.decode}D{self.moe}E"


def search(problem: Problem, space: Space, progress: Progress = lambda _: None) -> Candidate | None:
    """The best layout by the separable search; None when none is feasible.

    progress: called with the finished part, 0 to 1.
    """
    moe, q = _grid(problem, space)
    pairs = [(tp, td) for tp in _tps(space) for td in _tps(space)]
    best: Candidate | None = None
    for done, (tp_p, tp_d) in enumerate(pairs):
        best = _better(best, _cross(problem, space, moe, q, tp_p, tp_d))
        progress((done + 1) / len(pairs))
    return best


def _cross(
    problem: Problem, space: Space, moe: Array, q: Array, tp_p: int, tp_d: int
) -> Candidate | None:
    """Best layout for one pair of tensor parallelisms: bisect the crossing, for all (E, q)."""
    step_p, step_d = space.unit * tp_p, space.unit * tp_d
    rest = space.gpus - moe
    low, high = problem.memory.prefill_bounds(moe, rest, tp_p, tp_d)
    # integer steps of P: at least one, leaving at least one step of D, buffers within memory
    least = np.maximum(1, np.ceil(low / step_p))
    most = np.minimum((rest - step_d) // step_p, high // step_p)
    keep = most >= least
    if not keep.any():
        return None
    moe, q, rest, least, most = (x[keep] for x in (moe, q, rest, least, most))

    def decode_gpus(steps: Array) -> Array:
        return (rest - steps * step_p) // step_d * step_d

    def rates(steps: Array) -> tuple[Rate, Rate]:
        return (
            problem.prefill_rate(steps * step_p, moe, q, tp_p),
            problem.decode_rate(decode_gpus(steps), moe, q, tp_d),
        )

    def prefill_is_short(steps: Array) -> NDArray[np.bool_]:
        prefill, decode = rates(steps)
        return prefill.rate <= decode.rate

    last_short = between(prefill_is_short, least, most)
    best: Candidate | None = None
    for steps in (last_short, np.minimum(last_short + 1, most)):
        prefill, decode = rates(steps)
        best = _better(
            best,
            pick(problem, steps * step_p, decode_gpus(steps), moe, q, tp_p, tp_d, prefill, decode),
        )
    return best


def search_exhaustive(
    problem: Problem, space: Space, progress: Progress = lambda _: None
) -> Candidate | None:
    """Algorithm 1 as written: every layout and SM budget of `space` is evaluated."""
    pairs = [(tp, td) for tp in _tps(space) for td in _tps(space)]
    best: Candidate | None = None
    for done, (tp_p, tp_d) in enumerate(pairs):
        for candidate in _everything(problem, space, tp_p, tp_d):
            best = _better(best, candidate)
        progress((done + 1) / len(pairs))
    return best


def fixed_layout(problem: Problem, space: Space, layout: Layout) -> Candidate | None:
    """The best SM budget, tensor parallelism and overlap of one given layout."""
    best: Candidate | None = None
    q = np.asarray(space.budgets, dtype=np.int64)
    p, d, e = (np.full_like(q, n) for n in (layout.prefill, layout.decode, layout.moe))
    for tp_p in (t for t in space.tp if layout.prefill % t == 0):
        for tp_d in (t for t in space.tp if layout.decode % t == 0):
            sources = (layout.prefill / tp_p, layout.decode / tp_d)
            if not problem.memory.moe_fits(*sources, layout.moe):
                continue
            rate_p = problem.prefill_rate(p, e, q, tp_p)
            rate_d = problem.decode_rate(d, e, q, tp_d)
            best = _better(best, pick(problem, p, d, e, q, tp_p, tp_d, rate_p, rate_d))
    return best


def all_layouts(problem: Problem, space: Space) -> list[Candidate]:
    """The best (q, TP, overlap) of every layout, best layout first: what a plan compares with."""
    best: dict[str, Candidate] = {}
    for tp_p in _tps(space):
        for tp_d in _tps(space):
            for c in _everything(problem, space, tp_p, tp_d):
                if c.layout not in best or c.goodput > best[c.layout].goodput:
                    best[c.layout] = c
    return sorted(best.values(), key=lambda c: -c.goodput)


def _everything(problem: Problem, space: Space, tp_p: int, tp_d: int) -> Iterator[Candidate]:
    """Best q of every layout of one pair of tensor parallelisms, one MoE server count at a time."""
    step_p, step_d = space.unit * tp_p, space.unit * tp_d
    q = np.asarray(space.budgets, dtype=np.int64)[None, :]
    for count in _moe_counts(problem, space):
        rest = space.gpus - count
        prefill = np.arange(step_p, rest - step_d + 1, step_p)[:, None]
        if not prefill.size:
            continue
        decode = (rest - prefill) // step_d * step_d
        low, high = problem.memory.prefill_bounds(np.array([count]), np.array([rest]), tp_p, tp_d)
        fits = (prefill >= low) & (prefill <= high)
        prefill, decode = prefill[fits[:, 0]], decode[fits[:, 0]]
        if not prefill.size:
            continue
        shape = np.broadcast_shapes(prefill.shape, q.shape)
        p, d, budget = (np.broadcast_to(x, shape) for x in (prefill, decode, q))
        moe = np.full(shape, count)
        rate_p = problem.prefill_rate(p, moe, budget, tp_p)
        rate_d = problem.decode_rate(d, moe, budget, tp_d)
        for row in range(shape[0]):
            picked = pick(
                problem, p[row], d[row], moe[row], budget[row], tp_p, tp_d,
                Rate(*(x[row] for x in rate_p)), Rate(*(x[row] for x in rate_d)),
            )  # fmt: skip
            if picked is not None:
                yield picked


def pick(
    problem: Problem, prefill: Array, decode: Array, moe: Array, q: Array, tp_p: int, tp_d: int,
    rate_p: Rate, rate_d: Rate,
) -> Candidate | None:  # fmt: skip
    """The best element of parallel arrays as a `Candidate`; None when all rates are zero."""
    goodput = np.minimum(rate_p.rate, rate_d.rate)
    i = int(np.argmax(goodput))
    if goodput[i] <= 0:
        return None
    names = problem.latency.overlaps
    return Candidate(
        prefill=int(prefill[i]),
        decode=int(decode[i]),
        moe=int(moe[i]),
        tp_prefill=tp_p,
        tp_decode=tp_d,
        q=int(q[i]),
        goodput=float(goodput[i]),
        prefill_rate=float(rate_p.rate[i]),
        decode_rate=float(rate_d.rate[i]),
        prefill_batch=int(rate_p.batch[i]),
        decode_batch=int(rate_d.batch[i]),
        prefill_overlap=names[int(rate_p.overlap[i])],
        decode_overlap=names[int(rate_d.overlap[i])],
    )


def _better(best: Candidate | None, new: Candidate | None) -> Candidate | None:
    if best is None or (new is not None and new.goodput > best.goodput * (1 + 1e-12)):
        return new if new is not None else best
    return best


def _tps(space: Space) -> list[int]:
    return [tp for tp in space.tp if tp * space.unit * 2 < space.gpus]


def _moe_counts(problem: Problem, space: Space) -> list[int]:
    """MoE server counts whose experts fit at all, with room for one step of P and of D."""
    most = min(problem.latency.model.experts, space.gpus - 2 * space.unit)
    counts = np.arange(space.unit, most + 1, space.unit)
    if not counts.size:
        return []
    held = problem.memory.experts(counts) + problem.latency.assumptions.runtime_reserve
    return [int(c) for c in counts[np.asarray(held) <= problem.memory.usable]]


def _grid(problem: Problem, space: Space) -> tuple[Array, Array]:
    """Flat arrays of every (MoE servers, SM budget)."""
    counts = np.asarray(_moe_counts(problem, space), dtype=np.int64)
    budgets = np.asarray(space.budgets, dtype=np.int64)
    moe, q = np.meshgrid(counts, budgets, indexing="ij")
    return moe.ravel(), q.ravel()
