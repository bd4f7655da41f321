"""Iteration times measured on a running deployment, in place of the latency model.

Owns: `MeasuredSteps`. Must not know: how they were measured (`benchmarks/simulator_validation.py`).
"""

import msgspec
import numpy as np

from vllm_expertplex.planner.profile import Fit, evaluate
from vllm_expertplex.simulator.steps import Timing, Work

Slowdown = tuple[tuple[float, float], ...]  # (requests that decode, factor), rising; () is 1


class MeasuredSteps(msgspec.Struct, frozen=True):
    """`Steps` from fits of whole iterations and from how much the phases slow each other.

    prefill: seconds over (tokens, squares / tokens); decode: seconds over (batch, context).
    beside_*: factors on an iteration while the other phase runs, by requests that decode.
    handoff_*: between a prefill's end and the iteration that its request can join: seconds on a
    decode server that stands still, and what one that runs adds, in iterations.
    """

    prefill_fit: Fit
    decode_fit: Fit
    beside_prefill: Slowdown = ()
    beside_decode: Slowdown = ()
    handoff_s: float = 0.0
    handoff_iterations: float = 0.0

    def prefill(self, work: Work, tokens: float, sms: float, beside: float = 0.0) -> Timing:
        """Prefill servers do not slow each other here."""
        seconds = float(evaluate(self.prefill_fit, work.tokens, work.squares / work.tokens))
        seconds *= _factor(self.beside_decode, beside) if beside else 1.0
        return Timing(seconds, seconds)

    def decode(self, each: float, batch: float, length: float, sms: float) -> Timing:
        """`sms` below 1 means that prefill runs."""
        seconds = float(evaluate(self.decode_fit, each, length))
        seconds *= _factor(self.beside_prefill, each) if sms < 1.0 else 1.0
        return Timing(seconds, seconds)

    def handoff(self, iteration: float) -> float:
        return self.handoff_s + self.handoff_iterations * iteration


def _factor(slowdown: Slowdown, decoding: float) -> float:
    if not slowdown:
        return 1.0
    batches, factors = zip(*slowdown, strict=True)
    return float(np.interp(decoding, batches, factors))
