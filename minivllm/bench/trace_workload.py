"""``workload=trace``: requests from a file, one JSON object per line, with their arrival times.

# {"arrival": 0.25, "input_len": 120, "output_len": 64}                        a prompt of random ids
# {"arrival": 0.5, "prompt": "Once upon a time", "output_len": 64}             a text, in the model's tokens
# {"arrival": 0.5, "prompt_token_ids": [5, 17, 9], "output_len": 64}           tokens

Lines of two published datasets are accepted as they are. Their ``hash_ids`` name the blocks of a prompt: equal ids
become equal tokens, so that a prefix cache finds what it would have found:

# Mooncake's: {"timestamp": 250, "input_length": 600, "output_length": 64, "hash_ids": [0, 1]}  ms; blocks of 512
# Qwen-Bailian's: the same with "chat_id", "parent_chat_id", "type" and "turn"                  seconds; blocks of 16
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minivllm.bench.workloads import BenchRequest
from minivllm.errors import ConfigError, shown
from minivllm.files import read_text
from minivllm.naming import did_you_mean
from minivllm.rounding import cdiv

if TYPE_CHECKING:
    from minivllm.config.modes import WorkloadOptions

_LATEST = 1e15  # in either unit
_PROMPTS = ("input_len", "prompt", "prompt_token_ids")
_KEYS = ("arrival", *_PROMPTS, "output_len")
_PUBLISHED = ("timestamp", "input_length", "output_length", "hash_ids")
_OF_CHATS = ("chat_id", "parent_chat_id", "type", "turn")


def read_requests(
    options: WorkloadOptions, draw: Callable[[int], list[int]], encode: Callable[[str], list[int]] | None
) -> list[BenchRequest]:
    """The file's requests by arrival, shifted so that the first is at 0 and an excerpt starts at once. Blank lines are
    skipped.

    Args:
        draw: makes a prompt of that many random ids.
        encode: tokenizes a text.

    Raises:
        ConfigError: the file, or a line of it, cannot be used; the message has the line number.
    """
    assert options.path is not None
    lines = read_text(options.path, "workload.path").split("\n")
    requests: list[BenchRequest] = []
    blocks: dict[int, list[int]] = {}
    scale = 1.0 if options.time_scale is None else options.time_scale
    for number, line in enumerate(lines, 1):
        if len(requests) == options.num_requests:
            break
        if line.strip():
            try:
                value = _object(line)
                published = "timestamp" in value
                requests.append(_published(value, draw, blocks) if published else _request(value, draw, encode))
            except ValueError as e:
                raise ConfigError(f"workload.path={options.path}, line {number}: {e}") from e
    if not requests:
        raise ConfigError(f"workload.path={options.path} has no request in it; each line is one, as {_EXAMPLE}")
    if options.num_requests is not None and len(requests) < options.num_requests:
        raise ConfigError(
            f"workload.num_requests={options.num_requests}, and {options.path} has {len(requests)}; lower it or leave "
            "it out"
        )
    first = min(r.arrival for r in requests)
    return sorted((replace(r, arrival=scale * (r.arrival - first)) for r in requests), key=lambda r: r.arrival)


_EXAMPLE = '{"arrival": 0.25, "input_len": 120, "output_len": 64}'


def _object(line: str) -> dict[str, Any]:
    """Raises ValueError, which says what is wrong with the line."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{e}; a line is one JSON object, as {_EXAMPLE}") from e
    if not isinstance(value, dict):
        raise ValueError(f"it is not a JSON object, as {_EXAMPLE}")
    return value


def _check_keys(value: dict[str, Any], keys: tuple[str, ...]) -> None:
    for key in value:
        if key not in keys:
            raise ValueError(f"there is no key {key!r}.{did_you_mean(key, keys)} Allowed: {', '.join(keys)}")


def _published(value: dict[str, Any], draw: Callable[[int], list[int]], blocks: dict[int, list[int]]) -> BenchRequest:
    """``blocks``: the tokens of all blocks so far, by id."""
    of_chats = "chat_id" in value
    size, unit = (16, 1.0) if of_chats else (512, 1e-3)
    _check_keys(value, (*_PUBLISHED, *(_OF_CHATS if of_chats else ())))
    names, length = value.get("hash_ids", []), _count(value, "input_length")
    if not isinstance(names, list) or not all(type(name) is int for name in names):
        raise ValueError("hash_ids is not a list of whole numbers")
    prompt: list[int] = []
    for name in names[: cdiv(length, size)]:
        if name not in blocks:
            blocks[name] = draw(size)
        prompt += blocks[name]
    prompt = prompt[:length] + draw(max(length - len(prompt), 0))
    return BenchRequest(prompt, _count(value, "output_length"), unit * _seconds(value, "timestamp"))


def _request(
    value: dict[str, Any], draw: Callable[[int], list[int]], encode: Callable[[str], list[int]] | None
) -> BenchRequest:
    _check_keys(value, _KEYS)
    given = [key for key in _PROMPTS if key in value]
    if len(given) != 1:
        raise ValueError(f"it needs one of {', '.join(_PROMPTS)}, and has {' and '.join(given) or 'none'}")
    prompt = _prompt(given[0], value[given[0]], draw, encode)
    return BenchRequest(prompt, _count(value, "output_len"), _seconds(value, "arrival"))


def _seconds(value: dict[str, Any], key: str) -> float:
    """The field's time, in either unit."""
    arrival = value.get(key, 0)
    if isinstance(arrival, bool) or not isinstance(arrival, int | float) or not 0 <= arrival <= _LATEST:
        raise ValueError(f"{key}={shown(arrival)} is not a time from 0 to {_LATEST:g}")
    return float(arrival)


def _prompt(
    key: str, value: Any, draw: Callable[[int], list[int]], encode: Callable[[str], list[int]] | None
) -> list[int]:
    if key == "input_len":
        return draw(_count({key: value}, key))
    if key == "prompt":
        if not isinstance(value, str) or encode is None or not (tokens := encode(value)):
            raise ValueError(f"prompt={value!r} is not a text of at least one token")
        return tokens
    if not isinstance(value, list) or not value or not all(type(t) is int and t >= 0 for t in value):
        raise ValueError("prompt_token_ids is not a list of at least one whole number from 0")
    return value


def _count(value: dict[str, Any], key: str) -> int:
    if key not in value:
        raise ValueError(f"it lacks {key}")
    if type(value[key]) is not int or value[key] < 1:
        raise ValueError(f"{key}={value[key]!r} is not a whole number from 1")
    return value[key]
