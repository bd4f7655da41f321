"""Measured kernel times: the profile file, and `Kernels` that answers from it.

Owns: the file format and eq. (2) with fitted coefficients. Must not know: how one measures.

A profile holds, per component and phase, coefficients of t = a + b x + c x s + d x s^2 in seconds
of one layer: attention with x requests of length s on one GPU; MoE with a + b x_moe + c rows for
each SM budget (at s = 1 the slopes of eq. 2 are one; rows are the term the paper's form lacks).
"""

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm_expertplex.planner.files import read, write
from vllm_expertplex.planner.kernels import DECODE, PREFILL, Roofline
from vllm_expertplex.planner.models import ModelSpec, Number
from vllm_expertplex.planner.numbers import Amount, Count
from vllm_expertplex.planner.routing import MoeLoad


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients with their terms and the relative error on points the fit did not see."""

    terms: tuple[str, ...]
    coefficients: tuple[Amount, ...]
    points: int
    held_out_points: int
    held_out_mean_error: float
    held_out_max_error: float

    def __post_init__(self) -> None:
        unknown = set(self.terms) - set(TERMS)
        if unknown or len(self.terms) != len(self.coefficients):
            raise ValueError(
                f"a fit of terms {self.terms} with {len(self.coefficients)} coefficients; expected "
                f"one for each, and terms among {', '.join(TERMS)}"
            )


class MoeFit(msgspec.Struct, frozen=True, kw_only=True):
    """One phase's MoE operation on `sms` of the device's SMs (CPU: worker threads)."""

    phase: str
    sms: Count
    fit: Fit


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What `vllm-expertplex profile` writes. `sms`: SMs (CPU: threads) of the whole device."""

    device: str
    model: str
    date: str
    hidden: Count
    expert_intermediate: Count
    sms: Count
    prefill_tile: Count
    decode_tile: Count
    prefill_attention: Fit
    decode_attention: Fit
    moe: list[MoeFit]
    measured: bool = True
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        phases = {m.phase for m in self.moe}
        if phases != {PREFILL, DECODE}:
            raise ValueError(f"MoE fits of {sorted(phases)}; expected {PREFILL} and {DECODE}")


def read_profile(path: str) -> Profile:
    """Read a profile. Raises ValueError naming what is wrong with it."""
    text = read("profile", path)
    try:
        return msgspec.json.decode(text, type=Profile)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"profile {path}: {error}; write one with `vllm-expertplex profile`"
        ) from None


def write_profile(profile: Profile, path: str) -> None:
    write(path, msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")


TERMS = {
    "1": lambda x, s: np.ones_like(x * s),
    "x": lambda x, s: x + 0.0 * s,
    "x s": lambda x, s: x * s,
    "x s^2": lambda x, s: x * s * s,
    "s": lambda x, s: s + 0.0 * x,
}


def evaluate(fit: Fit, x: Number, s: Number) -> Number:
    """Seconds at (x, s)."""
    total: Number = 0.0
    for name, coefficient in zip(fit.terms, fit.coefficients, strict=True):
        total = total + coefficient * TERMS[name](np.asarray(x, float), np.asarray(s, float))
    return total


class ProfiledKernels(Roofline):
    """`Kernels` from a profile; shared experts and head stay rooflines.

    Tensor parallelism divides what was measured at one GPU, floors excepted.
    """

    def __init__(self, profile: Profile, model: ModelSpec, roofline: Roofline) -> None:
        super().__init__(model, roofline.gpu, roofline.assumptions)
        same = (profile.hidden, profile.expert_intermediate)
        if same != (model.hidden, model.expert_intermediate):
            raise ValueError(
                f"the profile was measured for {profile.model} (hidden {same[0]}, expert "
                f"intermediate {same[1]}), the model {model.name} has {model.hidden} and "
                f"{model.expert_intermediate}; profile this model"
            )
        self.profile = profile
        self.source = f"measured: {profile.device}, {profile.model}, {profile.date}"
        self._moe = {
            phase: sorted((m for m in profile.moe if m.phase == phase), key=lambda m: m.sms)
            for phase in {m.phase for m in profile.moe}
        }

    def _divided(self, fit: Fit, x: Number, s: Number, tp: int) -> Number:
        floor = fit.coefficients[fit.terms.index("1")] if "1" in fit.terms else 0.0
        return self.model.layers * (floor + (evaluate(fit, x, s) - floor) / tp)

    def prefill_attention(self, requests: Number, length: Number, tp: int) -> Number:
        return self._divided(self.profile.prefill_attention, requests, length, tp)

    def decode_attention(self, batch: Number, length: Number, tp: int) -> Number:
        return self._divided(self.profile.decode_attention, batch, length, tp)

    def routed_experts(self, phase: str, load: MoeLoad, sms: Number) -> Number:
        """Interpolated between the measured SM budgets; below the least, time grows as 1/SMs."""
        fits = self._moe[phase]
        budgets = np.array([m.sms for m in fits], dtype=float)
        asked = np.asarray(sms, dtype=float) * self.profile.sms
        times = np.stack(
            [
                np.broadcast_to(
                    evaluate(m.fit, load.x_moe, load.rows), np.broadcast_shapes(
                        np.shape(load.x_moe), np.shape(asked)
                    )
                )
                for m in fits
            ]
        )  # fmt: skip
        return self.model.moe_layers * _interpolate(budgets, times, asked)


def _interpolate(
    grid: NDArray[np.float64], values: NDArray[np.float64], at: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Linear in 1/SMs along the first axis of `values`, which stands over `grid`."""
    at = np.broadcast_to(at, values.shape[1:])
    clipped = np.clip(at, grid[0], grid[-1])
    if len(grid) == 1:
        inside = values[0]
    else:
        low = np.clip(np.searchsorted(grid, clipped, side="right") - 1, 0, len(grid) - 2)
        part = (1 / clipped - 1 / grid[low]) / (1 / grid[low + 1] - 1 / grid[low])
        take = np.take_along_axis
        below = take(values, low[None, ...], axis=0)[0]
        above = take(values, low[None, ...] + 1, axis=0)[0]
        inside = below + (above - below) * part
    return np.where(at < grid[0], inside * grid[0] / np.maximum(at, 1e-9), inside)
