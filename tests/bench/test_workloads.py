"""The workloads are what the tables say they are, and what does not fit is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from minivllm.bench.workloads import check_fits, make_requests
from minivllm.config.compose import compose
from minivllm.config.modes import BenchOptions, WorkloadOptions
from minivllm.errors import ConfigError
from minivllm.plugins import default_registry

# What mixed is: the first prompt's length and first ids, the last prompt's last id; tokens in and out; the ids' sum.
FIRST = (964, [6311, 6890], 1958)
TOTALS = (142827, 133966)
CHECKSUM = 712773398


def options(*overrides: str) -> BenchOptions:
    found = compose(overrides, default_registry(), mode="bench").options
    assert isinstance(found, BenchOptions)
    return found


def workload(*overrides: str) -> WorkloadOptions:
    return options(*overrides).workload


def test_mixed_is_nano_vllms_to_the_token():
    state = random.getstate()
    try:
        random.seed(0)
        prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
        lengths = [random.randint(100, 1024) for _ in range(256)]
    finally:
        random.setstate(state)
    requests = make_requests(workload("workload=mixed"), 151936)
    assert [r.prompt for r in requests] == prompts
    assert [r.max_tokens for r in requests] == lengths
    # As literals, too, so that a change of Python's generator cannot pass unseen.
    assert (len(requests[0].prompt), requests[0].prompt[:2], requests[-1].prompt[-1]) == FIRST
    assert (sum(len(r.prompt) for r in requests), sum(r.max_tokens for r in requests)) == TOTALS
    assert sum(sum(r.prompt) for r in requests) == CHECKSUM
    assert workload("workload=mixed").temperature == 0.6 and workload("workload=mixed").ignore_eos


@pytest.mark.parametrize(
    ("name", "shape"),
    [("bs1", (1, 128, 512)), ("decode32", (32, 128, 512)), ("decode256", (256, 128, 512)), ("prefill", (64, 1024, 1))],
)
def test_fixed_workloads_have_the_shape_of_the_table(name, shape):
    requests = make_requests(workload(f"workload={name}"), 151936)
    assert {(len(requests), len(r.prompt), r.max_tokens) for r in requests} == {shape}


def test_keys_vary_a_workload():
    requests = make_requests(
        workload("workload=mixed", "workload.num_requests=9", "workload.output_len=[2,3]", "workload.max_token_id=5"),
        99,
    )
    assert len(requests) == 9 and {r.max_tokens for r in requests} <= {2, 3}
    assert max(max(r.prompt) for r in requests) == 5
    other = make_requests(workload("workload=mixed", "workload.seed=1"), 99)
    assert other[0].prompt != make_requests(workload("workload=mixed"), 99)[0].prompt


def test_requests_may_come_at_a_rate():
    at_once = make_requests(workload("workload=decode256"), 512)
    at_times = make_requests(workload("workload=decode256", "workload.request_rate=50"), 512)
    assert [replace(r, arrival=0.0) for r in at_times] == at_once
    arrivals = [r.arrival for r in at_times]
    gaps = [b - a for a, b in pairwise(arrivals)]
    assert arrivals[0] == 0 and min(gaps) > 0 and 0.75 < 50 * sum(gaps) / len(gaps) < 1.3
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(0.37, abs=0.1)  # 1/e of an exponential
    with pytest.raises(ConfigError, match=r"workload\.request_rate is not a key of workload=trace"):
        workload("workload=trace", "workload.path=x", "workload.request_rate=1")
    with pytest.raises(ConfigError, match=r"workload\.request_rate=0.* is out of range"):
        workload("workload=bs1", "workload.request_rate=0")


def test_prompts_begin_with_a_prefix_in_turn():
    plain = make_requests(workload("workload=mixed", "workload.num_requests=5"), 99)
    some = make_requests(
        workload("workload=mixed", "workload.num_requests=5", "workload.prefix_len=7", "workload.num_prefixes=2"), 99
    )
    assert [r.prompt[7:] for r in some] == [r.prompt for r in plain]
    assert [r.max_tokens for r in some] == [r.max_tokens for r in plain]
    prefixes = [tuple(r.prompt[:7]) for r in some]
    assert prefixes == [prefixes[0], prefixes[1]] * 2 + [prefixes[0]] and prefixes[0] != prefixes[1]
    (shape,) = {(r.prompt[0], len(r.prompt), r.max_tokens) for r in make_requests(workload("workload=prefix"), 99)}
    assert shape[1:] == (2048 + 128, 256)


def test_sampling_keys_are_those_of_every_request():
    keys = "top_k=20", "top_p=0.9", "frequency_penalty=0.5", "logprobs=2"
    options = workload("workload=bs1", *(f"workload.{key}" for key in keys))
    params = options.sampling_params(max_tokens=7)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 20, 0.9, 0.0)
    assert (params.frequency_penalty, params.logprobs, params.max_tokens, params.ignore_eos) == (0.5, 2, 7, True)
    plain = workload("workload=bs1").sampling_params()
    assert (plain.top_k, plain.top_p, plain.repetition_penalty, plain.logprobs) == (0, 1.0, 1.0, None)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("workload=bs1", "workload.top_p=1.5"), r"workload=bs1: top_p=1.5 is out of range"),
        (("workload=bs1", "workload.logprobs=99"), r"workload=bs1: logprobs=99 is more than 20"),
        (("workload=host", "workload.top_k=5"), r"workload.top_k is not a key of workload=host; leave it out"),
    ],
)
def test_sampling_keys_that_cannot_be_are_refused(keys, said):
    with pytest.raises(ConfigError, match=said):
        workload(*keys)


def test_ids_wrap_around_a_small_vocabulary():
    small, large = (make_requests(workload(), vocab) for vocab in (512, 100_000))
    assert [[t % 512 for t in r.prompt] for r in large] == [r.prompt for r in small]


def test_a_request_that_does_not_fit_is_refused_not_cut():
    options = workload("workload=prefill")
    requests = make_requests(options, 512)
    check_fits(options, requests, 1025)
    with pytest.raises(ConfigError, match=r"64 of 64 requests exceed max_model_len=1024.*1024 tokens in and 1 out"):
        check_fits(options, requests, 1024)
    options = workload("workload=prefix")
    with pytest.raises(ConfigError, match=r"2176 tokens in and 256 out. Lower workload.prefix_len \(.*=1664 fits\), "):
        check_fits(options, make_requests(options, 99), 2048)
    fitting = workload("workload=prefix", "workload.prefix_len=1664")
    check_fits(fitting, make_requests(fitting, 99), 2048)
    with pytest.raises(ConfigError, match=r"Lower workload.prefix_len, workload.input_len"):
        check_fits(options, make_requests(options, 99), 256)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["workload=mixd"], "Did you mean mixed"),
        (["workload.input_len=[3,2]"], "neither a whole number"),
        (["workload.num_prefixes=2"], "needs workload.prefix_len"),
        (["workload=host", "workload.num_adapters=2"], "not a key of workload=host"),
        (
            ["url=http://127.0.0.1:1", "workload.num_adapters=2"],
            "makes adapters for an engine of its own, and url= asks",
        ),
        (["workload.prefix_len=0"], "workload.prefix_len=0"),
        (["workload=trace", "workload.path=x", "workload.prefix_len=3"], "not a key of workload=trace"),
        (["workload.input_len=0"], "neither a whole number"),
        (["workload.output_len=[1,2,3]"], "neither a whole number"),
        (["workload.output_len=true"], "neither a whole number"),
        (["workload.num_requests=0"], "the least is 1"),
        (["workload.num_requests=null"], "lacks workload.num_requests"),
        (["workload.running=[1]"], "not a key of workload=quick"),
        (["workload=host", "workload.num_requests=3"], "not a key of workload=host"),
        (["workload=host", "workload.running=[0]"], "needs whole numbers from 1"),
        (["workload=host", "profile=true"], "it runs no model"),
        (["check=true"], "only workload=host has limits"),
        (["workload=host", "trace=true"], "it runs no model"),
        (["workload=host", "timeline=png"], "it runs no model"),
        (["trace=yes"], "trace=yes is neither false nor true nor a file whose name ends in .json"),
        (["profile=on"], "profile=on is neither false nor true nor gpu nor a file whose name ends in .json"),
        (["timeline=x.jpg"], "neither false nor true nor png nor a file whose name ends in .png"),
        (["workload.path=x.jsonl"], "workload.path is not a key of workload=quick"),
        (["workload=trace"], "workload=trace lacks workload.path"),
        (["workload=trace", "workload.path=x", "workload.input_len=3"], "not a key of workload=trace"),
    ],
)
def test_a_wrong_workload_is_refused_with_the_value(overrides, message):
    with pytest.raises(ConfigError, match=message):
        options(*overrides)


def test_workload_belongs_to_bench():
    with pytest.raises(ConfigError, match="workload is a key of mode bench, not of mode generate"):
        compose(["workload=mixed"], default_registry(), mode="generate")


# --------------------------------------------------------------------------- a file of requests


def trace(tmp_path: Path, *lines: str) -> WorkloadOptions:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return workload("workload=trace", f"workload.path={file}")


def test_a_trace_holds_lengths_texts_and_tokens_with_their_arrivals(tmp_path):
    options = trace(
        tmp_path,
        '{"arrival": 2.5, "prompt_token_ids": [7, 0, 9], "output_len": 4}',
        "",
        '{"input_len": 20, "output_len": 3}',
        '{"arrival": 1, "prompt": "a\u2028b", "output_len": 2}',
    )
    requests = make_requests(options, 512, lambda text: [ord(c) % 512 for c in text])
    assert [(r.arrival, len(r.prompt), r.max_tokens) for r in requests] == [(0.0, 20, 3), (1.0, 3, 2), (2.5, 3, 4)]
    assert requests[1].prompt == [97, 0x2028 % 512, 98] and requests[2].prompt == [7, 0, 9]
    assert requests == make_requests(options, 512, lambda text: [ord(c) % 512 for c in text])
    assert max(requests[0].prompt) < 512


def test_published_traces_are_read_as_they_are(tmp_path):
    mooncake = trace(
        tmp_path,
        '{"timestamp": 2500, "input_length": 1000, "output_length": 4, "hash_ids": [0, 1]}',
        '{"timestamp": 500, "input_length": 600, "output_length": 3, "hash_ids": [0, 2]}',
        '{"timestamp": 500, "input_length": 600, "output_length": 3}',
    )
    first, alone, second = make_requests(mooncake, 512)
    assert [(r.arrival, len(r.prompt), r.max_tokens) for r in (first, second)] == [(0.0, 600, 3), (2.0, 1000, 4)]
    assert first.prompt[:512] == second.prompt[:512] and first.prompt[512:] != second.prompt[512:600]
    assert len(alone.prompt) == 600 and alone.prompt[:16] != first.prompt[:16]

    line = '{"chat_id": 7, "parent_chat_id": %d, "timestamp": %s, "input_length": %d, "output_length": 5, "type": "a", '
    line += '"turn": 1, "hash_ids": %s}'
    chats = trace(tmp_path, line % (-1, "0.25", 20, "[5, 6]"), line % (7, "1.5", 50, "[5, 8, 9, 3]"))
    first, second = make_requests(replace(chats, time_scale=2.0), 512)
    assert [(r.arrival, len(r.prompt)) for r in (first, second)] == [(0.0, 20), (2.5, 50)]
    assert first.prompt[:16] == second.prompt[:16] and first.prompt[16:] != second.prompt[16:20]


def test_an_excerpt_of_a_trace_begins_at_once(tmp_path):
    lines = [f'{{"arrival": {at}, "input_len": 1, "output_len": 1}}' for at in (602.0, 600.5, 7.0)]
    options = trace(tmp_path, *lines)
    assert [r.arrival for r in make_requests(options, 512)] == [0.0, 593.5, 595.0]
    cut = replace(options, num_requests=2, time_scale=0.5)
    assert [r.arrival for r in make_requests(cut, 512)] == [0.0, 0.75]


def test_a_trace_may_be_cut_to_its_first_requests(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text('{"input_len": 1, "output_len": 1}\n' * 3)
    cut = workload("workload=trace", f"workload.path={file}", "workload.num_requests=2")
    assert len(make_requests(cut, 512)) == 2
    more = workload("workload=trace", f"workload.path={file}", "workload.num_requests=4")
    with pytest.raises(ConfigError, match=r"workload.num_requests=4.*has 3"):
        make_requests(more, 512)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: .*a line is one JSON object"),
        ("[1]", "it is not a JSON object"),
        ('{"input_len": 5}', "it lacks output_len"),
        ('{"output_len": 5}', "it needs one of input_len, prompt, prompt_token_ids, and has none"),
        ('{"input_len": 5, "prompt": "a", "output_len": 5}', "has input_len and prompt"),
        ('{"input_len": 0, "output_len": 5}', "input_len=0 is not a whole number from 1"),
        ('{"input_len": true, "output_len": 5}', "input_len=True is not"),
        ('{"input_len": 5, "output_len": 2.5}', "output_len=2.5 is not"),
        ('{"input_len": 5, "output_len": 2, "arival": 3}', "no key 'arival'. Did you mean arrival"),
        ('{"input_len": 5, "output_len": 2, "arrival": -1}', "arrival=-1 is not a time from 0"),
        ('{"input_len": 5, "output_len": 2, "arrival": NaN}', "arrival=nan is not"),
        (f'{{"input_len": 5, "output_len": 2, "arrival": 1{"0" * 400}}}', "arrival=1000.* is not a time from 0"),
        ("[" * 100_000, "a line is one JSON object"),
        ('{"prompt": "", "output_len": 2}', "is not a text of at least one token"),
        ('{"prompt_token_ids": [], "output_len": 2}', "at least one whole number"),
        ('{"prompt_token_ids": [1.5], "output_len": 2}', "at least one whole number"),
        ('{"timestamp": 5, "input_length": 9}', "it lacks output_length"),
        ('{"timestamp": -5, "input_length": 9, "output_length": 1}', "timestamp=-5 is not a time"),
        (
            '{"timestamp": 5, "input_length": 9, "output_length": 1, "hash_ids": ["a"]}',
            "hash_ids is not a list",
        ),
        ('{"timestamp": 5, "input_length": 9, "output_length": 1, "turn": 1}', "no key 'turn'. Allowed: timestamp"),
        ("", "has no request in it"),
    ],
)
def test_a_trace_with_a_mistake_is_refused_with_its_line(tmp_path, line, message):
    with pytest.raises(ConfigError, match=message):
        make_requests(trace(tmp_path, line), 512, lambda text: [1] * len(text))


def test_a_trace_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        make_requests(workload("workload=trace", f"workload.path={tmp_path / 'x'}"), 512)
