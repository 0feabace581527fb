"""A stand-in for a judge: an OpenAI-compatible endpoint over real HTTP, with faults. It judges by a rule that tests
know: the grade of an answer is the digits in it, and of two the one with more digits wins."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from http_standin import served

#: Seconds that a request hangs, unless the server closes before.
HANG_SECONDS = 60.0
USAGE = {"prompt_tokens": 100, "completion_tokens": 10}
#: What is asked when the judge was down.
PROBE = "Say: yes."


class JudgeStandIn:
    """`fault(question, n)`: what goes wrong with the nth request for this question: "" (nothing), a status ("500"), a
    status and its Retry-After ("429 1"), or a name below. `asked`: the questions in the order of their requests.
    """

    def __init__(self, fault: Callable[[str, int], str] = lambda question, n: "") -> None:
        self.fault = fault
        self.asked: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.num_asked, self.num_verdicts = Counter[str](), Counter[str]()
        self.num_at_once = self.most_at_once = 0
        self.closed, self._lock = threading.Event(), threading.Lock()
        self.url = ""

    def answer(self, body: dict[str, Any], key: str) -> tuple[int, dict[str, str], bytes]:
        question = body["messages"][-1]["content"]
        with self._lock:
            self.asked.append(question)
            self.bodies.append(body)
            self.keys.append(key)
            self.num_at_once += 1
            self.most_at_once = max(self.most_at_once, self.num_at_once)
            self.num_asked[question] += 1
            fault = self.fault(question, self.num_asked[question])
        try:
            return self._answer(question, fault)
        finally:
            with self._lock:
                self.num_at_once -= 1

    def _answer(self, question: str, fault: str) -> tuple[int, dict[str, str], bytes]:
        if fault == "hang":
            self.closed.wait(HANG_SECONDS)
        if fault == "cut":
            return 0, {}, b""
        if fault[:3].isdigit():
            status, _, retry_after = fault.partition(" ")
            headers = {"retry-after": retry_after} if retry_after else {}
            return int(status), headers, json.dumps({"error": {"message": f"as the test wants: {fault}"}}).encode()
        if fault == "no json":
            return 200, {}, b"\xff{" * 9
        if fault == "with a web page":
            return 200, {"content-type": "text/html; charset=utf-8"}, b"<!doctype html><title>Sign in</title>"
        if fault == "oversized":
            return 200, {}, b" " * (3 << 20)
        text = verdict_of(question)
        if fault == "tells the key":
            text = f"You sent {self.keys[-1]}.\nThe key was {self.keys[-1]}, so no grade."
        usage = {"prompt_tokens": 10**9, "completion_tokens": 10**9} if fault == "counts absurdly" else USAGE
        if fault == "garbage":
            text = f"I like it. {text}\nBut who am I to judge?"
        self.num_verdicts[question] += not fault
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return 200, {}, json.dumps({"choices": [choice], "usage": usage}).encode()


def verdict_of(question: str) -> str:
    """The whole reply, with a verdict on its last line."""
    if question == PROBE:
        return "yes"
    answers = re.findall(r"^<answer[-\w]*>\n(.*?)\n</", question, re.DOTALL | re.MULTILINE)
    digits = [sum(character.isdigit() for character in answer) for answer in answers]
    if len(digits) == 1:
        return f"Thinking of [[9]].\n**Grade: [[{min(10, digits[0])}]]**\n"
    first, second = digits
    return "[[A]]" if first > second else "[[B]]" if second > first else "[[C]]"


@contextmanager
def judge_standin(fault: Callable[[str, int], str] = lambda question, n: "", port: int = 0) -> Iterator[JudgeStandIn]:
    """Serve a stand-in on this machine while the context lasts."""
    judge = JudgeStandIn(fault)

    def answer(path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, Mapping[str, str], bytes]:
        if path != "/v1/chat/completions":
            return 404, {}, b"{}"
        return judge.answer(json.loads(body), headers.get("authorization", ""))

    with served(answer, port) as url:
        judge.url = f"{url}/v1"
        try:
            yield judge
        finally:
            judge.closed.set()
