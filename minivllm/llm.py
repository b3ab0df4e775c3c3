"""``LLM``: offline inference in one object, with vLLM's interface."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from minivllm.bytecode import kept_bytecode
from minivllm.core.engine import LLMEngine
from minivllm.core.garbage import uncollected
from minivllm.core.longest_first import longest_first
from minivllm.core.outputs import RequestOutput
from minivllm.core.requests import Prompt
from minivllm.core.sampling_params import RequestOutputKind, SamplingParams
from minivllm.errors import RequestError, of_prompt, shown
from minivllm.missing import missing_method, refuse
from minivllm.models.conversation import check_tool_calls
from minivllm.models.tokenizer import check_variables

if TYPE_CHECKING:
    from minivllm.config.engine_config import EngineConfig
    from minivllm.models.tokenizer import Tokenizer

_ENCODED_AT_ONCE = 64  # prompts
# vLLM's arguments that are not supported, each with the value that asks for what happens anyway.
_BOTH_NEUTRAL: dict[str, Any] = {
    "guided_options_request": None, "lora_request": None, "mm_processor_kwargs": {}, "prompt_adapter_request": None,
    "tokenization_kwargs": {},
}  # fmt: skip
_GENERATE_NEUTRAL: dict[str, Any] = _BOTH_NEUTRAL | {"prompt_token_ids": None}
_CHAT_NEUTRAL: dict[str, Any] = _BOTH_NEUTRAL | {
    "chat_template_content_format": "auto",
}  # fmt: skip
_INSTEAD = {
    "guided_options_request": "give SamplingParams(structured_outputs=StructuredOutputsParams(...))",
    "prompt_token_ids": "token ids are prompts: generate([[1, 2], [3]])",
}


class LLM:
    """Load a model, then ``generate`` or ``chat``; ``with LLM(...) as llm`` gives everything back at the end.

    Calls from several threads take turns; ``engine`` beneath is for one thread. What requests that it was given itself
    have to say while a call runs is dropped: step it until they are done, then call.

    Args:
        model: an option of conf/model (demo, qwen3, llama …), a checkpoint's folder, or a Hub repository.
        attention: auto, torch, triton, hopper, flash, flashinfer, or what a plugin brings.
        tp: tensor-parallel ranks.
        device: auto, cuda or cpu.
        dtype: auto, float32, bfloat16 or float16.
        overrides: any configuration, as on the command line: ``["cache.num_blocks=64"]``. They come last, and win over
            what the other arguments say of the same key.
        **options: vLLM's names for some of them (``max_model_len``, ``gpu_memory_utilization``, ``seed`` …).

    Raises:
        ConfigError, CheckpointError, PluginError: what cannot run, with what to change.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        attention: str = "auto",
        tp: int = 1,
        device: str = "auto",
        dtype: str = "auto",
        overrides: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        with kept_bytecode(), uncollected():
            from minivllm.config.compose import compose_engine_config

            config = compose_engine_config(
                model=model, attention=attention, tp=tp, device=device, dtype=dtype, overrides=overrides, **options
            )
            self._begin(LLMEngine.from_config(config))

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """An LLM from a composed configuration."""
        llm = cls.__new__(cls)
        llm._begin(LLMEngine.from_config(config))
        return llm

    def _begin(self, engine: LLMEngine) -> None:
        self.engine, self._number, self._turn = engine, 0, threading.RLock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        priority: Sequence[int] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs come in the order of the prompts.

        Of more than run at once those with the largest ``max_tokens`` begin first, if the cache has room for that.

        ``prompts``: a string, a list of token ids, a mapping with ``prompt`` or ``prompt_token_ids``, or a list of
        these. ``sampling_params``: one for all, or one a prompt. ``use_tqdm``: whether to show progress, or what makes
        the bar, called as ``tqdm`` is. ``priority``: one a prompt, smaller ones are served earlier; for schedulers that
        have priorities. vLLM's other arguments are taken where they ask for nothing.

        Raises:
            RequestError: a prompt that can never run; the others are dropped, and the engine goes on.
        """
        refuse(others, _GENERATE_NEUTRAL, _INSTEAD)
        if prompts is None:
            raise RequestError("there are no prompts; give a text, a list of token ids, or a list of these")
        return self._generate(_prompts(prompts), sampling_params, use_tqdm, priority)

    def _generate(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        priority: Sequence[int] | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        many = len(prompts)
        params = self._params(sampling_params, many)
        given: Any = priority
        priority = given.tolist() if hasattr(given, "tolist") else given  # of an array
        if not isinstance(priority, Sequence | None):
            raise RequestError(f"priority={shown(priority)} is not a list; give one a prompt")
        if priority is not None and len(priority) != many:
            raise RequestError(f"{many} prompts with {len(priority)} priorities; give one a prompt")
        priorities = [0] * many if priority is None else priority
        with self._turn:
            order = longest_first(self.engine, [_size(prompt) for prompt in prompts], params)
            first = self.engine.num_requests_added
            add = partial(self._add, prompts, params, priorities, add_special_tokens)
            ids: list[str] = []
            try:
                ids += (self._free_id() for _ in prompts)
                try:
                    add(ids, order)
                except RequestError:
                    if order == list(range(many)):
                        raise
                    self.engine.abort(ids)
                    self.engine.num_requests_added = first
                    add(ids, range(many))  # the first that is refused is named
                return self._run(ids, use_tqdm)
            except BaseException:
                self.engine.abort(ids)
                raise

    def _add(
        self, prompts: list[Prompt], params: list[SamplingParams], priorities: Sequence[int], add_special_tokens: bool,
        ids: list[str], order: Sequence[int],
    ) -> None:  # fmt: skip
        first = self.engine.num_requests_added
        encoded = _encoded([prompts[i] for i in order], self.engine.tokenizer, add_special_tokens)
        for i, prompt in zip(order, encoded, strict=True):
            try:
                self.engine.add_request(ids[i], prompt, params[i], priority=priorities[i], number=first + i)
            except RequestError as error:
                raise of_prompt(error, prompts, i) from None

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of ``{"role", "content"}``), or each of a list of conversations.

        ``content``: a string, or OpenAI's text parts; as a template wants them, or joined with line ends. ``tools``:
        OpenAI's, which the template tells the model of; what it answers is text, with calls as the model writes them.
        ``chat_template``: instead of the checkpoint's own; ``continue_final_message``, with
        ``add_generation_prompt=False``: the answer goes on with the last message. Other arguments as in ``generate``.
        """
        refuse(others, _CHAT_NEUTRAL, _INSTEAD)
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise RequestError(f"a conversation is a list of messages, not {shown(messages)}")
        is_one = bool(messages) and isinstance(messages[0], dict)
        many: list[Any] = [messages] if is_one else list(messages)
        tokenizer = self.engine.tokenizer
        options = {
            "add_generation_prompt": add_generation_prompt, "chat_template": chat_template,
            "continue_final_message": continue_final_message, "tools": tools or None,
            **check_variables(chat_template_kwargs or {}, tokenizer),
        }  # fmt: skip
        prompts: list[Prompt] = [
            tokenizer.render_chat([_message(message) for message in _checked(conversation)], **options)
            for conversation in many
        ]
        return self._generate(prompts, sampling_params, use_tqdm, add_special_tokens=False)

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer as transformers made it, as in vLLM."""
        return self.engine.tokenizer.hf_tokenizer

    @property
    def llm_engine(self) -> LLMEngine:
        """vLLM's name for ``engine``."""
        return self.engine

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults; nothing is taken from a checkpoint's generation_config.json."""
        return SamplingParams()

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""
        self.engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Give back processes and memory; safe to call twice."""
        self.engine.shutdown()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing_method(self, name)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()

    # ------------------------------------------------------------------ inside

    def _free_id(self) -> str:
        """The next number that nobody who uses the engine beneath has taken."""
        name = str(self._number)
        while self.engine.has_request(name):
            self._number += 1
            name = str(self._number)
        self._number += 1
        return name

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if isinstance(given, dict) or not isinstance(given, SamplingParams | Sequence | None):
            raise RequestError(f"sampling_params is SamplingParams(...), or a list of them, not {type(given).__name__}")
        if given is None or isinstance(given, SamplingParams):
            return [(given or SamplingParams()).clone(output_kind=RequestOutputKind.FINAL_ONLY)] * count
        if len(given) != count:
            raise RequestError(f"{count} prompts with {len(given)} sampling_params; give one for all, or one a prompt")
        if wrong := [type(p).__name__ for p in given if not isinstance(p, SamplingParams)]:
            raise RequestError(f"sampling_params holds {wrong[0]}, not SamplingParams")
        return [p.clone(output_kind=RequestOutputKind.FINAL_ONLY) for p in given]

    def _run(self, ids: list[str], use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        ours = set(ids)
        done: dict[str, RequestOutput] = {}
        bar = _progress(len(ids), use_tqdm)
        try:
            began, tokens = time.perf_counter(), 0
            while len(done) < len(ids):
                outputs = self.engine.step()
                if not outputs and not self.engine.has_unfinished_requests():
                    raise RequestError(f"{len(ids) - len(done)} of {len(ids)} requests were aborted from elsewhere")
                for output in outputs:
                    if output.request_id not in ours:
                        continue  # of somebody who uses the engine beneath
                    done[output.request_id] = output
                    tokens += sum(len(c.token_ids) for c in output.outputs)
                    if bar is not None:
                        bar.postfix = f"{tokens / (time.perf_counter() - began):.0f} tok/s"
                        bar.update(1)  # draws it, ten times a second at most
        finally:
            if bar is not None:
                bar.close()
        return [done[name] for name in ids]


def _prompts(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str | Mapping | bytes):
        return [prompts]  # type: ignore[list-item]  # the engine refuses bytes
    if not isinstance(prompts, Iterable):  # the engine refuses it
        return [prompts]
    many = list(prompts)
    if many and all(hasattr(p, "__index__") and not getattr(p, "ndim", 0) for p in many):  # arrays have it, too
        return [many]
    return [p.tolist() if hasattr(p, "tolist") else p for p in many]  # of arrays and tensors


def _encoded(prompts: list[Prompt], tokenizer: Tokenizer, add_special_tokens: bool) -> Iterator[Prompt]:
    """The prompts with token ids, some at a time: a batch is encoded on all cores, and the first step need not wait for
    the last text."""
    for start in range(0, len(prompts), _ENCODED_AT_ONCE):
        some = prompts[start : start + _ENCODED_AT_ONCE]
        texts = {i: text for i, prompt in enumerate(some) if (text := _text_of(prompt)) is not None}
        try:
            batch = tokenizer.encode_batch(list(texts.values()), add_special_tokens=add_special_tokens)
        except RequestError:  # the engine will say of which
            yield from some
            continue
        for (i, text), ids in zip(texts.items(), batch, strict=True):
            given = some[i]
            some[i] = {**(given if isinstance(given, Mapping) else {}), "prompt": text, "prompt_token_ids": ids}
        yield from some


def _size(prompt: Prompt) -> int:
    """Its tokens, or its letters; 0 of what the engine will refuse."""
    given: Any = prompt
    if isinstance(given, Mapping):
        given = given.get("prompt") if given.get("prompt_token_ids") is None else given["prompt_token_ids"]
    return len(given) if isinstance(given, str | list | tuple) or getattr(given, "ndim", 0) == 1 else 0


def _text_of(prompt: Prompt) -> str | None:
    """What has to be encoded of it."""
    text: Any = prompt
    if isinstance(prompt, Mapping):
        text = prompt.get("prompt") if prompt.get("prompt_token_ids") is None else None
    return text if isinstance(text, str) else None


def _checked(conversation: Any) -> Sequence[Any]:
    if not isinstance(conversation, Sequence) or not conversation:
        raise RequestError("a conversation is a list of at least one message")
    return conversation


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or "role" not in message or not {"content", "tool_calls"} & message.keys():
        raise RequestError(f'a message is {{"role": …, "content": …}}, not {shown(message)}')
    if not isinstance(message["role"], str):
        raise RequestError(f"a message's role is a string, as 'user', not {shown(message['role'])}")
    if calls := message.get("tool_calls"):
        check_tool_calls(calls)
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    if not (content is None and calls) and not all(
        isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") == "text"
        for part in parts
    ):
        raise RequestError(f"a message's content is a string or a list of text parts, not {shown(content)}")
    return message


def _progress(total: int, show: bool | Callable[..., Any]) -> Any:
    """A bar, made as vLLM makes it, or None."""
    if not show or not total:
        return None
    from tqdm import tqdm

    return (show if callable(show) else tqdm)(total=total, desc="requests", dynamic_ncols=True, postfix="0 tok/s")
