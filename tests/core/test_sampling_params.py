"""vLLM's names and defaults; what cannot be used is refused with the value, the limit and the way out."""

from __future__ import annotations

import inspect
import math
import pickle
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import pytest

from minivllm import SamplingParams
from minivllm.core.outputs import CompletionOutput, RequestOutput
from minivllm.core.sampling_params import RequestOutputKind
from minivllm.errors import RequestError


def test_the_defaults_are_vllms() -> None:
    defaults = {f.name: getattr(SamplingParams(), f.name) for f in fields(SamplingParams)}
    assert defaults == {
        "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
        "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": [], "stop_token_ids": [], "bad_words": [],
        "ignore_eos": False, "max_tokens": 16, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None,
        "detokenize": True, "skip_special_tokens": True, "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False, "output_kind": RequestOutputKind.CUMULATIVE, "logit_bias": None,
        "allowed_token_ids": None, "structured_outputs": None, "logits_processors": None,
        "truncate_prompt_tokens": None, "extra_args": None, "flat_logprobs": False,
    }  # fmt: skip


def test_what_vllm_takes_for_something_else() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(logprobs=True).logprobs == 1


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    # the values, and what the message must say: value, limit, way out
    ({"n": 0}, ["n=0", "less than 1"]),
    ({"n": 1.5}, ["n=1.5", "whole number"]),
    ({"n": 16385}, ["n=16385", "more than 16384"]),
    ({"temperature": 1e39}, ["temperature=1e+39", "at most 3.4e+38"]),
    ({"temperature": 10**400}, ["temperature=1000", "at most 3.4e+38"]),
    ({"logit_bias": {"9" * 5000: 1.0}}, ["logit_bias: token id='9999", "whole number"]),
    ({"bad_words": np.array([1])}, ["bad_words=[", "more than white space"]),
    ({"structured_outputs": [[["a"] * 500]]}, ["structured_outputs=[[['a'", "…", "not a StructuredOutputsParams"]),
    ({"stop": 5}, ["stop=5", "not a list"]),
    ({"stop_token_ids": 5}, ["stop_token_ids=5", "not a list"]),
    ({"skip_special_tokens": "no"}, ["skip_special_tokens='no'", "neither True nor False"]),
    ({"ignore_eos": None}, ["ignore_eos=None", "neither True nor False"]),
    ({"output_kind": "x"}, ["output_kind='x'", "not a RequestOutputKind"]),
    ({"temperature": -0.5}, ["temperature=-0.5", "at least 0", "0 is greedy"]),
    ({"temperature": math.inf}, ["temperature=inf", "at least 0"]),
    ({"temperature": math.nan}, ["temperature=nan", "not a number"]),
    ({"temperature": "hot"}, ["temperature='hot'", "not a number"]),
    ({"temperature": True}, ["temperature=True", "not a number"]),
    ({"top_p": 0}, ["top_p=0", "more than 0", "at most 1", "1 keeps every token"]),
    ({"top_p": 1.01}, ["top_p=1.01", "more than 0", "at most 1"]),
    ({"top_p": -1}, ["top_p=-1", "more than 0"]),
    ({"min_p": -0.1}, ["min_p=-0.1", "at least 0", "at most 1", "0 keeps every token"]),
    ({"min_p": 1.1}, ["min_p=1.1", "at most 1"]),
    ({"top_k": -2}, ["top_k=-2", "less than -1", "0 or -1 keeps every token"]),
    ({"top_k": 0.5}, ["top_k=0.5", "whole number"]),
    ({"max_tokens": 0}, ["max_tokens=0", "less than 1", "for no limit: None in Python, null elsewhere"]),
    ({"max_tokens": -3}, ["max_tokens=-3", "less than 1"]),
    ({"min_tokens": -1}, ["min_tokens=-1", "less than 0"]),
    ({"min_tokens": 17}, ["min_tokens=17", "max_tokens=16"]),
    ({"logprobs": -1}, ["logprobs=-1", "less than 0", "0 to 20; -1, all of the vocabulary, is not supported"]),
    ({"logprobs": 21}, ["logprobs=21", "20"]),
    ({"seed": "x"}, ["seed='x'", "whole number"]),
    ({"seed": np.array([1, 2])}, ["seed=array([1, 2])", "whole number"]),
    ({"stop_token_ids": [np.array([1, 2])]}, ["stop_token_ids=array([1, 2])", "whole number"]),
    ({"ignore_eos": np.array([1, 2])}, ["ignore_eos=array([1, 2])", "neither True nor False"]),
    ({"extra_args": [1]}, ["extra_args=[1]", "mapping"]),
    ({"extra_args": {1: 2}}, ["extra_args={1: 2}", "mapping"]),
    ({"flat_logprobs": True}, ["flat_logprobs=True", "not supported yet"]),
    ({"seed": -(2**63) - 1}, ["seed=", "less than"]),
    ({"seed": 2**64}, ["seed=18446744073709551616 is more than 18446744073709551615"]),
    ({"stop": {"a": 1}}, ["stop={'a': 1} is not a list; type ['a']"]),
    ({"stop": ["a", "b\ud800"]}, ["stop: 'b\\ud800' contains a lone surrogate, '\\ud800', at index 1", "leave it out"]),
    ({"logit_bias": {"5": 1, 5: 2}}, ["logit_bias={'5': 1, 5: 2} names a token twice"]),
    ({"stop": ""}, ["stop=['']", "at least one character"]),
    ({"stop": ["a", 3]}, ["stop=['a', 3]", "at least one character"]),
    ({"stop": "a", "detokenize": False}, ["detokenize=True", "stop_token_ids"]),
    ({"stop_token_ids": [-1]}, ["stop_token_ids=-1", "less than 0"]),
    ({"stop_token_ids": ["a"]}, ["stop_token_ids='a'", "whole number"]),
    ({"presence_penalty": 2.1}, ["presence_penalty=2.1", "at least -2 and at most 2", "0 is none"]),
    ({"frequency_penalty": -3}, ["frequency_penalty=-3", "at least -2 and at most 2", "0 is none"]),
    ({"repetition_penalty": 0}, ["repetition_penalty=0", "more than 0", "1 is none"]),
    ({"prompt_logprobs": 21}, ["prompt_logprobs=21", "more than 20"]),
    ({"prompt_logprobs": -1}, ["prompt_logprobs=-1", "less than 0", "-1, all of the vocabulary, is not supported"]),
    ({"logit_bias": [1]}, ["logit_bias=[1]", "mapping from token ids"]),
    ({"logit_bias": {"x": 1}}, ["logit_bias: token id='x'", "whole number"]),
    ({"logit_bias": {-1: 1}}, ["logit_bias: token id=-1", "less than 0"]),
    ({"logit_bias": {1: "a"}}, ["logit_bias: 1='a'", "not a number"]),
    ({"logit_bias": {1: -1e31}}, ["logit_bias: 1=-1e+31", "at least -1e+30"]),
    ({"allowed_token_ids": 5}, ["allowed_token_ids=5", "not a list"]),
    ({"allowed_token_ids": []}, ["allowed_token_ids=[]", "leaves no token"]),
    ({"allowed_token_ids": [3, -1]}, ["allowed_token_ids=-1", "less than 0"]),
    ({"bad_words": "x"}, ["bad_words='x'", "not a list", "type ['x']"]),
    ({"structured_outputs": object}, ["structured_outputs=", "StructuredOutputsParams", 'like {"json": {...}}']),
    ({"logits_processors": [print]}, ["logits_processors=", "not supported yet"]),
    ({"truncate_prompt_tokens": 5}, ["truncate_prompt_tokens=5", "not supported yet"]),
    ({"truncate_prompt_tokens": []}, ["truncate_prompt_tokens=[]", "leave it at None"]),
    ({"flat_logprobs": []}, ["flat_logprobs=[]", "leave it at False"]),
    ({"spaces_between_special_tokens": False}, ["spaces_between_special_tokens=False", "leave it at True"]),
    ({"spaces_between_special_tokens": "no"}, ["spaces_between_special_tokens='no'", "leave it at True"]),
    ({"max_token": 3}, ["SamplingParams(max_token=3): there is no such keyword", "Did you mean max_tokens?"]),
    ({"max_new_tokens": 3}, ["max_new_tokens=3", "Did you mean max_tokens?"]),
    ({"num_return_sequences": 3}, ["Did you mean n?"]),
    ({"best_of": 3, "n": 2}, ["best_of=3", "all n=2 are returned"]),
    ({"guided_decoding": {"json": {}}}, ["not supported", "type structured_outputs=StructuredOutputsParams(...)"]),
    ({"use_beam_search": True}, ["use_beam_search=True is not supported", "n draws several"]),
    ({"length_penalty": 0.5}, ["length_penalty=0.5 is not supported"]),
    ({"thinking_token_budget": 9, "zzz": None}, ["thinking_token_budget=9 is not supported", "max_tokens limits"]),
]


NOTHING: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1), "guided_decoding": (None,), "use_beam_search": (None, False), "length_penalty": (1, 1.0),
    "early_stopping": (False,), "thinking_token_budget": (None,), "repetition_detection": (None,),
    "logprob_token_ids": (None,), "skip_reading_prefix_cache": (None, False), "stream_interval": (None,),
    "skip_clone": (False, True),
}  # fmt: skip


def test_vllms_other_keywords_may_ask_for_nothing() -> None:
    for name, values in NOTHING.items():
        for value in values:
            assert SamplingParams(**{name: value}, top_k=3) == SamplingParams(top_k=3)
    assert SamplingParams(3, best_of=3) == SamplingParams(n=3, best_of=3) == SamplingParams(n=3)
    assert SamplingParams(**{name: values[0] for name, values in NOTHING.items()}) == SamplingParams()


def test_none_is_the_default_for_from_optional() -> None:
    nones = dict.fromkeys([f.name for f in fields(SamplingParams)])
    assert SamplingParams.from_optional(**nones) == SamplingParams(max_tokens=None), "there it is a value"
    assert SamplingParams.from_optional(n=2, top_p=None, guided_decoding=None) == SamplingParams(n=2)
    for value in (0.5, None):
        with pytest.raises(RequestError, match="Did you mean top_p"):
            SamplingParams.from_optional(topp=value)
    assert SamplingParams.from_optional(logit_bias={"5": 1000, 6: -101, 7: 3}).logit_bias == {5: 100, 6: -100, 7: 3}


def test_it_is_a_plain_dataclass() -> None:
    params = SamplingParams(n=2, seed=3, stop=["a"])
    assert pickle.loads(pickle.dumps(params)) == replace(params) == SamplingParams(**asdict(params)) == params
    assert not hasattr(params, "__dict__")
    assert list(inspect.signature(SamplingParams).parameters) == [f.name for f in fields(params)]
    for wrong in (range(99), [params] * 2):
        with pytest.raises(TypeError, match=r"positional arguments|multiple values"):
            SamplingParams(*wrong, n=3)  # type: ignore[arg-type, misc]


@pytest.mark.parametrize("values,words", REFUSED, ids=lambda v: str(v)[:40] if isinstance(v, dict) else "")
def test_a_refusal_names_the_value_the_limit_and_the_way_out(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**values)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 100.0},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"min_p": 1},
        {"top_k": -1},
        {"max_tokens": 1},
        {"max_tokens": None, "min_tokens": 5},
        {"min_tokens": 16},
        {"logprobs": 0},
        {"logprobs": 20},
        {"seed": -5},
        {"seed": 2**63 - 1},
        {"stop": "end"},
        {"stop": ("a", "b")},
        {"stop_token_ids": (0, 5)},
        {"bad_words": []},
        {"logit_bias": {}},
        {"logit_bias": {"7": -100, 8: 1e30}},
        {"allowed_token_ids": (0, 1)},
        {"frequency_penalty": 0},
    ],
)
def test_values_at_their_limits_are_taken(values: dict[str, Any]) -> None:
    SamplingParams(**values)


def test_numpys_numbers_are_numbers() -> None:
    params = SamplingParams(
        seed=np.int64(5), max_tokens=np.int32(4), temperature=np.float32(0.5), stop_token_ids=np.array([5, 6])
    )  # type: ignore[arg-type]
    assert (type(params.seed), type(params.max_tokens)) == (int, int)
    assert params.stop_token_ids == [5, 6] and params.temperature == 0.5


def test_what_is_changed_later_is_judged_again() -> None:
    params = SamplingParams()
    params.top_p = 7.0
    with pytest.raises(RequestError, match="top_p=7"):
        params.verify()


def test_a_refusal_is_a_value_error_too() -> None:
    with pytest.raises(ValueError):
        SamplingParams(max_tokens=0)


def test_stop_is_a_list_of_strings() -> None:
    assert SamplingParams(stop="a").stop == ["a"]
    assert SamplingParams(stop=("a", "b")).stop == ["a", "b"]
    assert SamplingParams().stop == SamplingParams(stop=None).stop == []


def test_greedy_begins_where_vllms_does() -> None:
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_a_clone_differs_only_where_it_is_told() -> None:
    params = SamplingParams(n=2, stop=["x"], seed=4, top_k=3, stop_token_ids=[7])
    other = params.clone(top_k=9)
    assert other.top_k == 9 and other.clone(top_k=3) == params
    other.stop.append("y")
    other.stop_token_ids.append(8)
    assert params.stop == ["x"] and params.stop_token_ids == [7]
    with pytest.raises(RequestError):
        params.clone(n=0)


def test_a_number_that_python_does_not_write_is_refused() -> None:
    with pytest.raises(RequestError, match="top_p=<int> is out of range"):
        SamplingParams(top_p=10**5000)


def test_vllms_fields_of_what_is_not_here_are_none() -> None:
    completion = CompletionOutput(index=0, text="", token_ids=[])
    for name in ("routed_experts", "lora_request", "kv_transfer_params"):
        assert getattr(completion, name) is None
    output = RequestOutput("0", None, [1], [completion])
    for name in ("metrics", "lora_request", "encoder_prompt", "encoder_prompt_token_ids", "kv_transfer_params"):
        assert getattr(output, name) is None
