"""The simulator against a running deployment: TTFT and TPOT, P50 and P90, at three rates.

    vllm serve MODEL --executor expertplex --expertplex-layout 1P1D1E --port 8000 ...
    python benchmarks/simulator_validation.py MODEL --url http://127.0.0.1:8000 --layout 1P1D1E

1. Calibration, closed loop, on an idle server: lone prompts of several lengths, several decode
   batches, prompts beside a running decode, and handoffs. Times are fitted to these runs.
2. Simulation: arrivals and lengths are drawn, and simulated on those times.
3. Judgement: the same arrivals and lengths are sent, open loop. No constant is taken from here.

A machine that shares its cores with others is not equally fast for ten minutes. So calibration runs
before and after each rate's traffic, and its simulation takes the times of both.

The rates default to 0.25, 0.5 and 0.75 of what the simulation says the deployment sustains.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from typing import NamedTuple

import aiohttp
import msgspec
import numpy as np
from _report import Row, write
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vllm_expertplex.layout import Layout
from vllm_expertplex.planner.assumptions import Assumptions
from vllm_expertplex.planner.cli import find_plan
from vllm_expertplex.planner.fit import Point, fit
from vllm_expertplex.planner.plan import Plan
from vllm_expertplex.planner.setup import Setting, setting
from vllm_expertplex.simulator.measured import MeasuredSteps
from vllm_expertplex.simulator.requests import Requests, poisson
from vllm_expertplex.simulator.runs import Case, replay
from vllm_expertplex.simulator.steps import NOTHING

WITHIN = 0.20
PAUSE_S = 0.1
REPEATS = 3  # of a lone prompt of each length
TOKENS = 200  # of a stream that decodes beside something
BESIDE = (1, 3, 6)  # streams beside which prefill is measured
TIMEOUT = aiohttp.ClientTimeout(total=600)


class Reply(NamedTuple):
    """Seconds after sending: first token, last token; and the gaps between stream events."""

    first: float
    last: float
    gaps: list[float]


class Client:
    """Streams completions of random token ids; every request runs to its full length."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        model: str,
        vocab: int,
        temperature: float = 0,
    ) -> None:
        self.session, self.url, self.model, self.vocab = session, url.rstrip("/"), model, vocab
        self._temperature = temperature
        self._rng = np.random.default_rng(17)

    async def ready(self, seconds: float = 120.0) -> None:
        """Wait for /health. Raises SystemExit naming the server when it does not answer."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                async with self.session.get(f"{self.url}/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(1.0)
        raise SystemExit(f"{self.url}/health: no healthy server in {seconds:.0f} s; start it first")

    async def complete(
        self, inputs: int, outputs: int, answered: asyncio.Event | None = None
    ) -> Reply:
        """`answered` is set when the first token has come."""
        body = {
            "model": self.model,
            "prompt": self._rng.integers(10, self.vocab - 10, inputs).tolist(),
            "max_tokens": outputs,
            "temperature": self._temperature,
            "ignore_eos": True,
            "stream": True,
        }
        begin, times = time.perf_counter(), []
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"{self.url}: HTTP {response.status}: {await response.text()}")
            async for line in response.content:
                if line.startswith(b"data:") and b"[DONE]" not in line:
                    if "error" in (event := json.loads(line[5:])):
                        raise RuntimeError(f"{self.url}: {event['error']}")
                    times.append(time.perf_counter() - begin)
                    if answered is not None:
                        answered.set()
        return Reply(times[0], times[-1], np.diff(times).tolist())


class Observed(NamedTuple):
    """What one calibration saw. `beside`: by streams, decode gaps and TTFT of prompts beside them,
    and seconds from there to their second token; `lone`: of a handoff, seconds.
    """

    prefill: list[Point]
    decode: list[Point]
    beside: list[tuple[float, float, float]]
    lone: float


async def observe(client: Client, longest: int, batches: list[int], bar: Progress) -> Observed:
    """Measure lone prefills, decode batches, handoffs, and prefill and decode together."""
    lengths = [n for n in (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024) if n <= longest]
    total = REPEATS * len(lengths) + len(batches) * 2 + len(BESIDE) + 1
    task = bar.add_task("calibrating", total=total)
    await client.complete(min(64, longest), 8)  # warm up
    prefill = []
    for length in lengths:
        for _ in range(REPEATS):
            # As in traffic: after a pause, processes have to wake up and caches are cold.
            await asyncio.sleep(PAUSE_S)
            prefill.append(Point(length, length, (await client.complete(length, 1)).first))
            bar.advance(task)
    decode = []
    for batch in batches:
        for length in (longest // 4, longest):
            replies = await asyncio.gather(*(client.complete(length, 40) for _ in range(batch)))
            # the middle of each stream, while all of them decode
            gaps = [g for r in replies for g in r.gaps[15:35]]
            decode.append(Point(batch, length + 30, float(np.mean(gaps))))
            bar.advance(task)
    lone = await handoff(client, longest // 2)
    bar.advance(task)
    beside = []
    for streams in BESIDE:
        beside.append(await together(client, streams, longest // 2, longest))
        bar.advance(task)
    return Observed(prefill, decode, beside, lone)


class Calibration(NamedTuple):
    steps: MeasuredSteps
    table: list[tuple[str, float]]


def calibration(observed: Sequence[Observed], longest: int) -> Calibration:
    """Iteration times fitted to all of `observed`."""
    plain = MeasuredSteps(
        fit([p for o in observed for p in o.prefill], ("1", "x", "x s")),
        fit([p for o in observed for p in o.decode], ("1", "x", "x s"), hold_out=5),
    )
    lone = float(np.mean([o.lone for o in observed]))
    alone_p = plain.prefill(NOTHING.plus(0, longest), longest, 1.0).total
    slow_d, slow_p, waits = [], [], []
    for index, streams in enumerate(BESIDE):
        gaps, first, joined = np.mean([o.beside[index] for o in observed], axis=0).tolist()
        # On average it meets an iteration half done, which is no part of the handoff.
        waits.append((joined - lone) / gaps - 1.5)
        alone_d = plain.decode(streams, streams, longest // 2 + TOKENS / 2, 1.0).total
        slow_d.append((float(streams), max(1.0, gaps / alone_d)))
        slow_p.append((float(streams), max(1.0, first / alone_p)))
    iterations = max(0.0, float(np.mean(waits)))
    steps = msgspec.structs.replace(
        plain, beside_prefill=tuple(slow_d), beside_decode=tuple(slow_p),
        handoff_s=lone, handoff_iterations=iterations,
    )  # fmt: skip
    return Calibration(
        steps,
        [
            ("prefill fit, held-out mean error", steps.prefill_fit.held_out_mean_error),
            ("decode fit, held-out mean error", steps.decode_fit.held_out_mean_error),
            *((f"{n:.0f} decode slower beside prefill, times", f) for n, f in slow_d),
            *((f"prefill slower beside {n:.0f} decode, times", f) for n, f in slow_p),
            ("handoff to an idle decode server, s", lone),
            ("and to a busy one, iterations", iterations),
            ("decode of 4 at the longest, ms", 1e3 * steps.decode(4, 4, longest, 1.0).total),
            ("prefill of the longest, ms", 1e3 * alone_p),
        ],
    )


async def together(
    client: Client, streams: int, length: int, longest: int
) -> tuple[float, float, float]:
    """Means, while `streams` of `length` decode and prompts of `longest` follow each other: decode
    gaps, TTFT of prompts, and from there to their second token.

    Prefill is never idle, and each prompt is handed to decode, as in traffic.
    """
    running = [asyncio.create_task(client.complete(length, TOKENS)) for _ in range(streams)]
    await asyncio.sleep(0)
    prompts = []
    while not any(t.done() for t in running):
        answered = asyncio.Event()
        prompts.append(asyncio.create_task(client.complete(longest, 2, answered)))
        await asyncio.wait_for(answered.wait(), TIMEOUT.total)
    served = await asyncio.gather(*prompts)
    replies = await asyncio.gather(*running)
    # From when all of them decode until the first has finished.
    begin = max(r.first for r in replies)
    end = min(r.last for r in replies)
    gaps = [
        g
        for r in replies
        for g, at in zip(r.gaps, r.first + np.cumsum(r.gaps), strict=True)
        if begin < at - g and at <= end
    ]
    served = served[2:-1]  # the first ones queued behind the prompts of the streams
    first, joined = [r.first for r in served], [r.gaps[0] for r in served]
    return float(np.mean(gaps)), float(np.mean(first)), float(np.mean(joined))


async def handoff(client: Client, length: int) -> float:
    """Seconds from a prefill's end to the first iteration of a decode server that stands still."""
    lone = []
    for _ in range(8):
        await asyncio.sleep(PAUSE_S)
        reply = await client.complete(length, 12)
        lone.append(reply.gaps[0] - float(np.mean(reply.gaps[1:])))
    return max(0.0, float(np.median(lone)))


async def send(client: Client, requests: Requests, bar: Progress) -> Requests:
    """Send the requests at their times; returns them with what was measured."""
    measured = Requests(
        np.asarray(requests.arrival), np.asarray(requests.inputs), np.asarray(requests.outputs)
    )
    task = bar.add_task("sending", total=len(requests))
    begin = time.perf_counter()

    async def one(index: int) -> None:
        await asyncio.sleep(max(0.0, requests.arrival[index] - (time.perf_counter() - begin)))
        reply = await client.complete(requests.inputs[index], requests.outputs[index])
        measured.first[index] = measured.arrival[index] + reply.first
        measured.finish[index] = measured.arrival[index] + reply.last
        bar.advance(task)

    await asyncio.gather(*(one(i) for i in range(len(requests))))
    return measured


def sustained(case: Case) -> float:
    """Rate at which simulated TTFT leaves its floor: P90 above four times the lone one."""

    def p90(rate: float) -> float:
        return replay(case, poisson(case.setting.workload, rate, 300, 5), rate).ttft_p90

    rate, lone = 0.02, p90(0.01)
    while p90(rate * 1.25) < 4 * lone and rate < 1000:
        rate *= 1.25
    return rate


async def validate(args: argparse.Namespace) -> list[Row]:
    layout = Layout.parse(args.layout)
    gpus = layout.prefill + layout.decode + layout.moe
    assume = Assumptions(prefill_tokens=args.batched_tokens, decode_slots=args.slots)
    # H200 only stands in for memory that is never short here; no time is taken from it
    given: Setting = setting(args.model, "h200", args.workload, 60, 10, assume)
    plan: Plan = find_plan(given, max(gpus, 3), layout=args.layout)
    console = Console()
    batches = [int(b) for b in args.batches.split(",")]
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        client = Client(session, args.url, args.served_name or args.model, given.model.vocab)
        await client.ready()

        async def observed() -> Observed:
            with Progress(console=console, transient=True) as bar:
                return await observe(client, args.longest, batches, bar)

        def case(*seen: Observed) -> Case:
            found = calibration(seen, args.longest)
            for name, value in found.table:
                console.print(f"calibration: {name} {value:.3g}")
            return Case(
                setting=given, gpus=max(gpus, 3), mode="expertplex",
                options={"plan": plan, "steps": found.steps},
            )  # fmt: skip

        before = await observed()
        rates = [float(r) for r in args.rates.split(",") if r]
        if not rates:
            most = sustained(case(before))
            rates = [round(most * part, 3) for part in (0.25, 0.5, 0.75)]
        table = Table(title="Simulated against measured (ms)")
        for name in ("req/s", "what", "simulated", "measured", "ratio", f"within {WITHIN:.0%}"):
            table.add_column(name, justify="right")
        rows: list[Row] = []
        for index, rate in enumerate(rates):
            drawn = poisson(given.workload, rate, args.requests, 100 + index, args.longest)
            with Progress(console=console, transient=True) as bar:
                measured = await send(client, drawn, bar)
            after = await observed()
            replay(case(before, after), drawn, rate)
            before = after
            for what in ("ttft", "tpot"):
                for percent in (50, 90):
                    ours = float(np.percentile(getattr(drawn, what), percent))
                    real = float(np.percentile(getattr(measured, what), percent))
                    name = f"{what.upper()} P{percent} at {rate:g} req/s"
                    rows.append(Row(name, "s", ours, real, "measured", None))
                    good = abs(ours / real - 1) <= WITHIN
                    table.add_row(
                        f"{rate:g}", f"{what.upper()} P{percent}", f"{ours * 1e3:.0f}",
                        f"{real * 1e3:.0f}", f"{ours / real:.2f}", "yes" if good else "NO",
                    )  # fmt: skip
    console.print(table)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="directory of the served model (its config.json is read)")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--served-name", help="model name at the server (default: MODEL)")
    parser.add_argument("--layout", default="1P1D1E")
    parser.add_argument("--workload", default="96/24", help="INPUT/OUTPUT mean tokens")
    parser.add_argument("--rates", default="", help="requests/s, comma-separated")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--longest", type=int, default=256, help="cap on tokens of a request")
    parser.add_argument("--batches", default="1,2,3,4,6,8", help="decode batches to calibrate")
    parser.add_argument("--batched-tokens", type=int, default=2048, help="server's prefill budget")
    parser.add_argument("--slots", type=int, default=128, help="server's largest decode batch")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    write("simulator_validation", asyncio.run(validate(args)), args.json)


if __name__ == "__main__":
    main()
