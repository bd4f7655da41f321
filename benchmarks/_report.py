"""What planner, simulator and goodput benchmarks end with: rows as JSON beside the table."""

import datetime
import json
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass
class Row:
    """One figure; `ratio` is ours over peer. `floor` is what it must keep to."""

    name: str
    unit: str
    ours: float
    peer: float | None
    peer_name: str
    floor: float | None
    ratio: float | None = None

    def __post_init__(self) -> None:
        if self.peer:
            self.ratio = self.ours / self.peer


def write(
    benchmark: str, rows: list[Row], path: str | Path | None, measured_on: str | None = None
) -> None:
    """Write `rows` with device (`measured_on`, else this machine's), commit and command, unless no
    path is given.
    """
    if path is None:
        return
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    Path(path).write_text(
        json.dumps(
            {
                "benchmark": benchmark,
                "date": datetime.date.today().isoformat(),
                "device": measured_on or device(),
                "commit": commit,
                "command": " ".join(["python", *sys.argv]),
                "rows": [asdict(row) for row in rows],
            },
            indent=2,
        )
        + "\n"
    )


def device() -> str:
    """The GPUs of a benchmark that used some, else the processor."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return f"{torch.cuda.device_count()}x {torch.cuda.get_device_name()}"
    return _processor()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
