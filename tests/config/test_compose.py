"""Overrides become one frozen config, or one sentence that says what was wrong and what to type."""

from __future__ import annotations

import pickle
import random
from dataclasses import FrozenInstanceError, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from fake_plugins import BACKEND, FakePlugin

from minivllm.config.compose import compose, compose_engine_config
from minivllm.config.conf_dir import conf_dir
from minivllm.config.engine_config import EngineConfig
from minivllm.config.keys import keys_of
from minivllm.config.modes import MODES, ChatOptions, GenerateOptions, SamplingOptions
from minivllm.config.overrides import group_options, quote
from minivllm.config.schema import EngineSchema
from minivllm.config.vllm_names import DEFAULTS, NEGATED, NEUTRAL, NOT_HERE, SAME_NAMES, VLLM_NAMES, check_neutral
from minivllm.core.model_config import FrozenDict, ModelConfig
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.structured_outputs import StructuredOutputsParams
from minivllm.errors import ConfigError, MinivllmError, PluginError, RequestError
from minivllm.plugins import Registry, load_plugins


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_plugins([])


# --------------------------------------------------------------------------- what comes out


def test_nothing_typed_is_the_defaults_of_engine_config(registry: Registry) -> None:
    composed = compose([], registry)
    assert composed.engine == EngineConfig()
    assert composed.mode == "generate"
    assert composed.options == GenerateOptions()
    assert compose_engine_config(registry=registry) == EngineConfig()


def test_the_schema_and_the_frozen_classes_have_the_same_fields_and_defaults(registry: Registry) -> None:
    def leaves(value: Any, prefix: str = "") -> dict[str, Any]:
        found = {}
        for f in fields(value):
            inner = getattr(value, f.name)
            found |= leaves(inner, f"{prefix}{f.name}.") if is_dataclass(inner) else {prefix + f.name: inner}
        return found

    def defaults(schema: type) -> dict[str, Any]:
        return {k.name: getattr(k.default, "value", k.default) for k in keys_of(schema).values()}

    plain = defaults(EngineSchema)
    assert plain.pop("mode") == "generate"
    assert plain | {"draft_model": None} == leaves(EngineConfig()), "which composing finds for scheduler.draft_model"
    engine = keys_of(EngineSchema)
    for name, mode in MODES.items():
        own = {name: default for name, default in defaults(mode.schema).items() if name not in engine}
        frozen = leaves(compose([], registry, mode=name).options)
        assert own.keys() == frozen.keys()
        # A group's keys (bench's workload) come from its option, and null may mean an empty tuple.
        plain = {k: v for k, v in own.items() if "." not in k and v is not None}
        assert plain == {k: frozen[k] for k in plain}


def test_the_config_is_frozen_all_the_way_down_and_crosses_processes(registry: Registry) -> None:
    config = compose(["model=llama"], registry).engine
    with pytest.raises(FrozenInstanceError):
        config.cache.block_size = 3  # type: ignore[misc]
    assert isinstance(config.model.hf_config["rope_scaling"], FrozenDict)
    assert config.model.hf_config["eos_token_id"] == (128001, 128008, 128009)
    with pytest.raises(TypeError):
        config.model.hf_config["rope_scaling"]["factor"] = 1
    assert pickle.loads(pickle.dumps(config)) == config
    assert isinstance(hash(config), int)


@pytest.mark.parametrize(
    ("name", "repo", "numbers"),
    [
        ("qwen3", "Qwen/Qwen3-0.6B", (1024, 3072, 28, 16, 8, 128, True)),
        ("qwen3-4b", "Qwen/Qwen3-4B", (2560, 9728, 36, 32, 8, 128, True)),
        ("qwen3-8b", "Qwen/Qwen3-8B", (4096, 12288, 36, 32, 8, 128, False)),
        ("qwen3-14b", "Qwen/Qwen3-14B", (5120, 17408, 40, 40, 8, 128, False)),
        ("qwen3-32b", "Qwen/Qwen3-32B", (5120, 25600, 64, 64, 8, 128, False)),
        ("llama", "meta-llama/Llama-3.2-1B-Instruct", (2048, 8192, 16, 32, 8, 64, True)),
        ("llama-8b", "meta-llama/Llama-3.1-8B-Instruct", (4096, 14336, 32, 32, 8, 128, False)),
    ],
)
def test_model_options_carry_their_published_shape(
    registry: Registry, name: str, repo: str, numbers: tuple[int, ...]
) -> None:
    model = compose([f"model={name}"], registry).engine.model
    assert (model.name, model.repo) == (name, repo)
    c = ModelConfig.from_hf(model.hf_config)
    assert (
        c.hidden_size, c.intermediate_size, c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim,
        c.tie_word_embeddings,
    ) == numbers  # fmt: skip
    assert registry.model_for_architecture(c.architecture)
    qwen = name.startswith("qwen")
    assert c.vocab_size == (151936 if qwen else 128256)
    assert c.max_position == (40960 if qwen else 131072)
    assert c.rope_parameters["rope_theta"] == (1000000 if qwen else 500000)
    assert c.rope_parameters["rope_type"] == ("default" if qwen else "llama3")
    assert c.rms_norm_eps == (1e-6 if qwen else 1e-5)
    assert c.eos_token_ids == ((151645,) if qwen else (128001, 128008, 128009))


def test_every_option_of_every_group_composes(registry: Registry) -> None:
    for group in ("model", "attention", "scheduler", "sampler", "executor"):
        for option in group_options(group, registry):
            more = ["model.repo=a/b"] if option == "checkpoint" else []
            engine = compose([f"{group}={option}", *more], registry).engine
            assert getattr(engine, group).name == option


def test_overrides_reach_their_field_and_the_last_one_wins(registry: Registry) -> None:
    typed = [
        "cache.num_blocks=64", "cache.num_blocks=65", "attention=torch", "attention.prefill=triton", "tp=2", "+tp=3",
        "scheduler=prefill_first", "scheduler.max_num_seqs=7", "device=cpu", "dtype=float32", "seed=5",
        "max_model_len=100", "enforce_eager=true", "load_format=dummy", "model=qwen3", "model=qwen3-4b",
        "cache.gpu_memory_utilization=1", "++cache.enable_prefix_caching=false", "model.hf_config.num_hidden_layers=2",
        "packed_weights=true", "packed_weights=false",
    ]  # fmt: skip
    engine = compose(typed, registry).engine
    assert engine.cache.num_blocks == 65
    assert (engine.attention.name, engine.attention.prefill, engine.attention.decode) == ("torch", "triton", None)
    assert (engine.scheduler.name, engine.scheduler.max_num_seqs) == ("prefill_first", 7)
    assert (engine.device, engine.dtype, engine.load_format) == ("cpu", "float32", "dummy")
    assert (engine.tp, engine.seed, engine.max_model_len, engine.enforce_eager) == (3, 5, 100, True)
    assert engine.packed_weights == "false"
    assert engine.model.name == "qwen3-4b"
    assert engine.model.hf_config["num_hidden_layers"] == 2
    assert engine.cache.gpu_memory_utilization == 1.0
    assert engine.cache.enable_prefix_caching is False
    assert compose(["max_model_len=5", "max_model_len=null"], registry).engine.max_model_len is None


def test_what_is_printed_composes_to_the_same(registry: Registry) -> None:
    import yaml

    composed = compose(["model=llama", "prompts=[a,b]", "cache.num_blocks=3"], registry)
    tree = yaml.safe_load(composed.to_yaml())
    assert tree["cache"]["num_blocks"] == 3
    assert tree["model"]["hf_config"]["rope_scaling"]["rope_type"] == "llama3"
    assert tree["prompts"] == ["a", "b"]
    assert set(tree) | {"draft_model"} == {f.name for f in fields(EngineConfig)} | {
        f.name for f in fields(GenerateOptions)
    } | {"mode"}


# --------------------------------------------------------------------------- model


def test_a_path_runs_on_an_empty_option_and_is_absolute(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = compose(["model.path=a, folder/x=1"], registry).engine.model
    assert model.path == str(tmp_path / "a, folder" / "x=1")
    assert (model.name, model.hf_config, model.repo) == ("checkpoint", {}, None)
    (tmp_path / "small").mkdir()
    drafts = compose(["scheduler.draft_model=small", "scheduler.num_speculative_tokens=2"], registry).engine
    assert drafts.draft_model is not None
    assert drafts.draft_model.path == drafts.scheduler.draft_model == str(tmp_path / "small")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compose(["model.path=~/m"], registry).engine.model.path == str(tmp_path / "m")


def test_a_path_or_repo_of_ones_own_drops_the_shape_of_the_option(registry: Registry) -> None:
    assert compose(["model=qwen3", "model.path=/x"], registry).engine.model.hf_config == {}
    model = compose(["model=qwen3", "model.repo=me/finetuned"], registry).engine.model
    assert (model.repo, model.hf_config) == ("me/finetuned", {})
    with pytest.raises(ConfigError, match=r"model.hf_config.num_hidden_layers and model.path=/x: .* drop one"):
        compose(["model=qwen3", "model.path=/x", "model.hf_config.num_hidden_layers=1"], registry)


def test_a_checkpoint_is_named_once(registry: Registry) -> None:
    with pytest.raises(ConfigError, match=r"model.path=/x and model.repo=a/b name two checkpoints; leave one out"):
        compose(["model.path=/x", "model.repo=a/b"], registry)
    for typed in (["model.path=/x"], ["model=demo"], []):
        with pytest.raises(ConfigError, match=r"model.revision=v2 needs a repository: add model.repo=ORG/NAME"):
            compose([*typed, "model.revision=v2"], registry)
        compose([*typed, "model.revision=main"], registry)
    assert compose(["model=qwen3", "model.revision=v2"], registry).engine.model.revision == "v2"


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("tpp=2", ["tpp=2", "Did you mean tp"]),
        ("+tpp=2", ["+tpp=2", "Did you mean tp"]),
        ("++tpp=2", ["++tpp=2", "Did you mean tp"]),
        ("cache.block_sze=3", ["cache.block_sze=3", "Did you mean cache.block_size?"]),
        ("+cache.blocks=3", ["+cache.blocks=3", "cache.num_blocks", "cache.block_size"]),
        ("num_blocks=3", ["Did you mean cache.num_blocks?"]),
        ("cache.zzz=3", ["Allowed: cache.block_size"]),
        ("zzz=3", ["Allowed: attention.*", "max_model_len"]),
        ("cache=3", ["cache holds several keys", "cache.num_blocks"]),
        ("hydra.run.dir=x", ["there is no key hydra.run.dir"]),
        ("attention@x=torch", ["there is no key attention@x"]),
        ("tensor_parallel_size=2", ["here it is called tp"]),
        ("disable_cascade_attn=true", ["here it is the opposite of attention.cascade"]),
        ("block_size=2", ["here it is called cache.block_size"]),
        ("system=hi", ["system is a key of mode chat, not of mode generate"]),
        ("model=qwen33", ["model=qwen33", "Did you mean qwen3", "Allowed: checkpoint, demo, llama"]),
        ("model=Qwen/Qwen3-4B", ["Type model=qwen3-4b."]),
        ("model=/", ["Type model.path=/."]),
        ("model=qwen/qwen3-4b", ["Type model=qwen3-4b."]),
        ("model=me/mine", ["Type model.repo=me/mine."]),
        ("model=./none", ["For a checkpoint folder type model.path=DIR"]),
        ("model=checkpoint", ["add model.path=DIR"]),
        ("attention=flsh", ["attention=flsh", "Did you mean flash?", "Allowed: auto, flash"]),
        ("attention.name=flsh", ["Did you mean flash?"]),
        ("attention.prefill=auto", ["attention.prefill=auto: there is no such attention backend"]),
        ("scheduler=[mixed]", ["there is no such scheduler"]),
        ("scheduler=mixed,prefill_first", ["several values make a sweep"]),
        ("mode=serv", ["Did you mean serve?", "Allowed: bench, chat, generate, serve"]),
        ("tp=two", ["tp=two", "a whole number"]),
        ("tp=true", ["a whole number"]),
        ("tp=1.5", ["a whole number"]),
        ("tp=[1]", ["a whole number"]),
        ("tp=null", ["a whole number"]),
        ("tp=1,2", ["several values make a sweep"]),
        ("tp=range(1,3)", ["several values make a sweep"]),
        ("tp=", ["the value is missing"]),
        ("tp", ["is not key=value"]),
        ("~tp", ["a key cannot be removed"]),
        ("=2", ["is not key=value"]),
        ("tp={1", ["cannot be read"]),
        ("device=gpu", ["one of auto, cuda, cpu"]),
        ("dtype=int8", ["one of auto, float32, bfloat16, float16"]),
        ("load_format=fast", ["one of auto, dummy"]),
        ("enforce_eager=maybe", ["true or false"]),
        ("packed_weights=maybe", ["one of auto, true, false"]),
        ("packed_weights=null", ["one of auto, true, false"]),
        ("max_model_len=long", ["a whole number or null"]),
        ("temperature=hot", ["a number"]),
        ("stop_token_ids=[a]", ["a list of whole numbers"]),
        ("stop_token_ids=5", ["a list of whole numbers", "type stop_token_ids=[5]"]),
        ("scheduler.prompt_lookup_max=9", ["nothing is looked up with scheduler.num_speculative_tokens=0"]),
        ("model.hf_config.num_hidden_layers=2", ["the shape of model=demo is its own"]),
        ("cache.num_blocks={a: 1}", ["a whole number or null"]),
        ("tp=0", ["tp=0", "the least is 1"]),
        ("cache.block_size=0", ["cache.block_size=0", "the least is 1"]),
        ("cache.num_blocks=0", ["the least is 1"]),
        ("cache.gpu_memory_utilization=0", ["more than 0, at most 1"]),
        ("cache.gpu_memory_utilization=1.01", ["more than 0, at most 1"]),
        ("cache.gpu_memory_utilization=nan", ["more than 0, at most 1"]),
        ("scheduler.max_num_seqs=0", ["the least is 1"]),
        ("scheduler.max_num_batched_tokens=-1", ["the least is 1"]),
        ("scheduler.max_long_partial_prefills=2", ["max_num_partial_prefills=1"]),
        ("max_model_len=0", ["the least is 1"]),
        ("seed=-1", ["the least is 0"]),
        ("attention.options.x=1", ["attention=auto takes no options; type attention=NAME"]),
        ("scheduler.options.x=1", ["scheduler.options.x", "mixed has no such option"]),
        ("sampler.options=3", ["sampler.options is a mapping"]),
        ("+model.hf_config.hidden_size=1", ["its config.json", "add load_format=dummy"]),
        ("scheduler.max_num_seqs=65537", ["too large", "the most is 65536"]),
        ("prompts=[null]", ["prompts[0]=null", """prompts='["null"]'"""]),
        ("seed=${nope}", ["nope"]),
        ("seed=${device}", ["device"]),
        ("prompts=[1,a]", ["prompts[0]=1", "quote text"]),
        ("prompts=[[1,a]]", ["prompts[0]="]),
        ("stop=[1]", ["stop: 1 is not a string"]),
        ("stop=\\n", ["stop=\\n: \\n is a backslash and a letter, no line end", "stop=$'\\n' (bash, zsh)"]),
        ("stop=User:\\n\\n", ["stop=User:\\n\\n: \\n is a backslash"]),
        ('stop=[a,"\\nUser:"]', ["stop=\\nUser:: \\n is a backslash"]),
        ("prompts=[a,b", ["cannot be read"]),
        ("logprobs=1", ["output=FILE.jsonl"]),
    ],
)
def test_refusals_name_the_value_and_the_way_out(registry: Registry, typed: str, told: list[str]) -> None:
    with pytest.raises(ConfigError) as e:
        compose([typed], registry)
    message = str(e.value)
    for part in told:
        assert part in message
    for noise in ("full_key", "object_type", "HYDRA_FULL_ERROR", "hydra.cc", "\n"):
        assert noise not in message


def test_a_shape_has_no_other_keys_than_its_own(registry: Registry) -> None:
    with pytest.raises(
        ConfigError, match=r"^model\.hf_config\.hidden_sze: the shape of model=qwen3 has no such key; to add"
    ):
        compose(["model=qwen3", "load_format=dummy", "model.hf_config.hidden_sze=1"], registry)


def test_of_torchruns_processes_the_first_speaks(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compose([], registry).speaks
    monkeypatch.setenv("RANK", "1")
    assert compose([], registry).speaks and not compose(["executor=torchrun"], registry).speaks
    monkeypatch.setenv("RANK", "0")
    assert compose(["executor=torchrun"], registry).speaks


# --------------------------------------------------------------------------- modes and prompts


@pytest.mark.parametrize(
    ("typed", "prompts"),
    [
        ('prompts=["Once upon a time","The engine"]', ("Once upon a time", "The engine")),
        ("prompts=[Once upon a time,The engine]", ("Once upon a time", "The engine")),
        ("prompts=Hello, world! {x} ${y} \\", ("Hello, world! {x} ${y} \\",)),
        ("prompts= two spaces  ", (" two spaces  ",)),
        ("prompts=5", ("5",)),
        ("prompts=true", ("true",)),
        ("prompts='null'", ("null",)),
        ("prompts=null", ()),
        ("prompts=[1,2,3]", ((1, 2, 3),)),
        ("prompts=[[1,2],[3],a]", ((1, 2), (3,), "a")),
        ("prompts=a\nb", ("a\nb",)),
        ('prompts="costs ${device}"', ("costs ${device}",)),
        ("prompts='an escaped \\${x}'", ("an escaped ${x}",)),
        ('prompts=["${nope}",[5,6],"\\"quoted\\""]', ("${nope}", (5, 6), '"quoted"')),
    ],
)
def test_prompts_as_they_are_typed(registry: Registry, typed: str, prompts: tuple[Any, ...]) -> None:
    options = compose([typed], registry).options
    assert isinstance(options, GenerateOptions)
    assert options.prompts == prompts


def test_stop_is_one_string_or_several(registry: Registry) -> None:
    for typed, stop in [
        ("stop=\n\n", ("\n\n",)),
        ("stop=[a,'b c']", ("a", "b c")),
        ('stop=["\n", "a"]', ("\n", "a")),
        ("stop=\\nabla", ("\\nabla",)),
        ("stop=null", ()),
        ("stop=.", (".",)),
    ]:
        options = compose([typed], registry).options
        assert isinstance(options, GenerateOptions)
        assert options.stop == stop


def test_any_text_survives_quoting(registry: Registry) -> None:
    rng = random.Random(0)
    texts = ["".join(rng.choice("a\\\"'${},:\n[]~=+?é ") for _ in range(rng.randint(1, 12))) for _ in range(300)]
    options = compose([f"prompts=[{','.join(map(quote, texts))}]"], registry).options
    assert isinstance(options, GenerateOptions)
    assert options.prompts == tuple(texts)


def test_prompts_from_two_places_are_refused(registry: Registry) -> None:
    with pytest.raises(ConfigError, match="leave one out"):
        compose(["prompts=a", "prompts_file=b"], registry)


def test_each_mode_has_its_keys_and_defaults(registry: Registry) -> None:
    chat = compose(["system=Be brief, please", "max_tokens=5"], registry, mode="chat")
    assert chat.options == ChatOptions(system="Be brief, please", max_tokens=5)
    assert chat.mode == "chat"
    assert compose(["mode=chat", "top_k=3"], registry).options == ChatOptions(top_k=3)
    with pytest.raises(ConfigError, match="prompts is a key of mode generate, not of mode chat"):
        compose(["prompts=a"], registry, mode="chat")


def test_sampling_options_become_sampling_params(registry: Registry) -> None:
    shape = "structured_outputs={json: {type: object, properties: {a: {enum: [x, 1]}}}, disable_any_whitespace: true}"
    for typed, asked in (
        (["structured_outputs.choice=[yes,no]"], StructuredOutputsParams(choice=("yes", "no"))),
        ([shape], StructuredOutputsParams(
            json={"type": "object", "properties": {"a": {"enum": ("x", 1)}}}, disable_any_whitespace=True)),
        (["structured_outputs.regex=[A-Z]{2,3}"], StructuredOutputsParams(regex="[A-Z]{2,3}")),
        (["structured_outputs.regex=\\d+ (a|b), ${c}"], StructuredOutputsParams(regex="\\d+ (a|b), ${c}")),
        (["structured_outputs.regex=a", "structured_outputs.grammar=null"], StructuredOutputsParams(regex="a")),
        (["structured_outputs.regex='[A-Z]{2,3}'"], StructuredOutputsParams(regex="[A-Z]{2,3}")),
        (['structured_outputs.grammar=root ::= "a" | "b"'], StructuredOutputsParams(grammar='root ::= "a" | "b"')),
        (['structured_outputs.json={"type": "integer"}'], StructuredOutputsParams(json='{"type": "integer"}')),
        (["structured_outputs.json={type: integer}"], StructuredOutputsParams(json={"type": "integer"})),
        ([], None),
    ):  # fmt: skip
        assert compose(typed, registry).options.sampling_params().structured_outputs == asked
    assert compose(["bad_words=a"], registry).options.sampling_params().bad_words == ["a"]
    with pytest.raises(ConfigError, match="structured_outputs: regex=''"):
        compose(["structured_outputs.regex= "], registry).options.sampling_params()
    with pytest.raises(ConfigError, match="structured_outputs: there is no 'regx'"):
        compose(["structured_outputs.regx=a"], registry).options.sampling_params()
    options = compose(["temperature=0.5", "stop=x", "top_k=4", "stop_token_ids=[1,2]"], registry).options
    assert isinstance(options, GenerateOptions)
    params = options.sampling_params(logprobs=2)
    assert (params.temperature, params.stop, params.top_k, params.stop_token_ids) == (0.5, ["x"], 4, [1, 2])
    assert (params.max_tokens, params.logprobs, params.seed) == (100, 2, None)


@pytest.mark.parametrize("mode", ["generate", "chat"])
def test_penalties_have_the_defaults_of_sampling_params_and_reach_them(registry: Registry, mode: str) -> None:
    def penalties(*typed: str) -> tuple[float, float, float]:
        options = compose(typed, registry, mode=mode).options
        assert isinstance(options, SamplingOptions)
        p = options.sampling_params()
        return p.presence_penalty, p.frequency_penalty, p.repetition_penalty

    default = SamplingParams()
    assert penalties() == (default.presence_penalty, default.frequency_penalty, default.repetition_penalty)
    assert penalties("presence_penalty=0.5", "frequency_penalty=-2", "repetition_penalty=1.3") == (0.5, -2, 1.3)


@pytest.mark.parametrize(
    "typed",
    [
        "temperature=-1", "top_p=0", "top_p=1.1", "max_tokens=0", "min_p=2", "top_k=-2", "presence_penalty=2.1",
        "presence_penalty=-3", "frequency_penalty=2.5", "frequency_penalty=-2.1", "repetition_penalty=0",
        "repetition_penalty=-1",
    ],
)  # fmt: skip
def test_sampling_values_out_of_range_are_refused_as_in_python(registry: Registry, typed: str) -> None:
    options = compose([typed], registry).options
    assert isinstance(options, GenerateOptions)
    name, _, value = typed.partition("=")
    with pytest.raises(RequestError) as python:
        SamplingParams(**{name: type(getattr(options, name))(value)})
    with pytest.raises(ConfigError) as refused:
        options.sampling_params()
    assert str(refused.value) == str(python.value)
    assert str(refused.value).startswith(name)


# --------------------------------------------------------------------------- plugins


def test_a_component_alone_is_an_option_and_its_options_are_its_own(fake_plugin: FakePlugin) -> None:
    fake_plugin("minivllm-fast", BACKEND.format(name="fast"))
    registry = load_plugins()
    for typed in (
        ["attention=fast", "+attention.options.window=3"],
        ["attention=fast", "attention.options.window=3"],
        ["attention=fast", "attention.options={window: 3}"],
        ["attention.name=fast", "++attention.options={window: 3}"],
    ):
        attention = compose(typed, registry).engine.attention
        assert (attention.name, attention.options) == ("fast", {"window": 3})
    assert compose(["attention.decode=fast", "attention=torch"], registry).engine.attention.decode == "fast"
    with pytest.raises(ConfigError, match=r"attention.options.windw: fast has no such option. Did you mean window"):
        compose(["attention=fast", "attention.options.windw=3"], registry)


MODEL = """
    from dataclasses import dataclass, field
    from pathlib import Path
    from minivllm.plugins import ConfigOption, ModelComponent, Component, hookimpl

    @dataclass
    class Shape:
        repo: str = "mistralai/Mistral-7B-v0.3"
        hf_config: dict = field(default_factory=lambda: {"hidden_size": 4096})

    @hookimpl
    def minivllm_models():
        yield ModelComponent("mistral", "x:Y", architectures=("MistralForCausalLM",), aliases=("mixtral",))
        yield ModelComponent("bare", "x:Y", architectures=("BareForCausalLM",))

    @hookimpl
    def minivllm_schedulers():
        yield Component("lifo", "x:Y", options=("depth",), aliases=("stack",))

    @hookimpl
    def minivllm_configs():
        yield ConfigOption("model", "mistral", Shape())
        yield ConfigOption("model", "mistral-small", {"name": "mistral", "repo": "mistralai/Small"})
        yield ConfigOption("model", "from-file", Path(__file__).with_name("option.yaml"))
        yield ConfigOption("scheduler", "deep", {"name": "lifo", "max_num_seqs": 3, "options": {"depth": 9}})
        yield ConfigOption("model", "bad-file", Path(__file__).with_name("bad.yaml"))
        yield ConfigOption("model", "bad-key", {"repoo": "x"})
        yield ConfigOption("scheduler", "bad-type", {"max_num_seqs": "many"})
        yield ConfigOption("model", "bad-reference", {"path": "${nope}"})
        yield ConfigOption("scheduler", "bad-range", {"name": "mixed", "max_num_seqs": 0})
"""


@pytest.fixture
def with_mistral(fake_plugin: FakePlugin, tmp_path: Path) -> Registry:
    (tmp_path / "site" / "option.yaml").write_text("repo: a/b\nhf_config: {hidden_size: 8}\n")
    (tmp_path / "site" / "bad.yaml").write_text("repo: [")
    fake_plugin("minivllm-mistral", MODEL)
    registry = load_plugins()
    assert registry.reports == ()
    return registry


def test_a_plugins_config_options_work_like_ours(with_mistral: Registry) -> None:
    def engine(*typed: str) -> EngineConfig:
        return compose(list(typed), with_mistral).engine

    model = engine("model=mistral", "model.hf_config.hidden_size=64", "load_format=dummy").model
    assert (model.name, model.repo, model.hf_config) == ("mistral", "mistralai/Mistral-7B-v0.3", {"hidden_size": 64})
    assert engine("model=mistral-small").model.repo == "mistralai/Small"
    assert engine("model=from-file").model.hf_config == {"hidden_size": 8}
    assert engine("model=bare", "model.path=/x").model.name == "bare"
    assert engine("model=mixtral", "model.path=/x").model.name == "mistral"
    scheduler = engine("scheduler=deep").scheduler
    assert (scheduler.name, scheduler.max_num_seqs, scheduler.options) == ("lifo", 3, {"depth": 9})
    assert engine("scheduler=stack").scheduler.name == "lifo"
    assert compose_engine_config("mistralai/Small", registry=with_mistral).model.name == "mistral"
    with pytest.raises(ConfigError, match="model=bare names no checkpoint"):
        engine("model=bare")


def test_a_plugins_bad_option_is_told_with_its_name_and_only_when_chosen(with_mistral: Registry) -> None:
    for typed, told in [
        ("model=bad-file", "model=bad-file of minivllm-mistral 1.0 does not fit the schema: while parsing"),
        ("model=bad-key", "model=bad-key of minivllm-mistral 1.0 does not fit the schema: .*repoo"),
        ("scheduler=bad-type", "scheduler=bad-type of minivllm-mistral 1.0 does not fit the schema: .*many"),
        ("scheduler=bad-range", "scheduler.max_num_seqs=0"),
        (
            "model=bad-reference",
            "model.path: .*'nope' not found, in the option model=bad-reference of minivllm-mistral",
        ),
    ]:
        with pytest.raises((PluginError, ConfigError), match=told):
            compose([typed], with_mistral)
    compose([], with_mistral)
    with pytest.raises(ConfigError, match=r"^max_model_len: .*'nope' not found$"):
        compose(["model=bad-reference", "model.path=/x", "max_model_len=${nope}"], with_mistral)


# --------------------------------------------------------------------------- from Python


def test_the_model_argument_is_an_option_a_folder_or_a_repository(registry: Registry, tmp_path: Path) -> None:
    def model(value: Any) -> Any:
        return compose_engine_config(value, registry=registry).model

    assert model("qwen3-8b").repo == "Qwen/Qwen3-8B"
    assert model("Qwen/Qwen3-8B").name == "qwen3-8b"
    assert model("qwen/qwen3-8b").hf_config["hidden_size"] == 4096
    generic = model("someone/Some_Model.v2")
    assert (generic.name, generic.repo, generic.hf_config) == ("checkpoint", "someone/Some_Model.v2", {})
    assert model(tmp_path).path == str(tmp_path)
    for missing in ("./nowhere", "/no/such/folder"):
        with pytest.raises(ConfigError, match="no such folder"):
            model(missing)
    with pytest.raises(ConfigError, match="Did you mean demo"):
        model("dem")


def test_vllms_keywords_are_understood(registry: Registry) -> None:
    config = compose_engine_config(
        "demo", tensor_parallel_size=2, max_model_len=64, enforce_eager=True, gpu_memory_utilization=0.5,
        max_num_seqs=3, max_num_batched_tokens=99, enable_prefix_caching=False, block_size=32, seed=7,
        load_format="dummy", revision="main", tokenizer="x, y", trust_remote_code=False, dtype="half", device="cpu",
        num_gpu_blocks_override=11, quantization="fp8", kv_cache_dtype="fp8_e4m3", max_num_partial_prefills=2,
        registry=registry,
    )  # fmt: skip
    assert (config.tp, config.max_model_len, config.enforce_eager, config.seed) == (2, 64, True, 7)
    assert (config.cache.gpu_memory_utilization, config.cache.block_size, config.cache.num_blocks) == (0.5, 32, 11)
    assert (config.quantization, config.cache.dtype) == ("fp8", "fp8")
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (3, 99)
    assert config.scheduler.max_num_partial_prefills == 2
    assert config.cache.enable_prefix_caching is False
    assert (config.dtype, config.device, config.load_format) == ("float16", "cpu", "dummy")
    assert (config.model.revision, config.model.tokenizer) == ("main", "x, y")


def test_vllms_keywords_may_ask_for_nothing(registry: Registry) -> None:
    plain = compose_engine_config("demo", registry=registry)

    def values(allowed: Any) -> list[Any]:
        if isinstance(allowed, type):
            return [allowed(4), allowed(0)]
        return [*allowed] if isinstance(allowed, range) else [allowed]

    given = [(name, value) for name, (neutral, _) in NEUTRAL.items() for one in neutral for value in values(one)]
    given += [(name, value) for name in {*NOT_HERE, *DEFAULTS} for value in (False, 0, "", {}, [])]
    given += DEFAULTS.items()
    for name, value in given:
        assert check_neutral(name, value)
    nones = dict.fromkeys(["device", "dtype", *NEUTRAL, *NOT_HERE, *DEFAULTS, *VLLM_NAMES, *NEGATED, *SAME_NAMES])
    assert compose_engine_config("demo", registry=registry, **nones) == plain
    assert compose_engine_config("demo", registry=registry, **dict(given)) == plain
    assert compose_engine_config("demo", registry=registry, max_model_len=-1) == plain
    assert not NOT_HERE & NEUTRAL.keys() and not (NOT_HERE | NEUTRAL.keys()) & DEFAULTS.keys()


def test_vllms_defaults_may_be_typed(registry: Registry) -> None:
    typed = {
        "all2all_backend": "allgather_reducescatter", "block_size": None, "cp_kv_cache_interleave_size": 1,
        "cpu_offload_gb": 0, "data_parallel_size_local": 1, "dbo_decode_token_threshold": 32,
        "dbo_prefill_token_threshold": 512, "decode_context_parallel_size": 1, "disable_log_requests": False,
        "disable_log_stats": False, "enable_log_requests": False, "expert_placement_strategy": "linear",
        "gpu_memory_utilization": 0.9, "ignore_patterns": ["original/**/*"], "kv_cache_dtype": "auto",
        "kv_offloading_backend": "native", "linear_backend": "auto", "logprobs_mode": "raw_logprobs",
        "long_prefill_token_threshold": 0, "mamba_cache_dtype": "auto", "mamba_cache_mode": "none",
        "mamba_ssm_cache_dtype": "auto", "max_logprobs": 20, "max_long_partial_prefills": 1,
        "max_num_partial_prefills": 1, "mm_encoder_tp_mode": "weights", "mm_processor_cache_gb": 4,
        "mm_processor_cache_type": "lru", "mm_shm_cache_max_object_size_mb": 128, "moe_backend": "auto",
        "numa_bind": False, "offload_backend": "auto", "offload_num_in_group": 1, "offload_params": set(),
        "optimization_level": 2, "prefill_context_parallel_size": 1, "prefix_caching_hash_algo": "sha256",
        "pt_load_map_location": "cpu", "renderer_num_workers": 1, "rope_scaling": {},
        "safetensors_load_strategy": "lazy", "scheduler_reserve_full_isl": True, "shutdown_timeout": 0, "swap_space": 4,
        "tensor_parallel_size": 1, "tokenizer_mode": "auto", "watermark": 0.0, "worker_cls": "auto",
    }  # fmt: skip
    assert compose_engine_config("demo", registry=registry, **typed) == compose_engine_config("demo", registry=registry)


def test_limits_of_adapters(registry: Registry) -> None:
    """Without adapters only their defaults, which code written for vLLM may name."""
    usual = compose_engine_config("demo", registry=registry)
    typed = {"enable_lora": False, "max_loras": 1, "max_lora_rank": 16, "max_cpu_loras": None}
    assert compose_engine_config("demo", registry=registry, **typed) == usual
    typed = {"max_loras": 4, "max_lora_rank": 64, "max_cpu_loras": 8, "overrides": ["enable_lora=true"]}
    config = compose_engine_config("demo", registry=registry, **typed)
    assert (config.enable_lora, config.max_loras, config.max_lora_rank) == (True, 4, 64)


def test_a_tokenizer_may_be_an_options(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for typed, meant in {"qwen3": "Qwen/Qwen3-0.6B", "demo": "demo", "a/b": "a/b", "checkpoint": "checkpoint"}.items():
        assert compose_engine_config("demo", tokenizer=typed, registry=registry).model.tokenizer == meant
    (tmp_path / "qwen3").mkdir()  # who typed it before there was such an option means it
    assert compose_engine_config("demo", tokenizer="qwen3", registry=registry).model.tokenizer == "qwen3"


def test_vllms_executors_and_switches(registry: Registry) -> None:
    for theirs, ours in {"mp": "multiproc", "uni": "single", None: "auto"}.items():
        config = compose_engine_config("demo", distributed_executor_backend=theirs, registry=registry)
        assert config.executor.name == ours
    for disabled in (True, False):
        config = compose_engine_config("demo", disable_cascade_attn=disabled, registry=registry)
        assert config.attention.cascade is not disabled


def test_vllms_attention_backends(registry: Registry) -> None:
    class TheirEnum(Enum):
        FLASH_ATTN = "some.module.Class"

    for theirs, ours in {
        "FLASH_ATTN": "flash", "flash_attn": "flash", TheirEnum.FLASH_ATTN: "flash", "FLASHINFER": "flashinfer",
        "TRITON_ATTN": "triton", "TORCH_SDPA": "torch", "CPU_ATTN": "torch", "auto": "auto", None: "auto",
        "hopper": "hopper",
    }.items():  # fmt: skip
        config = compose_engine_config("demo", attention_backend=theirs, registry=registry)
        assert config.attention.name == ours


def test_a_torch_dtype_will_do(registry: Registry) -> None:
    torch = pytest.importorskip("torch")
    assert compose_engine_config(dtype=torch.bfloat16, registry=registry).dtype == "bfloat16"
    assert compose_engine_config(device=torch.device("cpu"), registry=registry).device == "cpu"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"fully_sharded_loras": True}, "fully_sharded_loras=True: not supported. Allowed: False"),
        ({"lora_dtype": "float16"}, "lora_dtype='float16': adapters are kept in dtype. Allowed: 'auto'"),
        ({"max_loras": 4}, r"max_loras=4: .* add enable_lora=true \(in Python: True\), or leave max_loras out"),
        ({"enable_lora": False, "max_lora_rank": 64}, "max_lora_rank=64: the engine would have no adapters of single"),
        ({"overrides": ["max_loras=4"]}, "max_loras=4: the engine would have no adapters of single requests"),
        ({"max_cpu_loras": 4}, "max_cpu_loras=4: .* add enable_lora=true .* or leave max_cpu_loras out"),
        ({"max_cpu_loras": -3, "enable_lora": True}, "max_cpu_loras=-3 is not a whole number from 1 on; leave it out"),
        ({"max_cpu_loras": "4", "enable_lora": True}, "max_cpu_loras='4' is not a whole number from 1 on"),
        ({"lora": "x"}, r"type overrides=\['model.lora=x'\]"),
        ({"overrides": ["lora.path=x"]}, "there is no key lora.path. With enable_lora=true .*model.lora=DIR merges"),
        ({"runner": "pooling"}, "Allowed: 'auto', 'generate'"),
        ({"hf_token": "x"}, "set HF_TOKEN. Allowed: None"),
        ({"distributed_executor_backend": "mpi"}, "no such executor. Allowed: external_launcher, mp, ray, uni"),
        ({"distributed_executor_backend": ["mp"]}, r"\['mp'\]: there is no such executor. Allowed: external_launcher"),
        ({"kv_cache_dtype": ["fp8"]}, r"cache.dtype is one of auto, fp8, not .*\['fp8'\]"),
        ({"load_format": {}}, r"load_format is one of auto, dummy, not .*\{\}"),
        ({"gpu_memory_utilization": float("nan")}, "cache.gpu_memory_utilization=nan is out of range"),
        ({"seed": float("nan")}, "seed is a whole number, not nan"),
        ({"attention_backend": "XFORMERS"}, "XFORMERS: there is no such attention backend. Allowed: auto, flash"),
        ({"attention_backend": 5}, "attention=5: there is no such attention backend"),
        ({"attention": "flash", "attention_backend": "TORCH_SDPA"}, "contradicts attention='flash'"),
        ({"quantization": "awq"}, 'quantization="awq": quantization is one of none, fp8, not "awq"'),
        ({"max_model_length": 5}, r"Did you mean max_model_len\? overrides=\['KEY=VALUE'\] sets any key; .*--help"),
        ({"max_logprobs": 21}, "max_logprobs=21 is too large: the most is 20"),
        ({"served_model_name": "x"}, "it is a key of mode serve"),
        ({"compilation_config": {"cudagraph_mode": "FULL"}}, r"type enforce_eager or .*Allowed: \{\}, a whole number"),
        ({"guided_decoding_backend": "outlines"}, "give StructuredOutputsParams. Allowed: 'auto', 'guidance'"),
        ({"swap_space": "4"}, "computed again, not swapped. Allowed: a whole number, a number"),
        ({"worker_extension_cls": "a.B"}, "worker_extension_cls='a.B': not supported; leave it out. Allowed: None"),
        ({"moe_backend": "triton"}, "moe_backend='triton': not supported; leave it out. Allowed: 'auto'"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size=2: not supported; .* Allowed: 1"),
        ({"numa_bind": True}, "numa_bind=True: not supported; leave it out. Allowed: None"),
        ({"enable_log_requests": True}, "type `minivllm serve log_requests=true`. Allowed: False"),
        ({"spec_method": "ngram"}, "type speculative_config="),
        ({"max_model_len": -2}, "max_model_len=-2 is too small"),
        ({"num_blocks": 5}, r"type overrides=\['cache.num_blocks=5'\]"),
        ({"packed_weights": True}, r"type overrides=\['packed_weights=true'\]"),
        ({"swap_spaces": 4}, "there is no such keyword"),
        ({"max_tokens": 5}, r"LLM\(max_tokens=5\): .*: generate\(prompts, SamplingParams\(max_tokens=5\)\)"),
        ({"max_num_seqs": 0}, "scheduler.max_num_seqs=0 is too small"),
        ({"tp": 2, "tensor_parallel_size": 4}, "contradicts tp=2"),
        ({"attention": "flsh"}, "Did you mean flash"),
        ({"attention": "a,b"}, "one attention at a time"),
        ({"attention": ""}, "the value is missing"),
        ({"device": "cuda:1"}, "one of auto, cuda, cpu"),
        ({"overrides": ["tpp=2"]}, "there is no key tpp"),
        ({"overrides": ["prompts=hi"]}, "prompts is a key of mode generate, not of an engine's overrides"),
        ({"overrides": ["mode=chat"]}, "an engine has no mode"),
        ({"overrides": "tp=2"}, r"overrides=\['tp=2'\]"),
        ({"overrides": [5]}, r"overrides has 5 in it, which is not a string; type overrides=\['KEY=VALUE'\]"),
        ({"overrides": 5}, r"overrides=5 is not a list; type overrides=\['KEY=VALUE'\]"),
        (
            {"overrides": {"seed": 5, "enforce_eager": True}},
            r"is a mapping; it takes a list: overrides=\['seed=5', 'enforce_eager=true'\]",
        ),
    ],
)
def test_refusals_in_python(registry: Registry, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(MinivllmError, match=told):
        compose_engine_config(registry=registry, **arguments)


def test_overrides_come_last(registry: Registry) -> None:
    config = compose_engine_config(attention="triton", tp=2, overrides=["attention=torch", "tp=3"], registry=registry)
    assert (config.attention.name, config.tp) == ("torch", 3)
    config = compose_engine_config(tensor_parallel_size=2, overrides=(o for o in ["tp=3"]), registry=registry)
    assert config.tp == 3


def test_no_overrides_may_be_none(registry: Registry) -> None:
    assert compose_engine_config(overrides=None, registry=registry) == compose_engine_config(registry=registry)


def test_conf_holds_what_the_modes_need() -> None:
    folder = conf_dir()
    assert {f.stem for f in (folder / "mode").glob("*.yaml")} == set(MODES)
    assert (folder / "model" / "demo.yaml").is_file()
