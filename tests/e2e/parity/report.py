"""The results of parity runs: kept as JSON, shown as tables."""

from collections import Counter
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from .suite import TOLERANCE, Verdict


class Score(msgspec.Struct):
    """How many of a group's requests had equal answers."""

    equal: int
    same_answer: int  # equal but for values of logprobs
    total: int

    def __str__(self) -> str:
        if self.equal == self.total:
            return str(self.total)
        return f"{self.equal}/{self.total}" + ("" if self.same_answer == self.total else " !")


class Row(msgspec.Struct):
    """One model, dtype and layout compared with plain vLLM."""

    model: str
    dtype: str
    layout: str
    date: str
    commit: str
    groups: dict[str, Score]
    max_logprob_difference: float
    differing: list[str]
    nonsense: list[str]
    batch_invariant: bool
    plain_start_s: float
    start_s: float

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.model, self.dtype, self.layout)

    @property
    def total(self) -> Score:
        scores = self.groups.values()
        return Score(*(sum(getattr(s, f) for s in scores) for f in Score.__struct_fields__))

    @property
    def passed(self) -> bool:
        return self.total.equal == self.total.total and not self.nonsense


def scores(verdicts: list[Verdict]) -> dict[str, Score]:
    """Verdicts counted by group, in order of first appearance."""
    total = Counter(v.group for v in verdicts)
    equal = Counter(v.group for v in verdicts if not v.differences)
    same = Counter(v.group for v in verdicts if v.same_answer)
    return {group: Score(equal[group], same[group], total[group]) for group in total}


def save(rows: list[Row], file: Path) -> list[Row]:
    """Add `rows` to those in `file`, newer ones replacing older ones; returns all of them."""
    old = msgspec.json.decode(file.read_bytes(), type=list[Row]) if file.exists() else []
    merged = sorted(
        ({r.key: r for r in old} | {r.key: r for r in rows}).values(), key=lambda r: r.key
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode(merged)))
    return merged


def _columns(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(group for row in rows for group in row.groups))


def show(rows: list[Row]) -> None:
    """Print the table, then what differs."""
    table = Table(
        title="ExpertPlex and plain vLLM: requests with equal answers", title_justify="left"
    )
    for name in ("model", "dtype", "layout"):
        table.add_column(name)
    for name in ("equal", "same answer", "max logprob diff", "start (plain), s"):
        table.add_column(name, justify="right")
    for row in rows:
        total = row.total
        table.add_row(
            *row.key,
            f"[{'green' if row.passed else 'red'}]{total.equal}/{total.total}[/]",
            f"{total.same_answer}/{total.total}",
            f"{row.max_logprob_difference:.1e}",
            f"{row.start_s:.0f} ({row.plain_start_s:.0f})",
        )
    console = Console()
    console.print(table)
    for row in rows:
        for line in [*row.nonsense, *row.differing[:8]]:
            console.print(f"{' '.join(row.key)}: {line}", highlight=False, markup=False)
        if len(row.differing) > 8:
            console.print(f"{' '.join(row.key)}: and {len(row.differing) - 8} more")


def markdown(rows: list[Row]) -> str:
    """The page for `docs/`."""
    columns = _columns(rows)
    head = ["model", "dtype", "layout", "equal", "max logprob difference", *columns]
    lines = [
        "# Parity with plain vLLM",
        "",
        "The same requests, sent to plain `vllm serve` and to ExpertPlex on the same checkpoint,",
        "and the whole responses compared: token ids, text, logprobs, finish reasons, usage,",
        "refusals. Features are asked with and without streaming, one request at a time; `16 at",
        "once` sends 16 together and counts where plain vLLM's own answers do not depend on the",
        "batch (`-` elsewhere). Logprobs may differ by "
        f"{TOLERANCE['float32']:g} in float32 and not at all in bfloat16.",
        "",
        "A cell is the number of requests, all with equal answers, or `equal/total`; ` !` marks",
        "answers that differ in more than the values of logprobs. The rows `plain`,",
        "`plain-uncached` (without prefix cache) and `plain-alone` (one request in a step) are",
        "controls: plain vLLM compared with itself. What differs there depends on what else a",
        "server has computed, and says nothing about whose answer is right. Written by",
        "`python -m tests.e2e.parity.matrix`.",
        "",
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
    ]
    for row in rows:
        total = row.total
        cells = [str(row.groups.get(group, "-")) for group in columns]
        equal = f"{total.equal}/{total.total}"
        lines.append(
            "| " + " | ".join([*row.key, equal, f"{row.max_logprob_difference:.1e}", *cells]) + " |"
        )
    runs = sorted({(row.date, row.commit) for row in rows})
    lines += ["", "Runs: " + ", ".join(f"{date} at `{commit}`" for date, commit in runs) + "."]
    broken = [(row, row.nonsense + row.differing) for row in rows if not row.passed]
    if broken:
        lines += ["", "## What differs", ""]
    for row, what in broken:
        lines += [f"- {' '.join(row.key)}: {len(what)}, such as"]
        lines += [f"  - {line}" for line in what[:3]]
    return "\n".join(lines) + "\n"
