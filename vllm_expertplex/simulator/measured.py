"""Iteration times measured on a running deployment, in place of the latency model.

Owns: `MeasuredSteps`. Must not know: how they were measured (`benchmarks/simulator_validation.py`).
"""

import msgspec

from vllm_expertplex.planner.profile import Fit, evaluate
from vllm_expertplex.simulator.steps import Timing, Work


class MeasuredSteps(msgspec.Struct, frozen=True):
    """`Steps` from fits of whole iterations and from how much the phases slow each other.

    prefill: seconds over (tokens, squares / tokens); decode: seconds over (batch, context).
    beside_*: factor on an iteration while the other phase runs, at least 1.
    handoff_*: seconds between a prefill's end and the iteration that its request can join, on a
    decode server that stands still, and on one that runs other requests.
    """

    prefill_fit: Fit
    decode_fit: Fit
    beside_prefill: float = 1.0
    beside_decode: float = 1.0
    handoff_idle: float = 0.0
    handoff_busy: float = 0.0

    def prefill(self, work: Work, tokens: float, sms: float) -> Timing:
        """`sms` below 1 means that decode runs; prefill servers do not slow each other here."""
        seconds = float(evaluate(self.prefill_fit, work.tokens, work.squares / work.tokens))
        seconds *= self.beside_decode if sms < 1.0 else 1.0
        return Timing(seconds, seconds)

    def decode(self, each: float, batch: float, length: float, sms: float) -> Timing:
        """`sms` below 1 means that prefill runs."""
        seconds = float(evaluate(self.decode_fit, each, length))
        seconds *= self.beside_prefill if sms < 1.0 else 1.0
        return Timing(seconds, seconds)

    def handoff(self, busy: bool) -> float:
        return self.handoff_busy if busy else self.handoff_idle
