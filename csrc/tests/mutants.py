"""Breaks one rule of the scheduler at a time and checks that a host test notices.

Usage: python3 tests/mutants.py [NAME...], in csrc/. Exits 1 if a mutant survives.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent
CXX = os.environ.get("CXX", "g++")
TIMEOUT_S = 300


@dataclass(frozen=True)
class Mutant:
    """One replacement in one header: `old` must occur exactly once."""

    name: str
    file: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "claim: look and take are two steps",
        "queue.h",
        "t = unpack(fetch_add(slot.ticket, uint64_t{1}));",
        "store_release(slot.ticket, load_acquire(slot.ticket) + 1);",
    ),
    Mutant(
        "claim: a ticket above the limit counts",
        "queue.h",
        "  t = unpack(fetch_add(slot.ticket, uint64_t{1}));"
        "  // acquires what the stages before have written\n"
        "  if (t.next >= t.limit) return",
        "  t = unpack(fetch_add(slot.ticket, uint64_t{1}));\n  if (false) return",
    ),
    Mutant(
        "claim: stage and limit from the earlier look",
        "queue.h",
        "t = unpack(fetch_add(slot.ticket, uint64_t{1}));",
        "t.next = unpack(fetch_add(slot.ticket, uint64_t{1})).next;",
    ),
    Mutant(
        "claim: a source keeps its turn",
        "queue.h",
        "if (cursor.taken >= quantum)",
        "if (false)",
    ),
    Mutant(
        "readiness: the stage opens one tile early",
        "queue.h",
        "!= 1) return Finish::kRunning;",
        "> 2) return Finish::kRunning;",
    ),
    Mutant(
        "readiness: an empty stage is opened",
        "queue.h",
        "const uint32_t stage = next_stage(slot.op, tile.stage + 1u);",
        "const uint32_t stage = tile.stage + 1u;",
    ),
    Mutant(
        "readiness: the opener does not release its results",
        "queue.h",
        "store_release(slot.ticket,",
        "store_relaxed(slot.ticket,",
    ),
    Mutant(
        "slot: busy only after opening",
        "queue.h",
        "    fetch_or(queue.busy, uint64_t{1} << i);\n    open_stage(slot, first);\n",
        "    open_stage(slot, first);\n    fetch_or(queue.busy, uint64_t{1} << i);\n",
    ),
    Mutant(
        "slot: not freed",
        "queue.h",
        "fetch_and(queue.busy, ~(uint64_t{1} << tile.slot));",
        "",
    ),
    Mutant(
        "epoch: one worker is not told",
        "scheduler.h",
        "for (uint32_t i = lane; i < s.config.workers;",
        "for (uint32_t i = lane; i + 1 < s.config.workers;",
    ),
    Mutant(
        "epoch: the number does not grow",
        "scheduler.h",
        "const uint64_t number = fetch_add(s.epoch, uint64_t{1}) + 1;",
        "const uint64_t number = load_relaxed(s.epoch) + 1;",
    ),
    Mutant(
        "epoch: the share is off by one",
        "policy.h",
        "worker < decode_workers ?",
        "worker <= decode_workers ?",
    ),
    Mutant(
        "phase: p_i is not looked at",
        "scheduler.h",
        "const uint32_t phase = (preferred + k) % kPhases;",
        "const uint32_t phase = kPhases - 1 - k;",
    ),
    Mutant(
        "phase: a worker keeps to its own phase",
        "scheduler.h",
        "for (uint32_t k = 0; k < kPhases; ++k) {\n    const uint32_t phase",
        "for (uint32_t k = 0; k < 1; ++k) {\n    const uint32_t phase",
    ),
    Mutant(
        "wake: none for a stage that opens",
        "scheduler.h",
        "fetch_add(s.demand, 0u - op.x_moe);\n  wake(s);",
        "fetch_add(s.demand, 0u - op.x_moe);\n  if (result == Finish::kDone) wake(s);",
    ),
    Mutant(
        "wake: none for a submission",
        "scheduler.h",
        "  if (phase == kDecode) announce(s, draw_epoch(s, now_ns));\n  wake(s);",
        "  if (phase == kDecode) announce(s, draw_epoch(s, now_ns));",
    ),
    Mutant(
        "stop: an abort is not looked at",
        "scheduler.h",
        "if (stop == kAbort) return Next::kStop;",
        "",
    ),
    Mutant(
        "stop: a drain leaves prefill behind",
        "scheduler.h",
        " | load_acquire(s.queue[kPrefill].busy))",
        ")",
    ),
    Mutant(
        "fifo: whoever came last goes first",
        "coalesce.h",
        "if (c.arrived_ns[lowest_bit(m)] < c.arrived_ns[first])",
        "if (c.arrived_ns[lowest_bit(m)] > c.arrived_ns[first])",
    ),
    Mutant(
        "coalesce: no window",
        "coalesce.h",
        "const uint64_t due = c.arrived_ns[first] + wait;",
        "const uint64_t due = c.arrived_ns[first] + 10 * wait;",
    ),
    Mutant(
        "coalesce: layers are mixed",
        "coalesce.h",
        "if (c.layer[lowest_bit(m)] == layer)",
        "if (true)",
    ),
]
# The cheapest first: most mutants end there.
TESTS = [
    ("policy_test", [], []),
    ("schedules_test", [], ["20000"]),
    ("exhaustive_test", [], []),
    ("threads_test", ["-fsanitize=thread"], ["30"]),
]
PURE = ("policy.h", "coalesce.h")  # headers that policy_test is about


def killer(mutant: Mutant) -> str | None:
    """The test that fails with this mutation, or None."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for folder in ("scheduler", "tests"):
            shutil.copytree(CSRC / folder, root / folder)
        header = root / "scheduler" / mutant.file
        text = header.read_text()
        if text.count(mutant.old) != 1:
            sys.exit(f"'{mutant.name}': {mutant.file} has its text {text.count(mutant.old)} times")
        header.write_text(text.replace(mutant.old, mutant.new))
        for test, flags, arguments in TESTS[0 if mutant.file in PURE else 1 :]:
            compile_ = [CXX, "-std=c++20", "-O1", "-pthread", *flags, "-I.", f"tests/{test}.cpp"]
            subprocess.run([*compile_, "-o", test], cwd=root, check=True)
            env = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
            try:
                run = subprocess.run(
                    [root / test, *arguments],
                    cwd=root,
                    env=env,
                    capture_output=True,
                    timeout=TIMEOUT_S,
                )
            except subprocess.TimeoutExpired:
                return f"{test} (did not end)"
            if run.returncode:
                return test
    return None


def main() -> None:
    wanted = sys.argv[1:]
    survivors = []
    for mutant in MUTANTS:
        if wanted and not any(w in mutant.name for w in wanted):
            continue
        found = killer(mutant)
        print(f"{mutant.name:<50} {found or 'SURVIVES'}", flush=True)
        if found is None:
            survivors.append(mutant.name)
    if survivors:
        sys.exit(f"{len(survivors)} mutants survive")


if __name__ == "__main__":
    main()
