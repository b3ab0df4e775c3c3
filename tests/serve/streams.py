"""Reading server-sent events, and putting them together as a client would."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import httpx


def events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The objects of a stream, which must end with [DONE]."""
    done = False
    for line in lines:
        if line:
            assert line.startswith("data: ") and not done
            done = line == "data: [DONE]"
            if not done:
                yield json.loads(line.removeprefix("data: "))
    assert done, "the stream was cut off"


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(events(response.iter_lines()))


def joined(chunks: list[dict[str, Any]], *, chat: bool) -> list[dict[str, Any]]:
    """The choices of a whole answer."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for new in chunk["choices"]:
            one = choices.setdefault(new["index"], {"text": "", "logprobs": None, "finish_reason": None})
            assert one["finish_reason"] is None, "a choice went on after its end"
            one["text"] += new["delta"].get("content", "") if chat else new["text"]
            one["finish_reason"] = new["finish_reason"]
            if "stop_reason" in new:
                one["stop_reason"] = new["stop_reason"]
            for key, values in (new["logprobs"] or {}).items():
                one["logprobs"] = one["logprobs"] or {}
                one["logprobs"][key] = one["logprobs"].get(key, []) + values
    return [choices[index] for index in sorted(choices)]


def whole(answer: dict[str, Any], *, chat: bool) -> list[dict[str, Any]]:
    """The same of an answer that was not streamed."""
    return [
        {key: one[key] for key in ("logprobs", "finish_reason", "stop_reason")}
        | {"text": one["message"]["content"] if chat else one["text"]}
        for one in answer["choices"]
    ]
