"""vLLM's own benchmark client at one rate, in this process: importing it takes seconds."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

from slo.search import Request


def arguments(
    base_url: str, name: str, tokenizer: Path, data: Path, rate: float, count: int, result: Path
) -> list[str]:
    """The command line of `vllm bench serve`."""
    return [
        *("--backend", "openai", "--base-url", base_url, "--endpoint", "/v1/completions"),
        *("--model", name, "--tokenizer", str(tokenizer)),
        *("--dataset-name", "custom", "--dataset-path", str(data)),
        *("--custom-output-len", "-1", "--skip-chat-template", "--ignore-eos"),
        *("--num-prompts", str(count), "--request-rate", str(rate), "--burstiness", "1"),
        *("--temperature", "1", "--seed", "0", "--disable-tqdm"),
        *("--save-result", "--save-detailed"),
        *("--result-dir", str(result.parent), "--result-filename", result.name),
    ]


def run(log: Path, *given: Any) -> list[Request]:
    """Send the requests and return every one's latencies. `given` are those of `arguments`; the
    client's own table goes to `log`, its result, in vLLM's format, to the last of them.
    """
    from vllm.benchmarks.serve import add_cli_args, main_async
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    with log.open("a") as output, contextlib.redirect_stdout(output):
        asyncio.run(main_async(parser.parse_args(arguments(*given))))
    return requests(json.loads(given[-1].read_text()))


def requests(result: dict[str, Any]) -> list[Request]:
    """Every request of a result that was saved with its details."""
    columns = (result[name] for name in ("errors", "ttfts", "itls", "output_lens"))
    found = []
    for error, ttft, itls, tokens in zip(*columns, strict=True):
        # Several tokens may come in one event, so the gaps' sum counts, not their number.
        tpot = sum(itls) / (tokens - 1) if tokens > 1 else None
        found.append(Request(not error and tokens > 0, ttft, tpot))
    return found
