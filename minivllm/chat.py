"""``minivllm chat``: a conversation in the terminal, with streamed replies."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from minivllm.config.modes import ChatOptions
from minivllm.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from minivllm.config.compose import Composed
    from minivllm.core.sampling_params import SamplingParams
    from minivllm.llm import LLM

_HELP = "/clear forgets the conversation, /exit (or Ctrl-D) quits, Ctrl-C stops a reply."
Message = dict[str, str]


def run(composed: Composed) -> int:
    """Read lines and stream replies until the input ends. Returns 1 if a line from a pipe had no reply."""
    options = composed.options
    assert isinstance(options, ChatOptions)
    params = options.sampling_params()
    if sys.stdin is None:
        raise ConfigError("chat reads what is typed, and standard input is closed; open it, or pipe lines into it")
    from minivllm.llm import LLM

    with LLM.from_config(composed.engine) as llm:
        about, terminal = llm.engine.describe(), sys.stdin.isatty()
        if terminal:
            how = f"attention {about['attention']}, {about['weights']}"
            print(f"{about['model']} on {about['device']}, {how}. {_HELP}")
        start: list[Message] = [{"role": "system", "content": options.system}] if options.system else []
        messages, failed = list(start), False
        for turn, line in enumerate(_lines(terminal)):
            if line == "/exit":
                break
            if line == "/clear":
                messages = list(start)
            elif line.startswith("/"):
                print(_HELP)
            else:
                asked: Message = {"role": "user", "content": line}
                try:
                    reply = _reply(llm, [*messages, asked], params, f"chat-{turn}")
                except RequestError as e:
                    failed = True
                    print(f"minivllm: {e}{' (/clear starts over)' if messages != start else ''}", file=sys.stderr)
                else:
                    messages += [asked, {"role": "assistant", "content": reply}]
    return int(failed and not terminal)


def _lines(terminal: bool) -> Iterator[str]:
    """The lines that the user types, without blank ones. Ctrl-C at the prompt raises KeyboardInterrupt."""
    if terminal:
        import contextlib

        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() has history and editing with it
    while True:
        try:
            line = input("> " if terminal else "").strip()
        except EOFError:
            if terminal:
                print()
            return
        except UnicodeDecodeError as e:
            raise ConfigError("standard input is not UTF-8 text") from e
        if line:
            yield line


def _reply(llm: LLM, messages: list[Message], params: SamplingParams, request_id: str) -> str:
    """Stream one reply to standard output. Ctrl-C ends it early; the text so far stays in the conversation."""
    engine = llm.engine
    tokens = llm.engine.tokenizer.apply_chat_template(messages)
    engine.add_request(request_id, tokens, params)
    text = ""
    try:
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.request_id == request_id:
                    new = output.outputs[0].text
                    print(new[len(text) :], end="", flush=True)
                    text = new
    except KeyboardInterrupt:
        engine.abort(request_id)
    except BaseException:
        engine.abort(request_id)
        raise
    print()
    return text
