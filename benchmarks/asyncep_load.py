"""Prompts of a prefill-only load, and sending many at once.

Requests are encoded beforehand and carry several short prompts each, so that neither this client
nor the servers' HTTP is what is measured.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.e2e.server import MODEL_NAME

PREFIXES = ("none", "shared", "skewed")
SHARE = 0.75  # of a prompt, where prefixes are shared
REQUEST_TOKENS = 16384  # of the prompts of one request, at most


class Cell(NamedTuple):
    """Prompts of `length` tokens. shared: eight prefixes in turn; skewed: most have the same."""

    length: int
    prefixes: str = "none"

    @classmethod
    def parse(cls, text: str) -> "Cell":
        """From LENGTH or LENGTH:PREFIXES. Raises ValueError."""
        length, _, prefixes = text.partition(":")
        if prefixes not in ("", *PREFIXES):
            raise ValueError(f"{text}: expected LENGTH or LENGTH:PREFIXES, one of {PREFIXES}")
        return cls(int(length), prefixes or "none")

    def __str__(self) -> str:
        return f"{self.length} tokens, prefixes {self.prefixes}"

    def prompt(self, index: int, salt: int) -> list[int]:
        groups = {"none": index, "shared": index % 8, "skewed": 0 if index % 8 else index}
        head = int(self.length * SHARE) if self.prefixes != "none" else 0
        return [
            *_drawn(head, groups[self.prefixes], salt),
            *_drawn(self.length - head, index, salt + 1),
        ]

    def requests(self, count: int, salt: int) -> list[bytes]:
        """`count` prompts that no other salt gives (salts are more than `count` apart)."""
        each = max(1, REQUEST_TOKENS // self.length)
        prompts = [self.prompt(index, salt) for index in range(count)]
        return [request(prompts[at : at + each]) for at in range(0, count, each)]


def _drawn(length: int, *seed: int) -> list[int]:
    """Tokens that no other seed gives: nothing may be found in a prefix cache by accident."""
    return list(np.random.default_rng((length, *seed)).integers(10, 3010, length).tolist())


def request(prompts: list[list[int]]) -> bytes:
    body = {"model": MODEL_NAME, "prompt": prompts, "max_tokens": 1, "logprobs": 2}
    return json.dumps(body | {"temperature": 0}).encode()


def together(port: int, requests: Sequence[bytes]) -> tuple[float, list[float]]:
    """All at once: seconds until the last answer, and of each. Raises httpx.HTTPError."""
    return asyncio.run(send(port, requests))


async def send(port: int, requests: Sequence[bytes]) -> tuple[float, list[float]]:
    """As `together`."""
    limits = httpx.Limits(max_connections=None)
    base = f"http://127.0.0.1:{port}"
    headers = {"Content-Type": "application/json"}

    async def answer(body: bytes) -> float:
        begin = time.perf_counter()
        reply = await http.post("/v1/completions", content=body)
        reply.raise_for_status()
        return time.perf_counter() - begin

    async with httpx.AsyncClient(
        base_url=base, timeout=300, limits=limits, headers=headers, trust_env=False
    ) as http:
        begin = time.perf_counter()
        each = await asyncio.gather(*(answer(body) for body in requests))
        return time.perf_counter() - begin, list(each)
