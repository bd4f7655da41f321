"""Whether answers read from one forward pass are those that generation gives.

    python benchmarks/asyncep_agreement.py MODEL [--engines 2] [--json FILE]

A classification task that any small model has an opinion on: words to be sorted into categories,
from a few examples in the prompt. Each word is answered twice by the same deployment: prefill-only
(`/v1/choose`, the most probable label) and autoregressively (greedy text, its first word). Reports
how often the two agree, and how often each is right. Also as a multi-selection, one yes/no question
per category.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from _report import Row, write
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.e2e import server as servers

WORDS = {
    "animal": "horse tiger sheep rabbit eagle shark monkey goat lion duck whale bear",
    "fruit": "banana orange grape peach lemon cherry mango pear plum melon strawberry kiwi",
    "country": "Spain Japan Brazil Canada Egypt India Mexico Norway Poland Kenya Peru Greece",
    "color": "red blue green yellow purple pink brown black white gray violet turquoise",
}
EXAMPLES = {"dog": "animal", "apple": "fruit", "France": "country", "silver": "color"}
AGREEMENT_FLOOR = 0.9
console = Console()


def question(word: str) -> str:
    shown = "".join(f"Word: {w}\nCategory: {c}\n\n" for w, c in EXAMPLES.items())
    return f"{shown}Word: {word}\nCategory:"


def post(server: servers.Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = server.post(path, body)
    reply.raise_for_status()
    return reply.json()


def chosen(server: servers.Server, word: str) -> str:
    """Prefill-only: the most probable category."""
    labels = [f" {category}" for category in WORDS]
    return str(post(server, "/v1/choose", {"prompt": question(word), "labels": labels})["label"])


def generated(server: servers.Server, word: str) -> str:
    """Autoregressive: the first word of the greedy continuation."""
    body = {"prompt": question(word), "max_tokens": 6, "temperature": 0}
    text = post(server, "/v1/completions", body)["choices"][0]["text"]
    return " " + (text.split() or [""])[0].strip(".,\"'").lower()


def selected(server: servers.Server, word: str) -> str:
    """Multi-selection: the category with the most probable yes."""
    body = {
        "prompt": "Is a dog an animal? yes\nIs a dog a fruit? no\n"
        "Is France a country? yes\nIs silver an animal? no\n",
        "options": list(WORDS),
        "question": f"Is {word} a {{option}}?",
    }
    options = post(server, "/v1/choose", body)["options"]
    return " " + str(max(options, key=lambda row: row["probability"])["option"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    servers.interrupt_on_sigterm()
    items = [(word, f" {category}") for category, ws in WORDS.items() for word in ws.split()]
    options = ("--executor", "asyncep", "--asyncep-gpus", str(args.engines))
    answers = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        servers.serve(args.model, Path(scratch) / "server.log", options=options) as server,
    ):
        for word, truth in track(items, "asking", console=console):
            answers.append(
                (truth, chosen(server, word), generated(server, word), selected(server, word))
            )
    total = len(answers)
    agree = sum(c == g for _, c, g, _ in answers) / total
    right, right_generated, right_selected = (
        sum(answer[i] == answer[0] for answer in answers) / total for i in (1, 2, 3)
    )
    generation = "generation"
    rows = [
        Row("agreement with generation", "share", agree, None, "", AGREEMENT_FLOOR),
        Row("right, single choice", "share", right, right_generated, generation, None),
        Row("right, multi-selection", "share", right_selected, right_generated, generation, None),
    ]
    table = Table(title=f"{args.model.name}, {total} words in {len(WORDS)} categories")
    for column in ("", "one forward pass", "generation", "at least"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        peer = "" if row.peer is None else f"{row.peer:.1%}"
        floor = "" if row.floor is None else f"{row.floor:.0%}"
        table.add_row(row.name, f"{row.ours:.1%}", peer, floor)
    console.print(table)
    write("asyncep_agreement", rows, args.json)


if __name__ == "__main__":
    main()
