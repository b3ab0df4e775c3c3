"""``minivllm generate``: prompts in, completions out, and a last line with the throughput."""

from __future__ import annotations

import difflib
import json
import os
import re
import select
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from minivllm.config.modes import GenerateOptions, SamplingOptions
from minivllm.core.lora_request import LoRARequest
from minivllm.errors import ConfigError, RequestError, shown
from minivllm.files import check_writable, read_stream, read_text

if TYPE_CHECKING:
    from minivllm.config.compose import Composed
    from minivllm.config.engine_config import ModelOptions
    from minivllm.core.outputs import RequestOutput

SAMPLES = ("Once upon a time", "The engine", "In a small village")
_STDOUT = "-"
_PATIENCE = 10.0  # seconds to wait for a silent pipe on standard input before the samples are used instead
_PROMPT_KEYS = ("prompt_token_ids", "prompt")
_PROMPT_OBJECT = re.compile(r"""\{.*["'](prompt|prompt_token_ids)["']\s*:""")
_OPTIONAL_KEYS = ("priority", "lora_path")
_LINE_KEYS = (*_PROMPT_KEYS, *_OPTIONAL_KEYS)
_LINE_IS = "one prompt: a string in quotes, or an object with prompt or prompt_token_ids"
_TYPED_ONCE = (*(f.name for f in fields(SamplingOptions)), "seed")
_OTHERS = {  # keys of other programs' files, each with what to do instead
    "adapter": "the key is lora_path",
    "adapter_path": "the key is lora_path",
    "best_of": "repeat the line",
    "lora": "the key is lora_path",
    "lora_name": "the key is lora_path",
    "lora_request": "the key is lora_path",
    "max_completion_tokens": "type max_tokens=... once",
    "max_new_tokens": "type max_tokens=... once",
    "messages": "LLM.chat takes them, and the server",
    "n": "repeat the line",
    "sampling_params": "type each parameter once, as max_tokens=...",
}

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt, and ``where`` it is from, if that is a line. ``model``: of a line, whatever it is."""

    prompt: Prompt
    priority: int = 0
    lora_path: str | None = None
    model: Any = None
    where: str = field(default="", compare=False)


def run(composed: Composed) -> int:
    """Complete the prompts; prints the results, or writes them to ``output``."""
    options = composed.options
    assert isinstance(options, GenerateOptions)
    params = options.sampling_params(logprobs=options.logprobs)  # refused before anything is loaded
    asked = read_prompts(options, sys.stdin)
    if composed.engine.enable_lora:
        _check_models(asked, composed.engine.model)
    to = options.output if composed.speaks or options.output is None else os.devnull
    if to not in (None, _STDOUT):
        check_writable(to, "output")
        _check_kept(options)
    from minivllm.llm import LLM

    with LLM.from_config(composed.engine) as llm:
        about = llm.engine.describe()
        if why := about.get("attention_why"):
            print(why, file=sys.stderr)
        started = time.perf_counter()
        with _Lines(to) as lines:
            try:
                outputs = llm.generate(
                    [a.prompt for a in asked], params, use_tqdm=_is_terminal(sys.stderr), lora_request=_adapters(asked),
                    priority=[a.priority for a in asked], on_output=lines.take,
                )  # fmt: skip
            except RequestError as error:
                raise RequestError(_by_line(str(error), asked)) from error
        seconds = time.perf_counter() - started
    if to is None:
        for output in outputs:
            print(_shown(output, _is_terminal(sys.stdout)), end="\n\n")
    batch = min(len(outputs), composed.engine.scheduler.max_num_seqs)
    print(_summary(outputs, seconds, batch, about), file=sys.stderr if to == _STDOUT else sys.stdout)
    return 0


def _check_kept(options: GenerateOptions) -> None:
    """Raises ConfigError if the answers would replace the prompts."""
    if options.prompts or options.prompts_file in (None, "-") or options.output is None:
        return
    written = Path(expanduser(options.output))
    if written.is_file() and written.samefile(expanduser(options.prompts_file)):
        raise ConfigError(f"output={options.output} is the prompts_file; name another file")


def _adapters(asked: Sequence[Asked]) -> list[LoRARequest | None]:
    """Each prompt's LoRA adapter; those of one path are one."""
    paths = dict.fromkeys(a.lora_path for a in asked if a.lora_path is not None)
    named = {path: LoRARequest(f"adapter {number}", number, path) for number, path in enumerate(paths, 1)}
    return [None if a.lora_path is None else named[a.lora_path] for a in asked]


def _check_models(asked: Sequence[Asked], ours: ModelOptions) -> None:
    """Raises ConfigError for a line that would have an adapter on a server: it has another model, and no lora_path."""
    for a in asked:
        if a.lora_path is None and a.model not in (None, ours.name, ours.repo, ours.path):
            raise ConfigError(
                f"{a.where} has model={shown(a.model)}, which is another than the one that runs; a line's adapter is "
                "its lora_path, a folder or ORG/NAME"
            )


def _by_line(message: str, asked: Sequence[Asked]) -> str:
    """With a prompt's number replaced by its line, if it is from a file."""
    number = re.match(r"prompt (\d+): ", message)
    if number is None or not (where := asked[int(number[1])].where):
        return message
    return f"{where}: {message.removeprefix(number[0])}"


# --------------------------------------------------------------------------- prompts


def read_prompts(options: GenerateOptions, stdin: TextIO | None) -> list[Asked]:
    """The prompts given on the command line, else those of the file, else those piped in, else samples."""
    if options.prompts:
        return [Asked(p if isinstance(p, str) else list(p)) for p in options.prompts]
    if options.prompts_file == "-":
        if stdin is None or stdin.closed:
            raise ConfigError("prompts_file=-: standard input is closed")
        return _found(parse_prompts(read_stream(stdin), "standard input"), "standard input")
    if options.prompts_file is not None:
        path = Path(expanduser(options.prompts_file))
        text = read_text(options.prompts_file, "prompts_file")
        jsonl = path.suffix.lower() in (".jsonl", ".json") if path.suffix else None  # /dev/stdin, /dev/fd/63
        return _found(parse_prompts(text, str(path), jsonl=jsonl), str(path))
    return parse_prompts(_piped(stdin), "standard input") or [Asked(text) for text in SAMPLES]


def parse_prompts(text: str, where: str, *, jsonl: bool | None = None) -> list[Asked]:
    """One prompt per line, stripped; blank lines are skipped. JSONL (by default if a line is an object with a prompt,
    or all are objects): objects with ``prompt`` or ``prompt_token_ids`` and optionally ``priority`` and
    ``lora_path``, or plain strings. An object's other keys are ignored unless they look like parameters; its ``model``
    is for the caller to check."""
    lines = [(n, line.strip()) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if jsonl is None:
        jsonl = _is_jsonl([line for _, line in lines])
    found = [(_json_prompt(line, f"{where}, line {n}") if jsonl else Asked(line), n) for n, line in lines]
    return [replace(asked, where=f"{where}, line {n}") for asked, n in found]


def _is_jsonl(lines: Sequence[str]) -> bool:
    """Also if such an object is no valid JSON, so that it is named."""
    return any(map(_PROMPT_OBJECT.match, lines)) or (bool(lines) and all(map(_is_object, lines)))


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _json_prompt(line: str, where: str) -> Asked:
    try:
        item: Any = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{where} is not JSON: {e}; each line is {_LINE_IS}") from e
    if isinstance(item, str):
        return Asked(item)
    if not isinstance(item, dict):
        raise ConfigError(f"{where} is {shown(item)}; each line is {_LINE_IS}")
    for key in item:
        if key not in _LINE_KEYS and (meant := difflib.get_close_matches(key, _OPTIONAL_KEYS, n=1, cutoff=0.85)):
            raise ConfigError(f"{where} has {key}; did you mean {meant[0]}?")
    if refused := [k for k in item if k not in _LINE_KEYS and (k in _OTHERS or _parameters_like(k))]:
        instead = _OTHERS.get(refused[0]) or f"type {_parameters_like(refused[0])[0]}=... once"
        raise ConfigError(f"{where} has {', '.join(refused)}, which a prompts file cannot set; {instead}")
    there = [k for k in _PROMPT_KEYS if k in item]
    key = next((k for k in there if item[k] is not None), there[0] if there else None)
    if key is None:
        only = f", only {', '.join(item)}" if item else ""
        raise ConfigError(f"{where} has neither prompt nor prompt_token_ids{only}")
    value, priority = item[key], item.get("priority", 0)
    if type(priority) is not int:
        raise ConfigError(f"{where}: priority={json.dumps(priority)} is not a whole number")
    path = item.get("lora_path")
    if not (path is None or (isinstance(path, str) and path)):
        raise ConfigError(f"{where}: lora_path={shown(path)} is not the path of a folder, nor ORG/NAME")
    if key == "prompt" and isinstance(value, str):
        return Asked(value, priority, path, item.get("model"))
    if key == "prompt_token_ids" and isinstance(value, list) and all(type(t) is int for t in value):
        return Asked(value, priority, path, item.get("model"))
    what = "null" if value is None else shown(value)
    raise ConfigError(f"{where}: {key}={what} is not {'a string' if key == 'prompt' else 'a list of token ids'}")


def _parameters_like(key: str) -> list[str]:
    """The parameter that ``key`` is or is a typo of, as a list; empty for unrelated keys (``topic``)."""
    return difflib.get_close_matches(key, _TYPED_ONCE, n=1, cutoff=0.85)


def _found(prompts: list[Asked], where: str) -> list[Asked]:
    if not prompts:
        raise ConfigError(f"{where} holds no prompt: one a line, or JSONL objects with prompt")
    return prompts


def _piped(stdin: TextIO | None) -> str:
    """The contents of a pipe or redirected file; empty for a terminal, /dev/null or a closed input."""
    try:
        if stdin is None or stdin.closed or stdin.isatty():
            return ""
        fd = stdin.fileno()
        mode = os.fstat(fd).st_mode
    except (OSError, ValueError):  # a substitute without a descriptor, or a closed descriptor
        return ""
    if stat.S_ISCHR(mode):
        return ""
    if not stat.S_ISREG(mode) and not _speaks(fd):
        return ""
    return read_stream(stdin)


def _speaks(fd: int) -> bool:
    """Whether data (or the end) arrives on a pipe. One that was merely left open must not hang us."""
    for wait, note in (
        (1.0, "minivllm: waiting for prompts on standard input"),
        (_PATIENCE - 1.0, "minivllm: nothing came; using samples (prompts_file=- waits without limit)"),
    ):
        if select.select([fd], [], [], wait)[0]:
            return True
        print(note, file=sys.stderr)
    return False


# --------------------------------------------------------------------------- results


def _shown(output: RequestOutput, terminal: bool) -> str:
    prompt = output.prompt if output.prompt is not None else f"{output.prompt_token_ids}"
    if terminal:
        prompt = f"\x1b[1m{prompt}\x1b[0m"
    return prompt + "".join(completion.text for completion in output.outputs)


def _summary(outputs: Sequence[RequestOutput], seconds: float, batch: int, about: dict[str, Any]) -> str:
    tokens = sum(len(c.token_ids) for o in outputs for c in o.outputs)
    return (
        f"{tokens} tokens in {seconds:.2f} s: {tokens / max(seconds, 1e-9):.1f} tokens/s, batch size {batch}, "
        f"device {about['device']}, attention {about['attention']}"
    )


def _is_terminal(stream: TextIO | None) -> bool:
    """``stream`` is None if it is closed."""
    return stream is not None and stream.isatty()


class _Lines:
    """Writes one JSON object per request, in the order of the prompts, each as soon as those before it are written, but
    to a terminal, which shows progress, at the end. However that comes, all that were given are written. Until there is
    one, a former file stays as it was."""

    def __init__(self, to: str | None) -> None:
        """``to``: a file, ``_STDOUT`` or None: nothing is written."""
        self._to, self._next = to, 0
        self._waiting: dict[int, RequestOutput] = {}
        self._file: TextIO | None = sys.stdout if to == _STDOUT else None
        self._at_once = not (to == _STDOUT and _is_terminal(sys.stdout))
        self._opened = ExitStack()

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *raised: Any) -> None:
        with self._opened:
            for place in sorted(self._waiting):
                self._write(self._waiting[place])

    def take(self, place: int, output: RequestOutput) -> None:
        if self._to is None:
            return
        self._waiting[place] = output
        while self._at_once and self._next in self._waiting:
            self._write(self._waiting.pop(self._next))
            self._next += 1

    def _write(self, output: RequestOutput) -> None:
        assert self._to is not None
        if self._file is None:
            file = Path(expanduser(self._to)).open("w", encoding="utf-8")  # noqa: SIM115 (the stack closes it)
            self._file = self._opened.enter_context(file)
        utf = (self._file.encoding or "utf-8").lower().startswith("utf")
        self._file.write(json.dumps(_record(output), ensure_ascii=not utf) + "\n")
        self._file.flush()


def _record(output: RequestOutput) -> dict[str, Any]:
    completion = output.outputs[0]
    record: dict[str, Any] = {
        "request_id": output.request_id,
        "prompt": output.prompt,
        "prompt_token_ids": list(output.prompt_token_ids),
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "num_cached_tokens": output.num_cached_tokens,
    }
    if completion.logprobs is not None:
        record["logprobs"] = [{str(t): lp.logprob for t, lp in at.items()} for at in completion.logprobs]
    return record
