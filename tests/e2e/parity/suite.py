"""Sends the cases to a server and compares two servers' answers."""

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from ..server import MODEL_NAME, Server
from .compare import Difference, compare, merge_stream
from .features import (
    CONCURRENT,
    PROBE,
    Case,
    Probe,
    cases,
    concurrent_cases,
    length_cases,
    probe_of,
    sense_cases,
)

TOLERANCE = {"bfloat16": 0.0, "float32": 1e-4}  # of a logprob, in nats
TOGETHER = "16 at once"
Progress = Callable[[str, int, int], None]


class Request(NamedTuple):
    """A case, and whether the answer is streamed."""

    case: Case
    stream: bool = False

    @property
    def key(self) -> str:
        return f"{self.case.group}: {self.case.name}" + (", streamed" if self.stream else "")


class Answers(NamedTuple):
    """What a server answered, by `Request.key`. `together` holds the concurrent cases' answers."""

    probe: Probe
    single: dict[str, dict[str, Any]]
    together: dict[str, dict[str, Any]]


class Verdict(NamedTuple):
    """One request's comparison."""

    group: str
    key: str
    differences: list[Difference]
    max_float_difference: float

    @property
    def same_answer(self) -> bool:
        """Equal but for values of logprobs."""
        return all(difference.numeric for difference in self.differences)


def requests(probe: Probe, *, sense: bool = False) -> list[Request]:
    """Everything that is sent one after the other."""
    features = [*cases(probe), *(sense_cases() if sense else [])]
    both = [Request(case, stream) for case in features for stream in (False, True)]
    return [*both, *(Request(case) for case in (*length_cases(), *concurrent_cases()))]


def ask(server: Server, request: Request) -> dict[str, Any]:
    """The decoded answer; a refusal comes back as its HTTP status and body.

    Raises httpx.HTTPError when the connection fails or two minutes pass without a byte.
    """
    path, body = request.case.path, {"model": MODEL_NAME, **request.case.body}
    if not request.stream:
        response = server.http.post(path, json=body)
        answer = response.json()
        return answer if response.is_success else {"status": response.status_code, "body": answer}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    events = []
    with server.http.stream("POST", path, json=body) as response:
        if not response.is_success:
            return {"status": response.status_code, "body": json.loads(response.read())}
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                events.append(json.loads(line.removeprefix("data: ")))
    return merge_stream(events)


def run(
    server: Server,
    probe: Probe | None = None,
    *,
    sense: bool = False,
    only: Callable[[Request], bool] = lambda request: True,
    progress: Progress = lambda what, done, total: None,
) -> Answers:
    """Send everything to `server`. `probe` None takes it from this server (the baseline)."""
    first = ask(server, Request(PROBE))
    probe = probe or probe_of(first)
    todo = [request for request in requests(probe, sense=sense) if only(request)]
    single = {}
    for done, request in enumerate(todo):
        progress(request.key, done, len(todo))
        single[request.key] = ask(server, request)
    together = [request for request in map(Request, concurrent_cases()) if only(request)]
    with ThreadPoolExecutor(CONCURRENT) as pool:
        answers = pool.map(lambda request: ask(server, request), together)
        return Answers(probe, single, {r.key: a for r, a in zip(together, answers, strict=True)})


def batch_invariant(plain: Answers, dtype: str) -> bool:
    """Whether plain vLLM itself answers the same alone and among others."""
    return all(
        not compare(plain.single[key], answer, TOLERANCE[dtype]).differences
        for key, answer in plain.together.items()
    )


def judge(plain: Answers, ours: Answers, dtype: str) -> list[Verdict]:
    """Compare request by request; both must have been asked the same.

    Concurrent answers count only where plain vLLM is batch-invariant: elsewhere two runs of plain
    vLLM differ as well.
    """
    if plain.single.keys() != ours.single.keys():
        raise ValueError(f"asked differently: {plain.single.keys() ^ ours.single.keys()}")

    def verdicts(group: str, ours: dict[str, Any], plain: dict[str, Any]) -> list[Verdict]:
        return [
            Verdict(group or key.split(":")[0], key, *compare(plain[key], ours[key], tolerance))
            for key in plain
        ]

    tolerance = TOLERANCE[dtype]
    together = plain.together if batch_invariant(plain, dtype) else {}
    return verdicts("", ours.single, plain.single) + verdicts(TOGETHER, ours.together, together)


def nonsense(answers: Answers, asked: Iterable[Request]) -> list[str]:
    """Answers that lack what their case says they must contain."""
    return [
        f"{request.key}: {text!r} lacks {request.case.contains!r}"
        for request in asked
        if request.case.contains
        and request.case.contains not in (text := _text(answers.single[request.key]))
    ]


def _text(answer: dict[str, Any]) -> str:
    choice = (answer.get("choices") or [{}])[0]
    return str((choice.get("message") or choice.get("delta") or {}).get("content"))
