"""Every key that a user may set, with its type, default, limits and one line of help. Nothing here imports Hydra.

Hydra needs mutable dataclasses; ``compose.py`` turns them into the frozen ones of ``engine_config.py``, ``modes.py``.
"""

# ruff: noqa: RUF009 (key() is dataclasses.field with a help text)

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from minivllm.config.keys import key
from minivllm.core.sampling_params import MAX_LOGPROBS


class Device(Enum):
    # OmegaConf parses enums by member name, so these are what users type.
    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class Dtype(Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class LoadFormat(Enum):
    auto = "auto"
    dummy = "dummy"


class PackedWeights(Enum):
    auto = "auto"
    true = "true"
    false = "false"


class CacheDtype(Enum):
    auto = "auto"
    fp8 = "fp8"


class Quantization(Enum):
    none = "none"
    fp8 = "fp8"


class ReasoningParser(Enum):
    auto = "auto"
    none = "none"
    qwen3 = "qwen3"
    deepseek_r1 = "deepseek_r1"


class ToolCallParser(Enum):
    auto = "auto"
    hermes = "hermes"
    llama3_json = "llama3_json"


class Endpoint(Enum):
    completions = "completions"
    chat = "chat"


# --------------------------------------------------------------------------- groups


@dataclass
class ModelSchema:
    name: str = key("demo", "the option that was chosen")
    path: str | None = key(None, "a checkpoint folder: config.json, tokenizer, safetensors", text=True)
    repo: str | None = key(None, "the repository on the Hugging Face Hub", text=True)
    revision: str | None = key(None, "its branch, tag or commit", text=True)
    tokenizer: str | None = key(None, "another tokenizer: a folder, a repository or a model option's name", text=True)
    lora: str | None = key(
        None, "a LoRA adapter that is merged into the weights when they are read: a folder or a repository", text=True
    )
    hf_config: dict[str, Any] = key(dict, "the published config.json, which load_format=dummy builds from")
    options: dict[str, Any] = key(dict, "the model's own settings")


@dataclass
class AttentionSchema:
    name: str = key("auto", "the backend")
    prefill: str | None = key(None, "another backend for prompt chunks")
    decode: str | None = key(None, "another backend for decode rows")
    cascade: bool = key(
        True, "read prefixes shared by decodes only once, where the backend can (triton, hopper) and it is faster"
    )
    options: dict[str, Any] = key(dict, "the backend's own settings")


@dataclass
class SchedulerSchema:
    name: str = key("mixed", "the scheduler")
    max_num_seqs: int = key(512, "most sequences running at once", ge=1, le=65536)
    max_num_batched_tokens: int = key(8192, "most tokens in one step", ge=1)
    async_scheduling: bool = key(True, "launch each step before the tokens of the previous one are read")
    max_num_partial_prefills: int = key(1, "most prompts partially computed at the same time", ge=1)
    max_long_partial_prefills: int = key(1, "how many of these may be long", ge=1)
    long_prefill_token_threshold: int = key(
        0,
        "a prompt with more tokens is long, and gets at most this many per step; 0: no limit, or 4% of max_model_len "
        "if max_num_partial_prefills is more than 1",
        ge=0,
    )
    num_speculative_tokens: int = key(
        0,
        "most tokens per step and sequence that are drafted, by looking up what followed its last tokens before or by "
        "draft_model, and verified at once; 0: none",
        ge=0,
    )
    prompt_lookup_max: int = key(
        5,
        "how many last tokens are looked up for a draft, if so many occurred before; with draft_model only of requests "
        "with structured_outputs or bad_words",
        ge=1,
    )
    prompt_lookup_min: int = key(3, "how many must have occurred before", ge=1)
    draft_model: str | None = key(
        None,
        "a smaller model with the same vocabulary that writes the drafts, instead of looking them up: a model option's "
        "name, a folder or a repository",
        text=True,
    )
    options: dict[str, Any] = key(dict, "the scheduler's own settings")


@dataclass
class CacheSchema:
    block_size: int = key(16, "tokens in a cache block", ge=1)
    num_blocks: int | None = key(None, "cache blocks; null: as many as fit in memory", ge=1)
    gpu_memory_utilization: float = key(
        0.9,
        "fraction of the GPU's memory that this engine may use: for weights, cache and what a step needs at its peak",
        gt=0,
        le=1,
    )
    enable_prefix_caching: bool = key(True, "share the blocks of equal prefixes")
    dtype: CacheDtype = key(
        CacheDtype.auto,
        "fp8: keep keys and values in float8 (e4m3), without scales: twice as many tokens fit, and answers differ "
        "slightly. With attention=hopper, triton or torch. auto: in dtype",
    )


@dataclass
class SamplerSchema:
    name: str = key("default", "the sampler")
    options: dict[str, Any] = key(dict, "the sampler's own settings")


@dataclass
class ExecutorSchema:
    name: str = key("auto", "the executor")
    options: dict[str, Any] = key(dict, "the executor's own settings")


@dataclass
class EngineSchema:
    """The keys of every mode: the fields of ``EngineConfig``, and the mode itself."""

    model: ModelSchema = key(ModelSchema, "which model")
    attention: AttentionSchema = key(AttentionSchema, "what attends")
    scheduler: SchedulerSchema = key(SchedulerSchema, "what runs in each step")
    sampler: SamplerSchema = key(SamplerSchema, "what picks tokens")
    executor: ExecutorSchema = key(ExecutorSchema, "what runs the ranks")
    cache: CacheSchema = key(CacheSchema, "the paged key-value cache")
    tp: int = key(1, "tensor-parallel ranks", ge=1)
    device: Device = key(Device.auto, "auto: a GPU if there is one")
    dtype: Dtype = key(Dtype.auto, "auto: the checkpoint's own on a GPU, bfloat16 if that is float32; float32 on a CPU")
    seed: int = key(0, "seed of dummy weights and of sampling", ge=0)
    max_model_len: int | None = key(
        None, "most tokens of prompt and completion together; null: the model's limit", ge=1
    )
    enforce_eager: bool | None = key(
        None,
        "true: no CUDA graphs; false: on a GPU, refuse attention without support for them; null: use them if attention "
        "supports them",
    )
    max_cudagraph_capture_size: int | None = key(
        None,
        "sequences in the largest decode step with a CUDA graph, rounded up to a multiple of 8, beyond 256 of 16; "
        "null: max_num_seqs",
        ge=1,
    )
    load_format: LoadFormat = key(LoadFormat.auto, "dummy: seeded random weights, made from the shape alone")
    packed_weights: PackedWeights = key(
        PackedWeights.auto,
        "keep a second copy of the LM head and of large dense layers, losslessly packed in 12 bits per weight, for "
        "decode steps of few sequences, which are bound by reading weights. Hopper GPUs, bfloat16. auto: where it "
        "works and leaves three quarters of the memory for the cache; true: always, or refuse to start",
        text=True,
    )
    quantization: Quantization = key(
        Quantization.none,
        "fp8: keep the weights of linear layers in float8 (e4m3), with a scale per output feature, and multiply inputs "
        "in float8, with a scale per token: half the memory, and large batches and prompts are faster, but answers "
        "differ slightly. GPUs since H100 and L40, bfloat16; on a CPU slow. none: in dtype, whatever the checkpoint's",
    )
    enable_sleep_mode: bool = key(
        False,
        "true: sleep() gives the memory of weights and cache back while the engine is not used, and wake_up() has them "
        "again where they were. Linux",
    )
    enable_lora: bool = key(
        False, "true: requests may have LoRA adapters of their own (lora_request); model.lora=DIR has one for all"
    )
    max_loras: int = key(
        1, "with enable_lora: adapters that unfinished requests may have at once, each with a place on the GPU", ge=1
    )
    max_lora_rank: int = key(16, "with enable_lora: the highest rank of an adapter", ge=1, le=512)
    max_logprobs: int = key(
        MAX_LOGPROBS, "most log-probabilities of a position that a request may ask for", ge=0, le=MAX_LOGPROBS
    )
    mode: str = key("generate", "what to do")


# --------------------------------------------------------------------------- modes


@dataclass
class SamplingSchema(EngineSchema):
    """Keys of one request, with the names and meanings of ``SamplingParams``."""

    max_tokens: int | None = key(None, "most tokens to generate, 1 or more; null: as many as fit")
    temperature: float = key(0.0, "0 or more; 0 is greedy")
    top_p: float = key(1.0, "keep the most likely tokens whose probabilities add up to this; more than 0, 1: all")
    top_k: int = key(0, "keep this many most likely tokens; 0 or -1: all")
    min_p: float = key(0.0, "keep tokens at least this likely relative to the most likely one; 0 to 1, 0: all")
    presence_penalty: float = key(0.0, "subtracted from the logits of tokens already generated; -2 to 2, 0: none")
    frequency_penalty: float = key(
        0.0, "subtracted from a token's logit for each time it was generated; -2 to 2, 0: none"
    )
    repetition_penalty: float = key(
        1.0, "above 1 makes tokens of the prompt and the answer less likely, below 1 more likely; more than 0, 1: none"
    )
    stop: Any = key(
        None, "a string, or a list of them, that ends a completion; for a newline type stop=$'\\n' in bash or zsh",
        text=True,
    )  # fmt: skip
    stop_token_ids: list[int] | None = key(None, "token ids that end a completion")
    ignore_eos: bool = key(False, "continue after the end-of-sequence token")
    min_tokens: int = key(0, "tokens to generate before anything but max_tokens may end a completion")
    bad_words: Any = key(None, "a string, or a list of them, that must not appear in a completion", text=True)
    structured_outputs: dict[str, Any] = key(
        dict,
        "what a completion must match: structured_outputs.choice=[big,small], or .json, .json_object, .regex, .grammar",
    )


@dataclass
class GenerateSchema(SamplingSchema):
    prompts: Any = key(None, "a string, or a list of strings or token-id lists", text=True)
    prompts_file: str | None = key(
        None,
        "a file of prompts, one per line; .jsonl: strings, or objects with prompt or prompt_token_ids, and optionally "
        "priority and, with enable_lora, lora_path; -: standard input, which is read as .jsonl if a line is such an "
        "object",
        text=True,
    )
    output: str | None = key(
        None, "write one JSON object per request to this file instead of printing; -: standard output", text=True
    )
    max_tokens: int | None = key(100, "most tokens to generate, 1 or more; null: as many as fit")
    logprobs: int | None = key(None, "log-probabilities of this many tokens per position, 0 to 20; needs output=")


@dataclass
class ChatSchema(SamplingSchema):
    system: str | None = key(None, "the system message", text=True)
    temperature: float = key(0.7, "0 or more; 0 is greedy")
    top_p: float = key(0.95, "keep the most likely tokens whose probabilities add up to this; more than 0, 1: all")


@dataclass
class ServeSchema(EngineSchema):
    host: str = key("127.0.0.1", "address to listen on; 0.0.0.0: all of this machine's", text=True)
    port: int = key(8000, "port to listen on; 0: any free one", ge=0, le=65535)
    api_key: str | None = key(
        None, "bearer token that clients must send; null: $MINIVLLM_API_KEY, or none if that is not set",
        text=True,
    )  # fmt: skip
    served_model_name: str | None = key(
        None, "model name in the API; null: its option, repository or folder", text=True
    )
    max_waiting: int | None = key(
        None, "completions that may wait beyond scheduler.max_num_seqs; more are rejected (503). null: no limit", ge=0
    )
    tool_call_parser: ToolCallParser = key(
        ToolCallParser.auto, "format of the model's tool calls; auto: the one in its chat template"
    )
    reasoning_parser: ReasoningParser = key(
        ReasoningParser.auto,
        "whether text between `<think>` and `</think>` is returned as reasoning; auto: if the chat template mentions "
        "them; qwen3: yes; deepseek_r1: yes, and the first tag may be missing",
    )
    allowed_origins: Any = key(
        None,
        "origins that may call the server from a browser (CORS): https://example.com, or a list of them; '*': all. "
        "null: none",
        text=True,
    )
    shutdown_timeout: float = key(30.0, "seconds for running requests to finish after Ctrl-C or SIGTERM", ge=0)
    allow_reload: bool = key(
        False, "POST /reload_weights replaces the weights by those of a folder that the request names"
    )
    lora_modules: dict[str, Any] = key(
        dict,
        "with enable_lora: LoRA adapters by the model name that requests use: {NAME: DIR, NAME: ORG/NAME}, a folder or "
        "a repository each",
    )
    allow_runtime_lora_updating: bool = key(
        False,
        "with enable_lora: POST /v1/load_lora_adapter and /v1/unload_lora_adapter load adapters of folders that the "
        "request names, and forget them",
    )
    log_requests: bool = key(False, "log one line per request to standard error")


@dataclass
class WorkloadSchema:
    """``[least, most]`` draws each request's own number, both ends included."""

    name: str = key("quick", "the option that was chosen")
    path: str | None = key(None, "workload=trace: a file of requests, one JSON object per line", text=True)
    num_requests: int | None = key(None, "number of requests; workload=trace: the first ones of the file", ge=1)
    request_rate: float | None = key(None, "requests per second, at random times; null: all at once", gt=0, le=1e6)
    time_scale: float | None = key(None, "workload=trace: factor on arrival times; null: 1", gt=0, le=1e6)
    input_len: Any = key(None, "prompt tokens per request: a number, or [least,most]")
    prefix_len: int | None = key(None, "tokens of a shared prefix before each prompt's own input_len", ge=1)
    num_prefixes: int | None = key(None, "with prefix_len: number of different prefixes, used in turn; null: 1", ge=1)
    num_adapters: int | None = key(
        None,
        "with enable_lora: random LoRA adapters of rank max_lora_rank, which requests have in turn; null: none",
        ge=1,
    )
    output_len: Any = key(None, "tokens to generate per request: a number, or [least,most]")
    max_token_id: int = key(10000, "prompts are drawn from token ids 0 to this, modulo the vocabulary size", ge=0)
    seed: int = key(0, "seed of prompts, lengths and arrival times", ge=0)
    temperature: float | None = key(None, "0 is greedy", ge=0)
    top_k: int | None = key(None, "keep this many most likely tokens; null: all")
    top_p: float | None = key(None, "keep the most likely tokens whose probabilities add up to this; null: all")
    min_p: float | None = key(None, "keep tokens at least this likely relative to the most likely one; null: all")
    presence_penalty: float | None = key(None, "subtracted from the logits of tokens already generated; null: none")
    frequency_penalty: float | None = key(
        None, "subtracted from a token's logit for each time it was generated; null: none"
    )
    repetition_penalty: float | None = key(
        None, "above 1 makes tokens of the prompt and the answer less likely, below 1 more likely; null: none"
    )
    logprobs: int | None = key(None, "log-probabilities of this many tokens per position", ge=0)
    ignore_eos: bool = key(True, "always generate all of output_len")
    running: list[int] | None = key(None, "workload=host: numbers of running sequences, one measurement each")
    waiting: int | None = key(None, "workload=host: length of the queue, compared with an empty one", ge=1)
    steps: int | None = key(None, "workload=host: steps per measurement", ge=1)


@dataclass
class SweepSchema:
    """Keys of ``bench -m`` only."""

    dir: str | None = key(
        None, "with -m: a new or empty folder for the results; null: ./minivllm-sweeps/DATE-TIME", text=True
    )
    resume: str | None = key(None, "folder of an interrupted sweep: run what is missing", text=True)
    timeout: float | None = key(None, "with -m: seconds after which a job is stopped; null: no limit", ge=1)


@dataclass
class BenchSchema(EngineSchema):
    workload: WorkloadSchema = key(WorkloadSchema, "what to measure")
    repeat: int = key(1, "number of measured runs; their spread is shown", ge=1)
    output: str | None = key(None, "append the record to this file, as one JSON object", text=True)
    url: str | None = key(
        None, "measure the OpenAI-compatible server at this address instead of starting an engine", text=True
    )
    endpoint: Endpoint = key(
        Endpoint.completions,
        "with url: completions: /v1/completions, with token ids; chat: /v1/chat/completions, with text made by the "
        "server's /tokenize and /detokenize or by the tokenizer that model.tokenizer names",
    )
    max_concurrency: int | None = key(None, "with url: most requests in flight; null: no limit", ge=1)
    detokenize: bool = key(False, "also detokenize, included in the timing")
    profile: str = key(
        "false",
        "true: afterwards profile some steady steps: GPU-busy share and the ten largest kernels; gpu: only on a GPU; "
        "FILE.json: also keep torch's Chrome trace",
        text=True,
    )
    profile_steps: int = key(20, "steps to profile", ge=1)
    trace: str = key("false", "true, or FILE.json: run once more and write a Perfetto trace of the steps", text=True)
    timeline: str = key("false", "true, or FILE.png: run once more and plot batches and cache use over time", text=True)
    check: bool = key(False, "workload=host: exit with 1 if a limit is exceeded")
    sweep: SweepSchema = key(SweepSchema, "several configurations")
