"""Starts systems, measures them, and writes down what they do.

Must not know: how a system is started, what a request is, how results are shown.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import httpx
import model_speed
import step_profile
from _report import device
from slo import client, results, search, systems, workload
from transformers import AutoTokenizer

from vllm_expertplex.planner.workload import Targets

WARM_PROMPTS = 40
WARM_S = 3.0
PATIENT = Targets(60.0, 1.0)

Result = TypeVar("Result")


def _say(text: str) -> None:
    print(text, flush=True)


class Run:
    """One call: its systems and workloads, how they are sent, and where everything is kept."""

    def __init__(self, options: argparse.Namespace, setup: systems.Setup) -> None:
        self.setup = setup
        self.file = setup.logs / "measured.jsonl"
        self._device = device()
        config = json.loads((setup.model / "config.json").read_text())
        self._layers = int(config["num_hidden_layers"])
        self._options = options
        tokenizer = AutoTokenizer.from_pretrained(setup.model)
        given = setup.max_model_len, options.seed, _say
        self._workloads = [
            (load, workload.Prompts(tokenizer, load.name, *given)) for load in options.workloads
        ]
        # Goodput of the last system under a workload, of ours and of vLLM's: there the search
        # begins for the next one, as systems differ less than guesses.
        self._known: dict[tuple[str, bool], float] = {}
        for record in results.read(options.merge):
            if isinstance(record, results.Load):
                self._note(record.ours, record.workload, record.goodput)
        self._mixed: set[str] = set()  # systems that have had a mixed load
        self.failed: list[str] = []

    def measure(self, group: list[systems.System]) -> None:
        """Start systems at once, measure them in turn. One that fails does not end the others."""
        try:
            self._measure_all(group)
        except systems.ServerError as error:
            self._fail(group[-1], error)  # when it was stopped

    def _measure_all(self, group: list[systems.System]) -> None:
        begun = time.monotonic()
        with contextlib.ExitStack() as stack:
            starting = {s.name: stack.enter_context(s.begin(self._setup(s))) for s in group}
            running = {}
            for system in group:
                if found := self._attempt(system, starting[system.name]):
                    running[system] = found
                    _say(
                        f"{system.name}: healthy after {found.start_s:.0f} s, "
                        f"KV {found.kv_tokens} tokens"
                    )
            with ThreadPoolExecutor(len(group)) as pool:
                warm = {s: pool.submit(self._warm, r) for s, r in running.items()}
            _say(f"warm after {time.monotonic() - begun:.0f} s")
            for system, found in running.items():
                begun = time.monotonic()
                self._attempt(system, warm[system].result)
                self._attempt(system, functools.partial(self._measure, system, found))
                _say(f"{system.name}: measured in {time.monotonic() - begun:.0f} s")

    def _attempt(self, system: systems.System, what: Callable[[], Result]) -> Result | None:
        try:
            return what()
        except Exception as error:  # whatever it is, what others have measured counts
            self._fail(system, error)
            return None

    def _fail(self, system: systems.System, error: Exception) -> None:
        self.failed.append(system.name)
        _say(f"{system.name} failed: {type(error).__name__}: {error}")

    def _setup(self, system: systems.System) -> systems.Setup:
        if system.name not in self._options.speed:
            return self.setup
        traced = step_profile.options(self._traces(system))
        return self.setup._replace(options=(*self.setup.options, *traced))

    def _warm(self, running: systems.Running) -> None:
        """Prompts of many lengths, one by one and all at once: kernels compile at first use."""
        prompts = [p for _, prompts in self._workloads for p in prompts.first(WARM_PROMPTS)]
        prompts.sort(key=lambda p: p.tokens)

        def ask(prompt: workload.Prompt) -> None:
            body = {"model": systems.MODEL_NAME, "prompt": prompt.text, "max_tokens": 4}
            for _ in range(3):  # engines that meet for the first time may be too slow for NIXL
                answer = http.post("/v1/completions", json=body | {"ignore_eos": True})
                if answer.is_success:
                    return
            answer.raise_for_status()

        with model_speed.client(running.base_url) as http, ThreadPoolExecutor(64) as pool:
            for prompt in prompts[:: max(1, len(prompts) // 12)]:
                ask(prompt)
            list(pool.map(ask, prompts))

    def _measure(self, system: systems.System, running: systems.Running) -> None:
        for load, prompts in self._workloads:
            found = self._search(system, running, load, prompts)
            self._note(system.ours, load.name, found.goodput)
            self._keep_metrics(system, running, load.name)
        if system.name in self._options.speed:
            self._speed(system, running)

    def _search(
        self,
        system: systems.System,
        running: systems.Running,
        load: workload.Workload,
        prompts: workload.Prompts,
    ) -> search.Found:
        options, known = self._options, self._known
        other = known.get((load.name, not system.ours), load.start)
        start = known.get((load.name, system.ours), other)
        label = f"{system.name}-{_file_name(load.name)}"
        targets = load.targets.ttft, load.targets.tpot
        what = system.name, system.ours, self._device, load.name, *targets

        send = functools.partial(client.run, running.base_url, systems.MODEL_NAME)

        def probe(rate: float) -> tuple[search.Attainment, int]:
            begun = time.monotonic()
            count = max(options.requests, math.ceil(rate * options.seconds))
            result = self.setup.logs / f"{label}-{rate:.4g}.json"
            decided = send(prompts.first(count), rate, load.targets, result)
            if not any(request.ok for request in decided):
                raise systems.ServerError(f"it answered none of {len(decided)} requests")
            met = search.attainment(decided, load.targets)
            _say(
                f"{system.name}, {load.name} at {rate:.3g}/s: TTFT {met.ttft:.0%}, "
                f"TPOT {met.tpot:.0%}, both {met.both:.0%} of {len(decided)}; "
                f"{time.monotonic() - begun:.1f} s"
            )
            seen = running.kv_tokens, running.start_s, [search.Probe(rate, met, len(decided))]
            results.append(self.file, results.Load(*what, *seen))
            return met, len(decided)

        if system.name not in self._mixed:  # kernels for steps of prefill and decode
            self._mixed.add(system.name)
            send(prompts.first(math.ceil(start * WARM_S)), start, PATIENT)
        limits = {"step": options.step, "precision": options.precision, "most": options.rates}
        return search.goodput(probe, start, seconds=options.search_seconds, **limits)

    def _note(self, ours: bool, workload: str, goodput: float) -> None:
        if goodput > 0:
            self._known[workload, ours] = goodput

    def _speed(self, system: systems.System, running: systems.Running) -> None:
        figures = model_speed.measure(running.base_url)
        with step_profile.recording(running.base_url):
            model_speed.decode(running.base_url, model_speed.DECODE_BATCHES[-1], 128)
        step = step_profile.of_folder(self._traces(system), self._layers)
        if step:
            _say(f"{system.name}: a step of {step.period:.0f} us {step.kinds}")
        what = system.name, system.ours, self._device, self._layers
        results.append(self.file, results.Speed(*what, figures, step))
        self._keep_metrics(system, running, "speed")

    def _traces(self, system: systems.System) -> Path:
        return self.setup.logs / f"traces-{system.name}"

    def _keep_metrics(self, system: systems.System, running: systems.Running, when: str) -> None:
        for path in ("metrics", "expertplex/status") if system.ours else ("metrics",):
            name = f"{system.name}-{_file_name(when)}-{_file_name(path)}.txt"
            with contextlib.suppress(httpx.HTTPError):
                answer = httpx.get(f"{running.base_url}/{path}", timeout=20, trust_env=False)
                (self.setup.logs / name).write_text(answer.text)


def _file_name(text: str) -> str:
    return text.replace("/", "-")
