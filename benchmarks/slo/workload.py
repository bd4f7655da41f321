"""Prompts of exactly given lengths, as the file that vLLM's benchmark client reads.

A prompt is random words that are one token each, so no two requests share a prefix and every
server counts the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vllm_expertplex.planner.workload import Lengths, load_workload, read_trace


def lengths(text: str, count: int, seed: int) -> tuple[Lengths, Lengths]:
    """Prompt and output lengths of `count` requests: `IN/OUT` exactly, pairs drawn from a trace
    file, or a named workload of the planner.
    """
    first, slash, second = text.partition("/")
    if slash and first.isdigit() and second.isdigit():
        return np.full(count, int(first)), np.full(count, int(second))
    rng = np.random.default_rng(seed)
    if Path(text).expanduser().is_file():
        inputs, outputs, _ = read_trace(text)
        drawn = rng.integers(0, len(inputs), count)
        return inputs[drawn], outputs[drawn]
    return load_workload(text).sample(count, rng)


def one_token_words(tokenizer: Any, wanted: int = 2000) -> list[str]:
    """Words that are one token after a space, and stay one between others."""
    words = []
    for token in range(len(tokenizer)):
        word = tokenizer.decode([token])
        if not (word.startswith(" ") and word[1:].isalpha() and word.isascii()):
            continue
        if tokenizer.encode(word * 2, add_special_tokens=False) == [token] * 2:
            words.append(word)
        if len(words) == wanted:
            break
    if len(words) < 100:
        raise ValueError(f"the tokenizer has only {len(words)} words of one token, 100 are needed")
    return words


def write_requests(
    path: Path,
    tokenizer: Any,
    workload: str,
    count: int,
    longest: int,
    seed: int,
    progress: Callable[[str], None] = print,
) -> None:
    """JSON lines with `prompt` and `output_tokens`. Requests beyond `longest` tokens (prompt and
    output) are left out and drawn again, and `progress` is told how many.
    """
    inputs, outputs = lengths(workload, 20 * count, seed)
    special = len(tokenizer.encode(""))
    fits = (inputs + outputs <= longest) & (inputs > special)
    if fits.sum() < count:
        raise ValueError(
            f"workload {workload}: {fits.mean():.0%} of its requests fit into {longest} tokens, "
            "too few; raise --max-model-len"
        )
    if not fits.all():
        progress(f"{workload}: {1 - fits.mean():.1%} of the requests exceed {longest} tokens")
    words, rng = one_token_words(tokenizer), np.random.default_rng(seed)
    with path.open("w") as file:
        for prompt, output in zip(inputs[fits][:count], outputs[fits][:count], strict=True):
            drawn = rng.integers(0, len(words), prompt - special)
            text = "".join(words[i] for i in drawn)
            file.write(json.dumps({"prompt": text, "output_tokens": int(output)}) + "\n")
