"""Fitting eq. (2) to measured times with non-negative least squares.

Owns: the fit and its error on held-out points. Must not know: what was measured.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_expertplex.planner.profile import TERMS, Fit


class Point(NamedTuple):
    """One measurement: batch or tiles `x`, length or rows `s`, seconds."""

    x: float
    s: float
    seconds: float


def fit(points: Sequence[Point], terms: Sequence[str], hold_out: int = 4) -> Fit:
    """Fit `terms` (names in `profile.TERMS`) to all but every `hold_out`-th point.

    Rows are divided by the measured time, so that the fit minimises relative error: a decode step
    of 20 us counts as much as a prefill of 20 ms. Raises ValueError with too few points, or when
    scipy is missing.
    """
    try:
        from scipy.optimize import nnls
    except ImportError:
        raise ValueError(
            "fitting a profile needs scipy; install it with `pip install vllm-expertplex[plan]`"
        ) from None
    ordered = sorted(points)
    held = ordered[hold_out // 2 :: hold_out]
    used = [p for i, p in enumerate(ordered) if i % hold_out != hold_out // 2]
    if len(used) < len(terms) or not held:
        raise ValueError(
            f"{len(points)} measured points cannot fit {len(terms)} terms and leave some to check; "
            f"measure at least {len(terms) * 2 + hold_out}"
        )
    matrix, times = _matrix(used, terms), np.array([p.seconds for p in used])
    scale = np.abs(matrix / times[:, None]).max(axis=0)  # columns of like size: better conditioned
    scale[scale == 0] = 1.0
    solution, _ = nnls(matrix / times[:, None] / scale, np.ones(len(used)))
    coefficients = solution / scale
    predicted = _matrix(held, terms) @ coefficients
    error = np.abs(predicted / np.array([p.seconds for p in held]) - 1)
    return Fit(
        terms=tuple(terms),
        coefficients=tuple(float(c) for c in coefficients),
        points=len(used),
        held_out_points=len(held),
        held_out_mean_error=float(error.mean()),
        held_out_max_error=float(error.max()),
    )


def _matrix(points: Sequence[Point], terms: Sequence[str]) -> np.ndarray:
    x, s = (np.array([p[i] for p in points], dtype=float) for i in (0, 1))
    return np.stack([np.asarray(TERMS[t](x, s), dtype=float) for t in terms], axis=1)
