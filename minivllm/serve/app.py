"""The server's routes, OpenAI's and vLLM's: each is a few lines on ``protocol``, ``EngineClient`` and ``replies``."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Receive, Scope, Send

from minivllm.core.lora_request import LoRARequest
from minivllm.core.sampling_params import SamplingParams
from minivllm.errors import CheckpointError, EngineDeadError, RequestError, shown
from minivllm.models.tokenizer import check_variables
from minivllm.naming import listing
from minivllm.serve.adapters import NamedAdapters
from minivllm.serve.conversation import Conversation
from minivllm.serve.echo import Echo
from minivllm.serve.engine_client import EngineClient
from minivllm.serve.errors import ClientError, error_response, install_error_handlers
from minivllm.serve.gates import MAX_BODY, BodyLimit, KeyCheck, while_there
from minivllm.serve.generation import Aborted, Generation, Interrupted
from minivllm.serve.handshake import ServerOptions
from minivllm.serve.protocol import (
    MAX_SCORES,
    MAX_TEXT,
    ChatBody,
    CompletionBody,
    Detokenize,
    GenerationBody,
    LoadAdapter,
    ReloadWeights,
    StreamOptions,
    TokenIds,
    Tokenize,
    UnloadAdapter,
    check_grammar,
    known_id,
)
from minivllm.serve.reasoning import Thinking, Thoughts, parser_of, thinking_of, variables_of
from minivllm.serve.replies import ChatReply, CompletionReply, Reply
from minivllm.serve.text_lengths import TextLengths
from minivllm.serve.tool_calls import ToolUse, dialect_of
from minivllm.version import __version__

T = TypeVar("T")
_PIECE = 1 << 18  # characters of prompts tokenized at a time, so that others get their turn in between


def create_app(engine: EngineClient, options: ServerOptions) -> FastAPI:
    """The ASGI application; its lifespan, which may run repeatedly, starts and stops ``engine``. Raises as
    ``NamedAdapters`` does."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        server.start()
        yield
        server.stop()

    server = Server(engine, options)
    app = FastAPI(title="minivllm", version=__version__, lifespan=lifespan)
    app.post("/v1/completions")(server.completions)
    app.post("/v1/chat/completions")(server.chat)
    app.post("/tokenize")(server.tokenize)
    app.post("/detokenize")(server.detokenize)
    app.post("/v1/load_lora_adapter")(server.load_adapter)
    app.post("/v1/unload_lora_adapter")(server.unload_adapter)
    app.post("/reload_weights")(server.reload_weights)
    app.post("/sleep")(server.sleep)
    app.post("/wake_up")(server.wake_up)
    app.post("/ping")(server.health)
    got: dict[str, Callable[..., Any]] = {
        "/v1/models": server.models,
        "/v1/models/{name:path}": server.one_model,
        "/is_sleeping": server.is_sleeping,
        "/health": server.health,
        "/ping": server.health,
        "/version": server.version,
        "/metrics": server.metrics,
    }
    for path, answer in got.items():
        app.get(path)(answer)
        app.head(path, include_in_schema=False)(answer)
    install_error_handlers(app, tuple(ChatBody.model_fields | CompletionBody.model_fields))
    app.add_middleware(BodyLimit, most=MAX_BODY)
    if options.api_key is not None:
        app.add_middleware(KeyCheck, api_key=options.api_key)
    if options.allowed_origins:  # outermost: a browser's preflight request has no key
        app.add_middleware(CORSMiddleware, allow_origins=options.allowed_origins, allow_methods="*", allow_headers="*")
    return app


class Server:
    """The endpoints and their shared state."""

    def __init__(self, engine: EngineClient, options: ServerOptions) -> None:
        self.engine, self.options = engine, options
        self.tokenizer = engine.tokenizer
        self.dialect = dialect_of(options.tool_call_parser, self.tokenizer.chat_template)
        self.reasoning_parser = parser_of(options.reasoning_parser, self.tokenizer.chat_template)
        self.lengths = TextLengths(self.tokenizer, engine.limits.max_model_len)
        self.started = int(time.time())
        self.tokenizing = _one_thread()
        self.adapters = NamedAdapters(engine, options.model_name, options.adapters)

    def start(self) -> None:
        """Call in the event loop that serves. Raises MinivllmError if already started."""
        self.engine.start()
        self.adapters.start()
        self.tokenizing = _one_thread()

    def stop(self) -> None:
        self.engine.stop()
        self.tokenizing.shutdown(wait=False)

    # ------------------------------------------------------------------ generating

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        async with while_there(request):
            return await self._completions(body, request)

    async def _completions(self, body: CompletionBody, request: Request) -> Response:
        adapter = self._adapter_of(body.model)
        self.engine.check()
        params = _params_of(body)
        with body.in_its_words():
            given = body.prompts(self.engine.limits.max_model_len)
        self._check_room(len(given) * params.n)
        with body.in_its_words():
            ids = await self._ids_of(given, add_special_tokens=body.add_special_tokens)
        prompts: list[dict[str, Any]] = [
            {"prompt": p, "prompt_token_ids": ids[p]} if isinstance(p, str) else {"prompt_token_ids": p} for p in given
        ]
        echo = await self._encode(self._echo, body, prompts) if body.echo else None
        return await self._answer(CompletionReply, body, adapter, prompts, params, request, echo=echo)

    async def _ids_of(self, prompts: list[str | TokenIds], *, add_special_tokens: bool) -> dict[str, list[int]]:
        """Tokenize the prompts that are text; token-id prompts do not wait for tokenization."""
        texts = list(dict.fromkeys(prompt for prompt in prompts if isinstance(prompt, str)))
        ids: dict[str, list[int]] = {}

        def encoded(some: list[str], first: bool) -> list[list[int]]:
            if first:  # in one turn: each turn waits behind all others' texts
                self.lengths.check(prompts)
            return self.tokenizer.encode_batch(some, add_special_tokens=add_special_tokens)

        while len(ids) < len(texts):
            some: list[str] = []
            size = 0
            for text in texts[len(ids) :]:
                size += len(text)
                if some and size > _PIECE:
                    break
                some.append(text)
            ids |= zip(some, await self._encode(encoded, some, not ids), strict=True)
        return ids

    def _echo(self, body: CompletionBody, prompts: list[dict[str, Any]]) -> Echo:
        for prompt in prompts:
            self._check_tokens("prompt", prompt["prompt_token_ids"])  # checked before the engine sees them
        return Echo.of(body, prompts, self.tokenizer)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        async with while_there(request):
            return await self._chat(body, request)

    async def _chat(self, body: ChatBody, request: Request) -> Response:
        adapter = self._adapter_of(body.model)
        self.engine.check()
        tools = ToolUse(body, self.dialect) if body.uses_tools else None
        changed: dict[str, Any] = {}
        if tools is not None and tools.tag is not None:
            changed["structured_outputs"] = {"structural_tag": tools.tag}
        if tools is not None and tools.dialect.special and body.skip_special_tokens is None:
            changed["skip_special_tokens"] = False
        params = _params_of(body, changed)
        self._check_room(params.n)
        with body.in_its_words():
            text, tokens = await self._conversation(body, self.lengths)
        thinking = thinking_of(self.reasoning_parser, text, body.begun())
        guide, thoughts = params.structured_outputs, None
        if thinking is not Thinking.NEVER:
            decode = partial(self.tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
            thoughts = partial(Thoughts, thinking, decode, hidden=not body.include_reasoning)
            if guide is not None and guide.reasoning is None:
                params = params.clone(structured_outputs=replace(guide, reasoning=thinking.value))
        return await self._answer(
            ChatReply, body, adapter, [{"prompt_token_ids": tokens}], params, request,
            top_logprobs=body.top_logprobs or 0, tools=tools, thoughts=thoughts,
        )  # fmt: skip

    async def _answer(
        self,
        kind: type[Reply],
        body: GenerationBody,
        adapter: LoRARequest | None,
        prompts: list[dict[str, Any]],
        params: SamplingParams,
        request: Request,
        **more: Any,
    ) -> Response:
        self._check_room(len(prompts) * params.n)  # again: others may have come during tokenization
        _check_scores(prompts, params)
        unique = f"{kind.name}-{uuid.uuid4().hex}"
        names = [f"{unique}-{i}" for i in range(len(prompts))]
        theirs = body.request_id or known_id(request.headers.get("x-request-id", ""))
        reply_id = f"{kind.name}-{theirs}" if theirs else unique  # as in vLLM
        usage = body.stream_options or StreamOptions()
        reply = kind(
            reply_id,
            self.options.model_name if adapter is None else adapter.lora_name,
            names,
            params.n,
            usage.include_usage,
            usage.continuous_usage_stats,
            prompt_logprobs=body.prompt_logprobs,
            **more,
        )
        with body.in_its_words():
            generation = await self.engine.generate(
                names, prompts, params, cache_salt=body.cache_salt, priority=body.priority, lora_request=adapter
            )
        if body.stream:
            return EventStream(generation, reply)
        try:
            answer = reply.whole([output async for output in generation])
        finally:
            generation.abort()
        return Response(answer.json_bytes(), media_type="application/json")

    def _check_room(self, sequences: int) -> None:
        """Refuse this many more sequences if they would exceed ``max_waiting``."""
        waiting = self.options.max_waiting
        if waiting is None:
            return
        there, most = self.engine.num_completions, self.engine.limits.max_num_seqs
        if there + sequences <= most + waiting:
            return
        if sequences > most + waiting:
            said = f"{sequences} completions are more than this server takes at once: {most} and max_waiting={waiting}"
            raise ClientError(f"{said}; send several requests")
        said = f"{there} completions run or wait: {most} may run, and max_waiting={waiting}"
        raise ClientError(f"{said}; try again later", status=503, code="overloaded")

    # ------------------------------------------------------------------ tokens

    async def tokenize(self, body: Tokenize, request: Request) -> dict[str, Any]:
        self._adapter_of(body.model)
        async with while_there(request):
            if body.prompt is None:
                _, tokens = await self._conversation(body)
            else:
                _check_text("prompt", body.prompt)
                special = body.add_special_tokens
                tokens = await self._encode(self.tokenizer.encode, body.prompt, add_special_tokens=special)
        return {"count": len(tokens), "max_model_len": self.engine.limits.max_model_len, "tokens": tokens}

    async def detokenize(self, body: Detokenize, request: Request) -> dict[str, str]:
        self._adapter_of(body.model)
        self._check_tokens("tokens", body.tokens)
        async with while_there(request):
            return {"prompt": await self._encode(self.tokenizer.decode, body.tokens, skip_special_tokens=False)}

    def _check_tokens(self, name: str, tokens: list[int]) -> None:
        vocab = self.engine.limits.vocab_size
        if wrong := [token for token in tokens if not 0 <= token < vocab]:
            said = f"{name}: {wrong[0]} is outside the vocabulary: 0 to {vocab - 1}"
            raise ClientError(said, param=name)

    async def _conversation(self, body: Conversation, lengths: TextLengths | None = None) -> tuple[str, list[int]]:
        """A conversation as text and as token ids. ``lengths``: given if it is to be answered, to check its length
        early."""
        if not body.messages:
            raise ClientError("messages: a conversation has at least one message", param="messages")
        variables = dict(check_variables(body.chat_template_kwargs or {}, self.tokenizer))
        if body.reasoning_effort is not None:
            template = self.tokenizer.chat_template
            variables = variables_of(body.reasoning_effort, template, self.reasoning_parser) | variables
        messages = [message.for_template() for message in body.messages]

        def encoded(**options: Any) -> tuple[str, list[int]]:
            text = self.tokenizer.render_chat(messages, **options)
            if lengths is not None:
                lengths.check([text])
            else:
                _check_text("messages", text)
            return text, self.tokenizer.encode(text, add_special_tokens=False)

        try:
            return await self._encode(encoded, **body.options(), **variables)
        except RequestError as error:
            if not isinstance(error.__cause__, RecursionError):
                raise
            given = {"chat_template_kwargs": body.chat_template_kwargs, "tools": body.tools, "messages": body.messages}
            names = [name for name, value in given.items() if value]
            raise ClientError(f"{' or '.join(names)}: nested too deeply", param=names[0]) from None

    async def _encode(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run ``function`` in the tokenizer's thread, in turn; a request cancelled before its turn does not run."""
        return await asyncio.get_running_loop().run_in_executor(self.tokenizing, lambda: function(*args, **kwargs))

    # ------------------------------------------------------------------ weights

    async def reload_weights(self, body: ReloadWeights) -> dict[str, Any]:
        """Goes on if the client leaves."""
        if not self.options.allow_reload:
            said = "this server replaces no weights; start it with allow_reload=true (it then reads any folder it can)"
            raise ClientError(said, status=403)
        began = time.monotonic()
        try:
            await self.engine.reload_weights(body.weights_path, abort=body.abort)
        except (CheckpointError, RequestError) as error:
            raise ClientError(str(error), param=None if body.weights_path is None else "weights_path") from None
        return {"weights_path": body.weights_path, "seconds": round(time.monotonic() - began, 3)}

    async def load_adapter(self, body: LoadAdapter) -> Response:
        """Goes on if the client leaves."""
        self._check_adapters_change()
        await self.adapters.load(body.lora_name, body.lora_path, again=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, body: UnloadAdapter) -> Response:
        self._check_adapters_change()
        await self.adapters.unload(body.lora_name, body.lora_int_id)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _check_adapters_change(self) -> None:
        if not self.options.allow_runtime_lora_updating:
            said = "this server's adapters stay as they are; start it with enable_lora=true"
            why = "it then reads any folder it can"
            raise ClientError(f"{said} allow_runtime_lora_updating=true ({why})", status=403)

    # ------------------------------------------------------------------ sleep

    async def sleep(self, request: Request) -> Response:
        """Goes on if the client leaves."""
        self._check_sleeps()
        given = await _query_of(request, "level", "abort")
        level, abort = given.get("level", ["1"])[-1], given.get("abort", ["false"])[-1]
        if level not in ("1", "2"):
            raise ClientError(f"level={level} is neither 1 nor 2", param="level")
        if abort not in ("true", "false"):
            raise ClientError(f"abort={abort} is neither true nor false", param="abort")
        try:
            await self.engine.sleep(int(level), abort=abort == "true")
        except RequestError as error:
            raise ClientError(str(error)) from None
        return Response()

    async def wake_up(self, request: Request) -> Response:
        self._check_sleeps()
        try:
            await self.engine.wake_up((await _query_of(request, "tags")).get("tags"))
        except RequestError as error:
            raise ClientError(str(error), param="tags") from None
        return Response()

    async def is_sleeping(self) -> dict[str, bool]:
        return {"is_sleeping": self.engine.is_sleeping}

    def _check_sleeps(self) -> None:
        if not self.options.enable_sleep_mode:
            raise ClientError("this server does not sleep; start it with enable_sleep_mode=true", status=403)

    # ------------------------------------------------------------------ about the server

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model(), *map(self._model, self.adapters)]}

    async def one_model(self, name: str) -> dict[str, Any]:
        if not name:  # /v1/models/
            return await self.models()
        return self._model(self._adapter_of(name))

    async def health(self) -> Response:
        self.engine.check()
        return Response()

    async def version(self) -> dict[str, str]:
        return {"version": __version__}

    async def metrics(self) -> Response:
        return Response(await self.engine.metrics(self.options.model_name), media_type=CONTENT_TYPE_LATEST)

    def _model(self, adapter: LoRARequest | None = None) -> dict[str, Any]:
        ours = self.options.model_name
        return {
            "id": ours if adapter is None else adapter.lora_name,
            "object": "model",
            "created": self.started,
            "owned_by": "minivllm",
            "root": self.options.root if adapter is None else adapter.path,
            "parent": None if adapter is None else ours,
            "max_model_len": self.engine.limits.max_model_len,
            "vocab_size": self.engine.limits.vocab_size,
        }

    def _adapter_of(self, name: str | None) -> LoRARequest | None:
        """The adapter that a request's ``model`` names; None: it is the model itself."""
        ours = self.options.model_name
        if not name or name == ours:
            return None
        if (adapter := self.adapters.named(name)) is None:
            there = listing(map(repr, [ours, *(one.lora_name for one in self.adapters)]))
            said = f"there is no model {shown(name)} here; this server has {there}"
            raise ClientError(said, status=404, param="model", code="model_not_found")
        return adapter


def _one_thread() -> ThreadPoolExecutor:
    """For tokenization: a long prompt delays other prompts, not running requests' tokens."""
    return ThreadPoolExecutor(1, "minivllm-tokenizer")


async def _query_of(request: Request, *known: str) -> dict[str, list[str]]:
    """The values of each parameter in the URL, where vLLM has these. Raises ClientError for others, and for a body."""
    if await request.body() not in (b"", b"{}"):
        raise ClientError(f"the body is not read; type {request.url.path}?{known[0]}=...")
    query = request.query_params
    if unknown := next((key for key in query if key not in known), None):
        raise ClientError(
            f"{unknown} is no parameter of {request.url.path}; there is {', '.join(known)}", param=unknown
        )
    return {key: query.getlist(key) for key in query}


def _params_of(body: GenerationBody, changed: Mapping[str, Any] | None = None) -> SamplingParams:
    """The body's sampling parameters, with ``changed`` applied."""
    with body.in_its_words():
        params = body.sampling_params()
        if changed:
            params = params.clone(**changed)
        check_grammar(params.structured_outputs)
    return params


def _check_text(name: str, text: str) -> None:
    if len(text) > MAX_TEXT:
        said = f"{name}: {len(text)} characters are more than {MAX_TEXT}; send several requests"
        raise ClientError(said, param=name)


def _check_scores(prompts: list[dict[str, Any]], params: SamplingParams) -> None:
    """Refuse an answer with too many prompt log-probabilities, which every choice repeats."""
    if params.prompt_logprobs is None:
        return
    tokens = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
    if (scores := tokens * (1 + params.prompt_logprobs) * params.n) > MAX_SCORES:
        said = f"{tokens} prompt tokens with {params.prompt_logprobs} + 1 log-probabilities each and n={params.n}"
        raise ClientError(f"{said}: {scores} are more than {MAX_SCORES}; send several requests", param="prompt")


class EventStream(StreamingResponse):
    """Server-sent events. However the stream ends, its generation ends, too."""

    def __init__(self, generation: Generation, reply: Reply) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._events(generation, reply), media_type="text/event-stream", headers=headers)
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.abort()

    async def _events(self, generation: Generation, reply: Reply) -> AsyncIterator[bytes]:
        try:
            async for output in generation:
                if new := b"".join(map(_event, reply.chunks(output))):
                    yield new
        except (EngineDeadError, Interrupted) as error:  # too late for a status
            yield _event(bytes(error_response(error).body))
            return
        except Aborted:
            return
        yield b"".join(_event(chunk.json_bytes()) for chunk in reply.last_chunks()) + b"data: [DONE]\n\n"


def _event(chunk: bytes) -> bytes:
    return b"data: " + chunk + b"\n\n"
