"""Mixed load with cancellations on a deployment; then nothing may be held any more, and a killed
attention server may cost its own requests only.

    python tests/gpu/load.py [--seconds 1800] [--rate 12] [--layout 2P2D1E] [--json FILE]

The requests and what must hold afterwards are those of tests/e2e/failure, for as long as one likes.
Any check that fails ends it with its error; the counts so far are printed and written all the same.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from _report import Row, write
from parity_serve import GRAPHS
from vllm.platforms import current_platform

from tests.e2e.failure import test_storm_and_losses as losses
from tests.e2e.failure.conftest import Deployment, started
from tests.e2e.failure.traffic import Request, Traffic
from tests.e2e.models import checkpoint
from tests.e2e.server import interrupt_on_sigterm
from vllm_expertplex.layout import Layout

DRAIN_S = 120.0  # after the last request has been sent
STOP_S = 30.0
TOLD_S = 10.0
# GPUs answer the tests' short requests before a client can hang up.
LONGER = 1 if current_platform.is_cpu() else 8
# Without prefix caching an answer does not depend on what was asked before, not by a rounding.
OPTIONS = ("--no-enable-prefix-caching", *(() if current_platform.is_cpu() else GRAPHS))


def requests(seconds: float, rate: float, seed: int) -> list[Request]:
    """The storm's requests, each at a random time: `rate` a second."""
    rng = random.Random(seed)
    found = []
    for request in losses.storm(max(1, round(seconds * rate)), seed):
        body = {**request.body, "max_tokens": request.body["max_tokens"] * LONGER}
        start_s = rng.random() * seconds
        found.append(msgspec.structs.replace(request, body=body, start_s=start_s))
    return found


def outcomes(given: list[Request], traffic: Traffic) -> Counter[str]:
    """How many requests ended how; what is still on its way is not counted."""
    counts: Counter[str] = Counter()
    for request, outcome in zip(given, traffic.outcomes, strict=True):
        if outcome.ended == 0:
            continue
        if outcome.error is not None:
            counts["failed"] += 1
        elif outcome.cut:
            counts["cancelled"] += 1
        else:
            whole = outcome.finished == request.body["n"]
            counts["answered" if whole else "ended short"] += 1
    return counts


def storm(deployment: Deployment, seconds: float, rate: float, counts: Counter[str]) -> None:
    """The load, then the integrity check; adds to `counts` what became of the requests."""
    before, expired = losses.answers(deployment), deployment.metrics(*losses.EXPIRED)
    given = requests(seconds, rate, seed=1)
    traffic = Traffic(deployment.port, given)
    told = time.monotonic()

    def over() -> bool:
        nonlocal told
        done = outcomes(given, traffic)
        if time.monotonic() - told > TOLD_S:
            told = time.monotonic()
            print(f"{done.total()} of {len(given)}: {dict(done)}", flush=True)
        time.sleep(0.2)
        return done.total() == len(given)

    try:
        traffic.wait_until(over, seconds + DRAIN_S, f"the end of {len(given)} requests")
    finally:
        counts.update(outcomes(given, traffic))
        counts["requests"] += len(given)
    errors = Counter(str(o.error)[:200] for o in traffic.outcomes if o.error is not None)
    assert not errors, errors.most_common(5)
    assert not counts["ended short"], counts
    assert counts["cancelled"], "nobody has hung up, so nothing was tested"
    losses.assert_nothing_held(deployment, losses.RELEASE_S)
    assert deployment.metrics(*losses.EXPIRED) == expired, "KV was freed by its lease only"
    assert losses.answers(deployment) == before, "answers have changed"


@contextmanager
def step(name: str, results: dict[str, bool]) -> Iterator[None]:
    """Remembers whether the body passed, and says how long it took."""
    begun = time.monotonic()
    results[name] = False
    yield
    results[name] = True
    print(f"{name}: passed, {time.monotonic() - begun:.1f} s", flush=True)


def run(
    args: argparse.Namespace, logs: Path, counts: Counter[str], passed: dict[str, bool]
) -> None:
    layout = Layout.parse(args.layout)
    options = (*OPTIONS, *args.option)
    with started(
        checkpoint(args.model),
        logs,
        layout=args.layout,
        config={"kv_lease_s": losses.LEASE_S},
        options=options,
    ) as deployment:
        print(f"{args.layout} started in {deployment.server.start_s:.0f} s", flush=True)
        with step("nothing held after the load", passed):
            storm(deployment, args.seconds, args.rate, counts)
        for role, servers in (("decode", layout.decode), ("prefill", layout.prefill)):
            if servers > 1:
                victim = f"{role}-{servers - 1}"
                with step(f"{victim} killed, only its requests lost", passed):
                    losses.test_a_lost_attention_server_costs_its_own_requests_only(
                        deployment, victim
                    )
        with step("nothing left after a stop", passed):
            deployment.footprint.note()
            deployment.server.stop(STOP_S)
            # Compilers may keep files in the temporary folder.
            left = [x for x in deployment.footprint.left() if not x.startswith("file ")]
            assert left == []


def rows(args: argparse.Namespace, counts: Counter[str], passed: dict[str, bool]) -> list[Row]:
    def row(name: str, unit: str, value: float) -> Row:
        return Row(f"{args.model} {args.layout}: {name}", unit, value, None, "", None)

    kinds = ("requests", "answered", "cancelled", "failed", "ended short")
    return [
        row("load", "s", args.seconds),
        *(row(kind, "requests", counts[kind]) for kind in kinds),
        *(row(name, "1: passed", float(ok)) for name, ok in passed.items()),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1800.0, help="of load (1800)")
    parser.add_argument("--rate", type=float, default=12.0, help="requests a second (12)")
    parser.add_argument("--layout", default="2P2D1E", help="two servers of a role: one is killed")
    parser.add_argument("--model", default="minimax-m2", help="a tiny checkpoint's name")
    parser.add_argument("--option", action="append", default=[], help="of vllm serve; repeatable")
    parser.add_argument("--logs", type=Path, help="keep the server's log in this folder")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    interrupt_on_sigterm()
    counts: Counter[str] = Counter()
    passed: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as scratch:
        logs = args.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        try:
            run(args, logs, counts, passed)
        finally:
            found = rows(args, counts, passed)
            for row in found:
                print(f"{row.name}: {row.ours:g} {row.unit}", flush=True)
            write("load", found, args.json)


if __name__ == "__main__":
    main()
