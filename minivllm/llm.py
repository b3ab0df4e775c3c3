"""``LLM``: offline inference in one object, with vLLM's interface."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from minivllm.bytecode import kept_bytecode
from minivllm.core.engine import LLMEngine
from minivllm.core.garbage import uncollected
from minivllm.core.longest_first import longest_first
from minivllm.core.lora_request import LoRARequest
from minivllm.core.outputs import RequestOutput
from minivllm.core.requests import Prompt
from minivllm.core.sampling_params import RequestOutputKind, SamplingParams
from minivllm.errors import RequestError, of_prompt, shown
from minivllm.missing import missing_method, refuse
from minivllm.models.conversation import check_tool_calls
from minivllm.models.tokenizer import check_variables

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from minivllm.config.engine_config import EngineConfig
    from minivllm.models.tokenizer import Tokenizer

_ENCODED_AT_ONCE = 64  # prompts
# vLLM's arguments that are not supported, each with the one value that is accepted because it changes nothing.
_BOTH_NEUTRAL: dict[str, Any] = {
    "guided_options_request": None, "mm_processor_kwargs": {}, "prompt_adapter_request": None,
    "tokenization_kwargs": {},
}  # fmt: skip
_GENERATE_NEUTRAL: dict[str, Any] = _BOTH_NEUTRAL | {"prompt_token_ids": None}
_CHAT_NEUTRAL: dict[str, Any] = _BOTH_NEUTRAL | {"chat_template_content_format": "auto"}
_OnOutput = Callable[[int, "RequestOutput"], None]  # gets a prompt's index and its output
_INSTEAD = {field.name: f"give SamplingParams({field.name}=...)" for field in fields(SamplingParams)} | {
    "guided_options_request": "give SamplingParams(structured_outputs=StructuredOutputsParams(...))",
    "prompt_token_ids": "token ids are prompts: generate([[1, 2], [3]])",
    "stream": "LLMEngine's step returns the tokens of each step",
}


class LLM:
    """Loads a model for ``generate`` and ``chat``; ``with LLM(...) as llm`` releases everything at the end.

    Calls from several threads run one at a time; the underlying ``engine`` is for one thread. Outputs of requests added
    to ``engine`` directly are dropped while a call here runs: step the engine until they finish, then call.

    Args:
        model: an option of conf/model (demo, qwen3, llama …), a checkpoint folder, or a Hub repository.
        attention: auto, torch, triton, hopper, flash, flashinfer, or a plugin's backend.
        tp: number of tensor-parallel ranks.
        device: auto, cuda or cpu.
        dtype: auto, float32, bfloat16 or float16.
        overrides: any configuration, as on the command line: ``["cache.num_blocks=64"]``. They are applied last and win
            over the other arguments.
        **options: settings under vLLM's names (``max_model_len``, ``gpu_memory_utilization``, ``seed`` …).

    Raises:
        ConfigError, CheckpointError, PluginError: the setup cannot run; the message says what to change.
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
        """Create an LLM from a composed configuration."""
        llm = cls.__new__(cls)
        llm._begin(LLMEngine.from_config(config))
        return llm

    def _begin(self, engine: LLMEngine) -> None:
        self.engine, self._number, self._turn = engine, 0, threading.RLock()
        self._process = os.getpid()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
        on_output: _OnOutput | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs are in the order of the prompts.

        If there are more prompts than run at once, those with the largest ``max_tokens`` start first, cache permitting.

        ``prompts``: a string, a list of token ids, a mapping with ``prompt`` or ``prompt_token_ids``, or a list of
        these. ``sampling_params``: one for all prompts, or one per prompt. ``use_tqdm``: whether to show progress, or a
        callable that is used like ``tqdm``. ``lora_request``: a LoRA adapter for all prompts, or one or None per
        prompt; beyond ``max_loras`` different ones, prompts wait for those of others. ``priority``: one per prompt,
        smaller is served earlier; only for schedulers that have priorities. ``on_output``: called with each prompt's
        index and output as soon as that is complete; if it raises, the others are aborted. vLLM's other arguments are
        accepted only at values that change nothing.

        Raises:
            RequestError: a prompt can never run; the other prompts are dropped, the engine stays usable.
        """
        refuse(others, _GENERATE_NEUTRAL, _INSTEAD, self.generate)
        if prompts is None:
            raise RequestError("there are no prompts; give a text, a list of token ids, or a list of these")
        return self._generate(_prompts(prompts), sampling_params, use_tqdm, lora_request, priority, on_output)

    def _generate(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
        on_output: _OnOutput | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        self._check_free()
        many = len(prompts)
        params = self._params(sampling_params, many)
        adapters = _adapters(lora_request, many)
        given: Any = priority
        priority = given.tolist() if hasattr(given, "tolist") else given  # it may be an array
        if not isinstance(priority, Sequence | None):
            raise RequestError(f"priority={shown(priority)} is not a list; give one per prompt")
        if priority is not None and len(priority) != many:
            raise RequestError(f"{many} prompts with {len(priority)} priorities; give one per prompt")
        priorities = [0] * many if priority is None else priority
        with self._turn:
            order = longest_first(self.engine, [_size(prompt) for prompt in prompts], params)
            first = self.engine.num_requests_added
            add = partial(self._add, prompts, params, adapters, priorities, add_special_tokens, first)
            ids: list[str] = []
            try:
                ids += (self._free_id() for _ in prompts)
                try:
                    left = add(ids, order)
                except RequestError:
                    if order == list(range(many)):
                        raise
                    self.engine.abort(ids)
                    self.engine.num_requests_added = first
                    left = add(ids, range(many))  # so that the error names the first refused prompt
                return self._run(ids, use_tqdm, on_output, left, partial(add, ids))
            except BaseException:
                self.engine.abort(ids)
                raise

    def _add(
        self, prompts: list[Prompt], params: list[SamplingParams], adapters: Sequence[LoRARequest | None],
        priorities: Sequence[int], add_special_tokens: bool, first: int, ids: list[str], order: Sequence[int],
    ) -> list[int]:  # fmt: skip
        """Add these prompts; ``first`` is the number of prompt 0. Returns those whose adapter finds no place yet."""
        named = {i: its for i in order if isinstance(its := adapters[i], LoRARequest)}
        fitting = self.engine.fitting_loras(named.values())
        left = [i for i, its in named.items() if its.lora_int_id not in fitting]
        now = [i for i in order if i not in named or named[i].lora_int_id in fitting]
        encoded = _encoded([prompts[i] for i in now], self.engine.tokenizer, add_special_tokens)
        for i, prompt in zip(now, encoded, strict=True):
            try:
                self.engine.add_request(
                    ids[i], prompt, params[i], priority=priorities[i], number=first + i, lora_request=adapters[i]
                )
            except RequestError as error:
                if error.whole_request and not any(priorities) and all(one is params[0] for one in params):
                    raise  # one for all prompts
                raise of_prompt(error, prompts, i) from None
        return left

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        on_output: _OnOutput | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Reply to one conversation (a list of ``{"role", "content"}``), or to each of a list of conversations.

        ``content``: a string, or OpenAI's text parts, which are joined with newlines unless the template takes parts.
        ``tools``: in OpenAI's format, for the template; tool calls in the reply are returned as the model's raw text.
        ``chat_template``: replaces the checkpoint's. ``continue_final_message``, with ``add_generation_prompt=False``:
        the reply continues the last message. Other arguments as in ``generate``.
        """
        refuse(others, _CHAT_NEUTRAL, _INSTEAD, self.chat)
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise RequestError(f"a conversation is a list of messages, not {shown(messages)}")
        is_one = bool(messages) and isinstance(messages[0], dict | str)
        many: list[Any] = [messages] if is_one else list(messages)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message=True continues the last message, and add_generation_prompt=True, the default, "
                "begins another; pass add_generation_prompt=False, too"
            )
        tokenizer = self.engine.tokenizer
        options = {
            "add_generation_prompt": add_generation_prompt, "chat_template": chat_template,
            "continue_final_message": continue_final_message, "tools": tools or None,
            **check_variables(chat_template_kwargs or {}, tokenizer),
        }  # fmt: skip
        prompts: list[Prompt] = []
        for i, conversation in enumerate(many):
            try:
                said = [_message(message) for message in _checked(conversation)]
                prompts.append(tokenizer.render_chat(said, **options))
            except RequestError as error:
                raise of_prompt(error, many, i) from error
        return self._generate(
            prompts, sampling_params, use_tqdm, lora_request, on_output=on_output, add_special_tokens=False
        )

    def get_tokenizer(self) -> Any:
        """The checkpoint's transformers tokenizer, as in vLLM."""
        return self.engine.tokenizer.hf_tokenizer

    @property
    def llm_engine(self) -> LLMEngine:
        """vLLM's name for ``engine``."""
        return self.engine

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults; a checkpoint's generation_config.json is not used."""
        return SamplingParams()

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes."""
        self.engine.reset_prefix_cache()

    def reload_weights(
        self, weights_path: str | Path | None = None, weights_iterator: Iterable[tuple[str, Tensor]] | None = None
    ) -> None:
        """See ``LLMEngine.reload_weights``; waits for calls in other threads."""
        self._check_free()
        with self._turn:
            self.engine.reload_weights(weights_path, weights_iterator)

    def sleep(self, level: int = 1) -> None:
        """See ``LLMEngine.sleep``; waits for calls in other threads."""
        self._check_free()
        with self._turn:
            self.engine.sleep(level)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """See ``LLMEngine.wake_up``."""
        self._check_free()
        with self._turn:
            self.engine.wake_up(tags)

    def shutdown(self) -> None:
        """Release processes and memory; safe to call twice."""
        self.engine.shutdown()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing_method(self, name)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()

    # ------------------------------------------------------------------ inside

    def _check_free(self) -> None:
        if os.getpid() != self._process:  # torch's threads, ranks and CUDA contexts are the parent's
            raise RequestError(
                "a forked child cannot use its parent's engine; make an LLM in the child, and the child with "
                'multiprocessing.get_context("spawn")'
            )
        if self.engine.served:
            raise RequestError("an AsyncEngine runs this engine: send requests to that, or stop it first")

    def _free_id(self) -> str:
        """The next number that is not already a request id of the engine."""
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
            raise RequestError(f"{count} prompts with {len(given)} sampling_params; give one for all or one per prompt")
        if wrong := [type(p).__name__ for p in given if not isinstance(p, SamplingParams)]:
            raise RequestError(f"sampling_params holds {wrong[0]}, not SamplingParams")
        return [p.clone(output_kind=RequestOutputKind.FINAL_ONLY) for p in given]

    def _run(
        self, ids: list[str], use_tqdm: bool | Callable[..., Any], on_output: _OnOutput | None,
        left: Sequence[int], add: Callable[[Sequence[int]], list[int]],
    ) -> list[RequestOutput]:  # fmt: skip
        """Step until all have their outputs; ``add`` adds those ``left`` as others finish, and returns who is still."""
        places = {name: i for i, name in enumerate(ids)}
        done: dict[str, RequestOutput] = {}
        bar = _progress(len(ids), use_tqdm)
        try:
            began, tokens = time.perf_counter(), 0
            while len(done) < len(ids):
                outputs = self.engine.step()
                if outputs and left:
                    left = add(left)
                if not outputs and not self.engine.has_unfinished_requests():
                    self.engine.check_health()
                    raise RequestError(f"{len(ids) - len(done)} of {len(ids)} requests were aborted from elsewhere")
                for output in outputs:
                    if output.request_id not in places:
                        continue  # added to the engine directly
                    done[output.request_id] = output
                    if on_output is not None:
                        on_output(places[output.request_id], output)
                    tokens += sum(len(c.token_ids) for c in output.outputs)
                    if bar is not None:
                        bar.postfix = f"{tokens / (time.perf_counter() - began):.0f} tok/s"
                        bar.update(1)  # redraws at most ten times a second
        finally:
            if bar is not None:
                bar.close()
        return [done[name] for name in ids]


def _adapters(given: Any, count: int) -> Sequence[LoRARequest | None]:
    """One per prompt; the engine refuses what is none."""
    if not isinstance(given, list | tuple):
        return [given] * count
    if len(given) != count:
        raise RequestError(f"{count} prompts with {len(given)} lora_requests; give one for all or one per prompt")
    return given


def _prompts(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str | Mapping | bytes):
        return [prompts]  # type: ignore[list-item]  # the engine refuses bytes
    if not isinstance(prompts, Iterable) or getattr(prompts, "ndim", None) == 0:  # the engine refuses it
        return [prompts]
    many = list(prompts)
    if many and all(hasattr(p, "__index__") and not getattr(p, "ndim", 0) for p in many):  # arrays have __index__ too
        return [many]
    return [p.tolist() if hasattr(p, "tolist") else p for p in many]  # arrays and tensors


def _encoded(prompts: list[Prompt], tokenizer: Tokenizer, add_special_tokens: bool) -> Iterator[Prompt]:
    """The prompts with token ids, encoded in groups: each group uses all cores, and the first step need not wait for
    the last prompt."""
    for start in range(0, len(prompts), _ENCODED_AT_ONCE):
        some = prompts[start : start + _ENCODED_AT_ONCE]
        texts = {i: text for i, prompt in enumerate(some) if (text := _text_of(prompt)) is not None}
        try:
            batch = tokenizer.encode_batch(list(texts.values()), add_special_tokens=add_special_tokens)
        except RequestError:  # the engine will name the prompt
            yield from some
            continue
        for (i, text), ids in zip(texts.items(), batch, strict=True):
            given = some[i]
            some[i] = {**(given if isinstance(given, Mapping) else {}), "prompt": text, "prompt_token_ids": ids}
        yield from some


def _size(prompt: Prompt) -> int:
    """Its number of tokens or characters; 0 if the engine will refuse it."""
    given: Any = prompt
    if isinstance(given, Mapping):
        given = given.get("prompt") if given.get("prompt_token_ids") is None else given["prompt_token_ids"]
    return len(given) if isinstance(given, str | list | tuple) or getattr(given, "ndim", 0) == 1 else 0


def _text_of(prompt: Prompt) -> str | None:
    """The text to encode, if there is any."""
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
    """A progress bar like vLLM's, or None."""
    if not show or not total:
        return None
    from tqdm import tqdm

    return (show if callable(show) else tqdm)(total=total, desc="requests", dynamic_ncols=True, postfix="0 tok/s")
