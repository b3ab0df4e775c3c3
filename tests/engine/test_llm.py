"""What a user sees of ``LLM`` and ``LLMEngine``: outputs, order, errors, ends, and engines that stay usable."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import time
from array import array
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import byte_level_tokenizer, edit_json, reference_model, reference_tokens
from tqdm import tqdm

from minivllm import LLM, RequestOutput, SamplingParams, TextPrompt, TokensPrompt
from minivllm.core import interrupts
from minivllm.core.batch import Batch
from minivllm.core.landing import ScoredStep
from minivllm.core.longest_first import longest_first
from minivllm.core.requests import COMPLETION
from minivllm.core.sampler import DefaultSampler
from minivllm.core.sampling_params import RequestOutputKind
from minivllm.core.sequence import Sequence
from minivllm.errors import EngineDeadError, MinivllmError, RequestError

Engine = Callable[..., LLM]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL = {"cache.block_size": 4, "cache.num_blocks": 64, "scheduler.max_num_seqs": 32, "max_model_len": 128}


def prompts_of(count: int, longest: int = 20, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 512, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def run(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in outputs]


def usable(llm: LLM) -> None:
    """Nothing is left of what went before, and the answers are right."""
    engine = llm.engine
    assert not engine.has_unfinished_requests() and not engine.scheduler.has_work
    assert engine.scheduler.blocks.num_free == engine.num_blocks
    engine.scheduler.check()
    folder = Path(engine.config.model.path or "")
    prompts = prompts_of(3, seed=99)
    assert tokens(run(llm, prompts)) == [reference_tokens(folder, p, 8) for p in prompts]


# --------------------------------------------------------------------------- prompts in, outputs out


def test_outputs_come_in_the_order_of_the_prompts(engine: Engine) -> None:
    llm = engine(**SMALL)
    prompts = prompts_of(20)
    params = [GREEDY.clone(max_tokens=1 + (7 * i) % 13) for i in range(20)]  # they end in another order
    outputs = run(llm, prompts, params)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(t) for t in tokens(outputs)] == [p.max_tokens for p in params]
    assert all(o.finished and o.prompt is None and o.outputs[0].finish_reason == "length" for o in outputs)
    assert len({o.request_id for o in outputs}) == 20
    usable(llm)


def test_an_empty_list_gives_an_empty_list(engine: Engine) -> None:
    llm = engine(**SMALL)
    assert run(llm, []) == [] and llm.generate([]) == [] and run(llm, [], []) == []
    usable(llm)


def test_the_longest_answers_begin_first_and_change_nobodys_draws(engine: Engine) -> None:
    lengths = [2, 2, 3, 2, 2, 12]
    prompts = [{"prompt_token_ids": [1, 2 + i]} for i in range(6)]
    params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=1.0) for n in lengths]
    two, all_at_once = engine(**{"scheduler.max_num_seqs": 2}), engine()
    outputs, expected = two.generate(prompts, params, False), all_at_once.generate(prompts, params, False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert [o.request_id for o in outputs] == [str(i) for i in range(6)]
    assert two.engine.stats.steps <= 12 + 2, "as they come they take 12 behind 4 of others"
    assert two.engine.num_requests_added == 6


def test_of_what_is_refused_the_first_is_named_and_later_draws_are_the_same(engine: Engine) -> None:
    """Whatever the order in which they are added."""
    one, draws = engine(**SMALL | {"scheduler.max_num_seqs": 2}), []
    params = [SamplingParams(max_tokens=n) for n in (2, 3, 9, 5)]
    for many in (one, engine(**SMALL)):
        with pytest.raises(RequestError, match="prompt 1: token id 9999"):
            run(many, [[5], [9999], [7], []], params)
        assert many.engine.num_requests_added == 1 and not many.engine.has_unfinished_requests()
        draws += tokens(run(many, [[5, 6]], SamplingParams(max_tokens=6)))
    assert draws[0] == draws[1]


def test_which_request_is_best_added_first(engine: Engine) -> None:
    llm = engine(
        **SMALL | {"scheduler.max_num_seqs": 2, "cache.num_blocks": 10}
    )  # of 4 tokens, half a block is left free
    few, many = SamplingParams(max_tokens=4), SamplingParams(max_tokens=8)
    order = partial(longest_first, llm.engine)
    assert order([5, 5, 5], [few, many, few]) == [1, 0, 2]
    assert order([5, 5], [few, many]) == [0, 1], "they run at once"
    assert order([5, 5], [few, many.clone(n=2)]) == [1, 0], "three completions"
    assert order([5, 30, 5], [few, few, many]) == [0, 1, 2], "the two longest take 9 and 4 blocks"
    assert order([5, 6, 7], [few, few, few.clone(max_tokens=3)]) == [0, 1, 2], "as they come where they are alike"
    assert order([1, 1, 1], [few, few, few.clone(max_tokens=None)]) == [0, 1, 2], "up to max_model_len, it is said"


def test_duplicates_agree_under_greedy(engine: Engine) -> None:
    llm = engine(**SMALL)
    [prompt, other] = prompts_of(2)
    got = tokens(run(llm, [prompt, other, prompt, prompt]))
    assert got[0] == got[2] == got[3] != got[1]
    assert tokens(run(llm, prompt)) == [got[0]], "a prefix found in the cache changes nothing"


def test_token_id_0_is_a_token(engine: Engine, tiny_checkpoint: Callable[..., Path]) -> None:
    llm = engine(**SMALL)
    outputs = run(llm, [[0], [0, 0, 0], [5, 0]])
    assert [o.prompt_token_ids for o in outputs] == [[0], [0, 0, 0], [5, 0]]
    assert tokens(outputs) == [reference_tokens(tiny_checkpoint("qwen3"), p, 8) for p in ([0], [0, 0, 0], [5, 0])]
    stop = run(llm, [[0], [9]], SamplingParams(temperature=1.0, seed=0, max_tokens=64, stop_token_ids=[0]))
    assert all(o.outputs[0].finish_reason in ("stop", "length") for o in stop)


def test_a_prompt_is_text_or_ids_or_a_mapping_alone_or_in_a_list(engine: Engine) -> None:
    llm = engine(**SMALL)
    text = "once upon a time"
    ids = llm.get_tokenizer().encode(text)
    want = tokens(run(llm, [ids]))[0]
    forms: list[Any] = [
        text, [text], ids, [ids], tuple(ids), np.array(ids), {"prompt": text}, [{"prompt": text}],
        {"prompt_token_ids": ids}, [{"prompt": text, "prompt_token_ids": ids}], TextPrompt(prompt=text),
        [TokensPrompt(prompt_token_ids=ids)],
    ]  # fmt: skip
    for form in forms:
        [output] = run(llm, form)
        assert tokens([output]) == [want], form
        assert output.prompt_token_ids == ids
        has_text = isinstance(form, str | dict) or (isinstance(form, list) and isinstance(form[0], str))
        assert not has_text or output.prompt == text or "prompt_token_ids" in form
    for more in ({"prompt": text, "multi_modal_data": None, "mm_processor_kwargs": {}}, UserDict(prompt=text),
                 {"prompt_token_ids": torch.tensor(ids)}, [{"prompt_token_ids": array("i", ids)}]):  # fmt: skip
        [output] = run(llm, more)
        assert tokens([output]) == [want] and json.dumps(output.prompt_token_ids) == json.dumps(ids)
    mixed = run(llm, [text, ids, {"prompt": text}])
    assert tokens(mixed) == [want] * 3 and [o.prompt for o in mixed] == [text, None, text]


def test_an_output_has_the_prompts_ids_as_pythons_numbers(engine: Engine) -> None:
    """So that they can be written as JSON, whatever came with them."""
    llm = engine(**SMALL)
    for ids in ([1, *np.array([2, 3])], [1, 2, *torch.tensor([3]).numpy()], [np.int32(1), 2, 3], np.array([1, 2, 3])):
        assert json.dumps(run(llm, [ids], GREEDY.clone(max_tokens=1))[0].prompt_token_ids) == "[1, 2, 3]"


def test_what_a_tokenizer_returns_is_no_prompt_and_its_ids_are(engine: Engine) -> None:
    llm = engine(**SMALL)
    tokenizer = llm.get_tokenizer()
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "the fox"}], add_generation_prompt=True)
    for encoding in (chat, tokenizer("the fox")):
        assert isinstance(encoding, Mapping) and not isinstance(encoding, dict)
        for form in (encoding, [encoding], {"prompt_token_ids": encoding}):
            with pytest.raises(RequestError, match=r'BatchEncoding.*; pass its token ids, \["input_ids"\]'):
                run(llm, form)
        [output] = run(llm, encoding["input_ids"])
        assert output.prompt_token_ids == encoding["input_ids"]
    usable(llm)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (3, "not int"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids is a str, not a list; text is prompt"),
        ({}, "or a mapping with prompt or prompt_token_ids"),
    ],
)
def test_what_is_neither_text_nor_ids_is_refused(engine: Engine, prompt: Any, message: str) -> None:
    for form in (prompt, [prompt, "a"]):
        with pytest.raises(RequestError, match=message):
            run(engine(**SMALL), form)


def test_arrays_and_tensors_are_token_ids(engine: Engine) -> None:
    llm = engine(**SMALL)
    expected = tokens(run(llm, [[5, 6], [7, 8]]))
    array = np.array([[5, 6], [7, 8]])
    for prompts in (array, list(array), torch.from_numpy(array), list(torch.from_numpy(array))):
        assert tokens(run(llm, prompts)) == expected
    for alone in (array[0], list(array[0]), torch.from_numpy(array[0]), list(torch.from_numpy(array[0]))):
        [output] = run(llm, alone)
        assert tokens([output]) == expected[:1]
        assert json.dumps(output.prompt_token_ids) == "[5, 6]", "plain numbers"
    usable(llm)


def test_progress_may_be_ones_own(engine: Engine) -> None:
    made: list[dict[str, Any]] = []

    def bar(**options: Any) -> Any:
        made.append(options)
        return tqdm(**options | {"disable": True})

    llm = engine(**SMALL)
    llm.generate([[1], [2]], GREEDY, use_tqdm=bar)
    llm.generate([[1], [2]], GREEDY, use_tqdm=partial(tqdm, disable=True))
    assert [options["total"] for options in made] == [2]


def test_each_output_is_told_once_it_is_complete_and_who_raises_aborts_the_others(engine: Engine) -> None:
    llm = engine(**SMALL | {"scheduler.max_num_seqs": 1})
    told: list[tuple[int, RequestOutput]] = []
    running: list[int] = []

    def take(place: int, output: RequestOutput) -> None:
        told.append((place, output))
        running.append(llm.engine.num_unfinished_requests)
        if len(told) == 5:
            raise KeyError("enough")

    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 4, 3)]
    outputs = llm.generate([[1], [2], [3]], params, on_output=take)
    assert [place for place, _ in told] == [1, 2, 0], "the longest first"
    assert all(outputs[place] is output for place, output in told) and running == [2, 1, 0]
    with pytest.raises(KeyError, match="enough"):
        llm.chat([[{"role": "user", "content": "the fox"}]] * 3, params, on_output=take)
    assert not llm.engine.has_unfinished_requests()
    usable(llm)


def test_a_bar_needs_no_more_than_vllm_asks_of_it(engine: Engine) -> None:
    said: list[Any] = []

    class Bar:
        def __init__(self, *, total: int, desc: str, dynamic_ncols: bool, postfix: str) -> None:
            said.append(total)

        def update(self, n: int) -> None:
            said.append((n, self.postfix))

        def close(self) -> None:
            said.append("closed")

    llm = engine(**SMALL)
    llm.generate([[1], [2]], GREEDY, use_tqdm=Bar)
    assert said[0] == 2 and said[-1] == "closed" and [n for n, text in said[1:-1] if "tok/s" in text] == [1, 1]
    with pytest.raises(RequestError):
        llm.generate([[1], [10**9]], GREEDY, use_tqdm=Bar)
    usable(llm)


def test_many_texts_are_encoded_some_at_a_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(**SMALL)
    texts = [f"text {i}" for i in range(150)]
    forms: list[Any] = [{"prompt": t, "cache_salt": t} if i % 3 == 1 else t for i, t in enumerate(texts)]
    forms[::5] = [llm.get_tokenizer().encode(text) for text in texts[::5]]
    want = [llm.get_tokenizer().encode(text) for text in texts]
    sizes: list[int] = []
    encode = llm.engine.tokenizer.encode_batch

    def spy(batch: list[str], **options: Any) -> list[list[int]]:
        sizes.append(len(batch))
        return encode(batch, **options)

    monkeypatch.setattr(llm.engine.tokenizer, "encode_batch", spy)
    outputs = run(llm, forms, GREEDY.clone(max_tokens=1))
    assert [o.prompt_token_ids for o in outputs] == want
    assert [o.prompt for o in outputs] == [None if i % 5 == 0 else text for i, text in enumerate(texts)]
    assert sum(sizes) == 120 and 1 < len(sizes) < 10, "not one by one, and not all before the first is added"


def test_each_prompt_may_have_its_own_params(engine: Engine) -> None:
    llm = engine(**SMALL)
    prompts = prompts_of(3)
    params = [GREEDY.clone(max_tokens=2), SamplingParams(seed=3, max_tokens=5), GREEDY.clone(logprobs=1)]
    outputs = run(llm, prompts, params)
    assert [len(t) for t in tokens(outputs)] == [2, 5, 8]
    assert [o.outputs[0].logprobs is None for o in outputs] == [True, True, False]
    with pytest.raises(RequestError, match="3 prompts with 2 sampling_params; give one for all or one per prompt"):
        run(llm, prompts, params[:2])
    usable(llm)


def test_the_callers_params_are_not_changed(engine: Engine) -> None:
    params = SamplingParams(max_tokens=3, seed=1)
    run(engine(**SMALL), [[1], [2]], params)
    assert params == SamplingParams(max_tokens=3, seed=1)


def test_what_the_caller_changes_later_changes_nothing(engine: Engine) -> None:
    engine_ = engine(**SMALL).engine
    params = GREEDY.clone(output_kind=RequestOutputKind.FINAL_ONLY, logprobs=1)
    ids = [1, 2, 3]
    engine_.add_request("a", ids, params)
    engine_.step()
    ids[:] = [9]
    params.logprobs, params.stop, params.output_kind = 5, ["zzz"], RequestOutputKind.DELTA
    outputs = []
    while engine_.has_unfinished_requests():
        outputs += engine_.step()
    [output] = outputs
    assert output.prompt_token_ids == [1, 2, 3]
    assert len(output.outputs[0].token_ids) == 8
    assert [len(entry) <= 2 for entry in output.outputs[0].logprobs or []] == [True] * 8


def test_max_tokens_none_goes_on_to_max_model_len_or_to_the_end_of_the_cache(engine: Engine) -> None:
    endless = GREEDY.clone(max_tokens=None)
    [output] = run(engine(**SMALL | {"max_model_len": 40}), [[5] * 9], endless)
    assert len(output.outputs[0].token_ids) == 31 and output.outputs[0].finish_reason == "length"
    [output] = run(engine(**SMALL | {"cache.num_blocks": 6}), [[5] * 9], endless)
    assert len(output.outputs[0].token_ids) == 6 * 4 + 1 - 9, "the last token is never written to the cache"


# --------------------------------------------------------------------------- n, seeds


def test_n_completions_use_the_seeds_that_follow(engine: Engine) -> None:
    llm = engine(**SMALL)
    prompt = prompts_of(1)[0]
    [output] = run(llm, prompt, SamplingParams(n=3, seed=11, max_tokens=6, ignore_eos=True))
    assert [c.index for c in output.outputs] == [0, 1, 2] and output.finished
    got = [list(c.token_ids) for c in output.outputs]
    assert len({tuple(t) for t in got}) == 3
    alone = [tokens(run(llm, prompt, SamplingParams(seed=11 + i, max_tokens=6, ignore_eos=True)))[0] for i in range(3)]
    assert got == alone
    [output] = run(llm, prompt, GREEDY.clone(n=2))
    assert output.outputs[0].token_ids == output.outputs[1].token_ids
    usable(llm)


def test_a_seeded_request_gives_the_same_alone_and_with_thirty_others(engine: Engine) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7, "top_k": 40},
        {"top_p": 0.8},
        {"min_p": 0.02, "logprobs": 2},
    ]
    prompts = prompts_of(len(kinds), seed=5)
    params = [SamplingParams(seed=70 + i, max_tokens=12, ignore_eos=True, **kind) for i, kind in enumerate(kinds)]
    alone = [tokens(run(engine(**SMALL), p, one))[0] for p, one in zip(prompts, params, strict=True)]
    assert len({tuple(t) for t in alone}) == len(kinds)
    others = prompts_of(30, seed=6)
    noise = [SamplingParams(seed=i, max_tokens=3 + i % 9, top_k=i % 5, temperature=0.1 * i) for i in range(30)]
    for llm in (
        engine(**SMALL),
        engine(**SMALL | {"scheduler.max_num_batched_tokens": 16, "scheduler": "prefill_first"}),
    ):
        outputs = run(llm, others[:15] + prompts + others[15:], noise[:15] + params + noise[15:])
        assert tokens(outputs)[15 : 15 + len(kinds)] == alone


def test_requests_without_a_seed_differ_and_come_again_in_a_new_engine(engine: Engine) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    first = tokens(run(engine(**SMALL, seed=1), [[7, 8]] * 3, params))
    assert len({tuple(t) for t in first}) == 3
    assert tokens(run(engine(**SMALL, seed=1), [[7, 8]] * 3, params)) == first
    assert tokens(run(engine(**SMALL, seed=2), [[7, 8]] * 3, params)) != first


# --------------------------------------------------------------------------- ends


def test_a_stop_token_ends_the_answer_and_is_named(engine: Engine) -> None:
    llm = engine(**SMALL)
    prompt = prompts_of(1, seed=3)[0]
    [whole] = tokens(run(llm, prompt, GREEDY.clone(max_tokens=20)))
    stop = next(t for i, t in enumerate(whole) if i >= 3 and t not in whole[:i])
    at = whole.index(stop)
    [output] = run(llm, prompt, GREEDY.clone(max_tokens=20, stop_token_ids=[511, stop]))
    completion = output.outputs[0]
    assert completion.token_ids == whole[: at + 1], "nothing comes after it"
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    [later] = run(llm, prompt, GREEDY.clone(max_tokens=20, stop_token_ids=[stop], min_tokens=at + 1))
    assert stop not in later.outputs[0].token_ids[: at + 1]
    assert len(later.outputs[0].token_ids) > at + 1
    usable(llm)


@pytest.mark.parametrize("pipeline", ["true", "false"])
def test_every_end_token_of_the_checkpoint_ends_an_answer(
    engine: Engine, tiny_checkpoint: Callable[..., Path], tmp_path: Path, pipeline: str
) -> None:
    plain = tiny_checkpoint("qwen3")
    prompts = prompts_of(6, seed=4)
    whole = [reference_tokens(plain, p, 16) for p in prompts]
    ends = [whole[0][5], whole[1][7], whole[2][2]]
    folder = tmp_path / "ends"
    shutil.copytree(plain, folder)
    edit_json(folder / "generation_config.json", eos_token_id=ends)
    llm = engine(folder, **SMALL, **{"scheduler.async_scheduling": pipeline})
    outputs = run(llm, prompts, SamplingParams(temperature=0, max_tokens=16))
    for output, answer in zip(outputs, whole, strict=True):
        at = next((i for i, t in enumerate(answer) if t in ends), None)
        completion = output.outputs[0]
        assert completion.token_ids == (answer if at is None else answer[: at + 1])
        assert completion.finish_reason == ("length" if at is None else "stop")
        assert completion.stop_reason == (None if at is None else answer[at])  # none of these is the tokenizer's own
    assert sum(o.outputs[0].finish_reason == "stop" for o in outputs) >= 3
    ignoring = run(llm, prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    assert tokens(ignoring) == whole
    held = run(llm, prompts[2], SamplingParams(temperature=0, max_tokens=16, min_tokens=6))
    assert not set(tokens(held)[0][:6]) & set(ends) and len(tokens(held)[0]) >= 6
    both = run(llm, prompts[2], SamplingParams(temperature=0, max_tokens=16, min_tokens=6, ignore_eos=True))
    assert tokens(both)[0][:6] == tokens(held)[0][:6] and len(tokens(both)[0]) == 16


def test_an_end_token_that_cannot_be_sampled_ends_nothing(
    engine: Engine, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Checkpoints name some beyond their vocabulary."""
    folder, prompt = tmp_path / "ends", prompts_of(1, seed=4)[0]
    shutil.copytree(tiny_checkpoint("qwen3"), folder)
    edit_json(folder / "generation_config.json", eos_token_id=[10**6, -1])
    llm = engine(folder, **SMALL)
    [output] = run(llm, prompt, SamplingParams(temperature=0, max_tokens=6, min_tokens=3))
    assert tokens([output]) == [reference_tokens(folder, prompt, 6)]


# --------------------------------------------------------------------------- log-probabilities


def test_logprobs_equal_transformers(engine: Engine, tiny_checkpoint: Callable[..., Path]) -> None:
    llm, folder = engine(**SMALL), tiny_checkpoint("qwen3")
    prompts = prompts_of(4, seed=8)
    params = [GREEDY.clone(logprobs=3), SamplingParams(seed=1, max_tokens=6, logprobs=0, ignore_eos=True),
              SamplingParams(seed=2, max_tokens=6, logprobs=5, top_k=50, temperature=2.0, ignore_eos=True),
              GREEDY]  # fmt: skip
    outputs = run(llm, prompts, params)
    assert outputs[3].outputs[0].logprobs is None and outputs[3].outputs[0].cumulative_logprob is None
    ranks = []
    for prompt, one, output in zip(prompts[:3], params, outputs, strict=False):
        completion = output.outputs[0]
        ids = completion.token_ids
        with torch.inference_mode():
            logits = reference_model(folder)(torch.tensor([prompt + ids[:-1]])).logits[0, len(prompt) - 1 :]
        want = torch.log_softmax(logits.double(), -1)
        assert completion.logprobs is not None and len(completion.logprobs) == len(ids)
        for token, row, entry in zip(ids, want, completion.logprobs, strict=True):
            best = row.topk(one.logprobs).indices.tolist()
            assert set(entry) == {*best, token} and next(iter(entry)) == token, "as vLLM has them"
            for t, lp in entry.items():
                assert lp.logprob == pytest.approx(row[t].item(), abs=1e-3)
                assert lp.rank == int((row > row[t]).sum()) + 1
                assert lp.decoded_token == llm.get_tokenizer().decode([t], skip_special_tokens=False)
            ranks.append(entry[token].rank)
        assert completion.cumulative_logprob == pytest.approx(
            sum(e[t].logprob for e, t in zip(completion.logprobs, ids, strict=True)), abs=1e-5
        )
    assert max(r for r in ranks if r) > 5, "some sampled token stood outside the best"


def test_the_logprobs_of_an_only_token(engine: Engine) -> None:
    [short] = run(engine(**SMALL), [4, 5], GREEDY.clone(max_tokens=1, logprobs=2))
    [longer] = run(engine(**SMALL), [4, 5], GREEDY.clone(max_tokens=3, logprobs=2))
    assert short.outputs[0].logprobs == longer.outputs[0].logprobs[:1] and len(short.outputs[0].logprobs) == 1


@pytest.mark.parametrize("room", [{}, {"scheduler.max_num_batched_tokens": 7, "cache.num_blocks": 9}], ids=str)
def test_prompt_logprobs_equal_transformers(
    engine: Engine, tiny_checkpoint: Callable[..., Path], room: dict[str, int]
) -> None:
    """In whole prompts and in chunks, of sequences that are preempted, beside others, and where all is cached."""
    llm, model = engine(**SMALL | room), reference_model(tiny_checkpoint("qwen3"))
    prompts = [[7], *prompts_of(5, seed=8), list(range(3, 21)), list(range(40, 53))]
    counts = [0, 3, None, 1, 2, None, 5, 0]
    params = [
        SamplingParams(temperature=0.0 if i % 2 else 0.9, seed=i, max_tokens=4 + 2 * i, ignore_eos=True,
                       prompt_logprobs=count, n=1 + (i == 4), logprobs=1 if i in (3, 6) else None)
        for i, count in enumerate(counts)
    ]  # fmt: skip
    for _ in range(2):
        outputs = run(llm, prompts, params)
        assert (llm.engine.stats.preemptions > 0) == bool(room)
        for prompt, one, output in zip(prompts, params, outputs, strict=True):
            found, count = output.prompt_logprobs, one.prompt_logprobs
            if count is None:
                assert found is None
                continue
            assert found is not None and len(found) == len(prompt) and found[0] is None
            assert output.num_cached_tokens == 0, "it was computed again"
            with torch.inference_mode():
                want = torch.log_softmax(model(torch.tensor([prompt])).logits[0].double(), -1)
            for token, row, entry in zip(prompt[1:], want, found[1:], strict=False):
                assert entry is not None and next(iter(entry)) == token
                assert set(entry) == {*row.topk(count).indices.tolist(), token}
                for t, lp in entry.items():
                    assert lp.logprob == pytest.approx(row[t].item(), abs=1e-3)
                    assert lp.rank == int((row > row[t]).sum()) + 1
                    assert lp.decoded_token == llm.get_tokenizer().decode([t], skip_special_tokens=False)
    plain = [one.clone(prompt_logprobs=None) for one in params]
    assert tokens(run(llm, prompts, plain)) == tokens(outputs)
    llm.engine.scheduler.check()


def test_prompt_logprobs_go_to_whom_they_belong(engine: Engine) -> None:
    """A request is aborted while they are under way, and its slot and its name are another's."""
    llm = engine(**SMALL | {"scheduler.max_num_seqs": 1, "scheduler.max_num_batched_tokens": 8})
    wanted = GREEDY.clone(prompt_logprobs=1)
    first, second = list(range(5, 17)), list(range(40, 61))
    [expected] = run(llm, second, wanted)
    llm.engine.add_request("a", first, wanted)
    llm.engine.step()
    llm.engine.abort("a")
    llm.engine.add_request("a", second, wanted)
    outputs: list[RequestOutput] = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    assert outputs[-1].prompt_logprobs == expected.prompt_logprobs
    assert outputs[0].prompt_logprobs == expected.prompt_logprobs, "they are there with the first token"


def test_all_completions_wait_for_the_prompts_logprobs_and_deltas_tell_them_once(engine: Engine) -> None:
    """The second starts from what is cached while the first still computes the prompt."""
    chunks = {"long_prefill_token_threshold": 4, "max_num_partial_prefills": 4, "max_long_partial_prefills": 4}
    llm = engine(**SMALL | {f"scheduler.{name}": value for name, value in chunks.items()})
    prompt = list(range(20, 52))
    run(llm, prompt)
    params = GREEDY.clone(n=2, max_tokens=12, prompt_logprobs=1, output_kind=RequestOutputKind.DELTA)
    llm.engine.add_request("a", prompt, params)
    outputs: list[RequestOutput] = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    first, *others = outputs
    assert len(first.outputs[1].token_ids) > len(first.outputs[0].token_ids) > 0, "one was ahead"
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == len(prompt)
    assert all(output.prompt_logprobs is None for output in others)
    ids = [[t for o in outputs for t in o.outputs[i].token_ids] for i in range(2)]
    assert ids[0] == ids[1] == tokens(run(llm, prompt, GREEDY.clone(max_tokens=12)))[0]


def test_an_executor_that_brings_no_prompt_logprobs_is_named(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(**SMALL)
    monkeypatch.setattr(ScoredStep, "result", lambda self: self.step.result())
    with pytest.raises(MinivllmError, match="executor=auto returned a step without the prompt_logprobs"):
        run(llm, [4, 5], GREEDY.clone(prompt_logprobs=1))


def test_a_scheduler_that_scores_only_some_is_named(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(**SMALL)
    run(llm, list(range(20)))
    monkeypatch.setattr(Sequence, "scores_prompt", property(lambda seq: len(seq.known) < 10))
    with pytest.raises(MinivllmError, match="scheduler=mixed left out log-probabilities of the prompt of '1'"):
        run(llm, list(range(20)), GREEDY.clone(prompt_logprobs=1))


def test_a_scheduler_that_scores_no_prompts_refuses(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(**SMALL)
    monkeypatch.setattr(type(llm.engine.scheduler), "scores_prompts", False)
    with pytest.raises(RequestError, match="prompt_logprobs=1 is not supported by scheduler=mixed; leave it out"):
        run(llm, [4, 5], GREEDY.clone(prompt_logprobs=1))
    usable(llm)


# --------------------------------------------------------------------------- the prefix cache


def test_cached_prompt_tokens_are_counted_and_can_be_forgotten(engine: Engine) -> None:
    llm = engine(**SMALL)
    prompt = prompts_of(1, seed=1)[0] + list(range(20))
    assert run(llm, prompt)[0].num_cached_tokens == 0
    assert run(llm, prompt)[0].num_cached_tokens == (len(prompt) - 1) // 4 * 4
    salted = {"prompt_token_ids": prompt, "cache_salt": "mine"}
    assert run(llm, salted)[0].num_cached_tokens == 0
    assert run(llm, salted)[0].num_cached_tokens > 0
    llm.reset_prefix_cache()
    assert run(llm, prompt)[0].num_cached_tokens == 0
    usable(llm)


# --------------------------------------------------------------------------- chat


def test_several_completions_count_what_was_cached_before_them(engine: Engine) -> None:
    llm = engine(**SMALL)
    [cold] = run(llm, [list(range(20, 60))], GREEDY.clone(n=3))
    [warm] = run(llm, [list(range(20, 60))], GREEDY.clone(n=3))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 36)


def test_an_empty_salt_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="cache_salt='' is empty; leave it out"):
        run(engine(**SMALL), {"prompt_token_ids": [1], "cache_salt": ""})


def test_chat_is_generate_with_the_template(engine: Engine) -> None:
    llm = engine(**SMALL)
    messages = [{"role": "user", "content": "the fox"}]
    prompt = byte_level_tokenizer().encode("<|user|>the fox<|end|><|assistant|>")
    [answer] = llm.chat(messages, GREEDY, use_tqdm=False)
    assert answer.prompt_token_ids == prompt and answer.prompt == "<|user|>the fox<|end|><|assistant|>"
    assert tokens([answer]) == tokens(run(llm, prompt))
    two = llm.chat([messages, [*messages, {"role": "assistant", "content": "a"}]], GREEDY, use_tqdm=False)
    assert len(two) == 2 and tokens(two)[0] == tokens([answer])[0]
    parts = [{"role": "user", "content": [{"type": "text", "text": "the fox"}]}]
    assert llm.chat(parts, GREEDY, use_tqdm=False)[0].prompt_token_ids == prompt
    for name in ("tokenize", "chat_template", "add_generation_prompt", "messages"):
        with pytest.raises(RequestError, match=f"{name} cannot be set there"):
            llm.chat(messages, use_tqdm=False, chat_template_kwargs={name: True})
    for names in (5, [1], {5: 1}):
        with pytest.raises(RequestError, match="is not a mapping of names"):
            llm.chat(messages, use_tqdm=False, chat_template_kwargs=names)
    with pytest.raises(RequestError, match="priority=1 is not a list; give one per prompt"):
        llm.generate(["a"], GREEDY, use_tqdm=False, priority=1)
    assert llm.chat([], GREEDY, use_tqdm=False) == []
    bare = llm.chat(messages, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert bare[0].prompt_token_ids == prompt[:-1]
    for wrong, why in [
        ([[]], "at least one message"),
        ({"role": "user", "content": "x"}, "a conversation is a list"),
        (["hello"], "a message is .* not 'hello'"),
        ([{"role": "user"}], "a message is"),
        (None, "a conversation is a list"),
        ([{"role": 5, "content": "x"}], "a message's role is a string, as 'user', not 5"),
        ([{"role": "user", "content": None}], "a string or a list of text parts"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a string or a list of text parts"),
    ]:
        with pytest.raises(RequestError, match=why):
            llm.chat(wrong, GREEDY, use_tqdm=False)
    usable(llm)


def test_chat_says_which_conversation_is_wrong(engine: Engine) -> None:
    llm, ok = engine(**SMALL), [{"role": "user", "content": "a"}]
    for wrong, why in (
        ([{"role": "user", "content": 5}], "a message's content is a string"),
        ([], "at least one message"),
        ([{"role": "user"}], "a message is"),
    ):
        with pytest.raises(RequestError, match=f"^prompt 1: .*{why}"):
            llm.chat([ok, wrong], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match=r"^a message's content is a string"):
        llm.chat([{"role": "user", "content": 5}], GREEDY, use_tqdm=False)
    usable(llm)


def test_chat_continues_a_message_or_begins_one(engine: Engine) -> None:
    llm, messages = engine(**SMALL), [{"role": "assistant", "content": "a"}]
    with pytest.raises(RequestError, match="pass add_generation_prompt=False, too"):
        llm.chat(messages, GREEDY, use_tqdm=False, continue_final_message=True)
    llm.chat(messages, GREEDY, use_tqdm=False, continue_final_message=True, add_generation_prompt=False)


def test_chat_without_a_template_says_what_to_do(engine: Engine, tiny_checkpoint: Callable[..., Path]) -> None:
    llm = engine(tiny_checkpoint("qwen3", chat=False), **SMALL)
    with pytest.raises(RequestError, match="no chat template; use generate"):
        llm.chat([{"role": "user", "content": "x"}], use_tqdm=False)
    usable(llm)


# --------------------------------------------------------------------------- threads, and vLLM's names


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_is_told_to_make_its_own(engine: Engine) -> None:
    llm, told = engine(**SMALL), multiprocessing.get_context("fork").SimpleQueue()

    def child() -> None:
        try:
            llm.generate([[1]], GREEDY)
        except RequestError as error:
            told.put(str(error))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0 and "make an LLM in the child" in told.get()
    usable(llm)


def test_threads_take_turns(engine: Engine) -> None:
    llm = engine(**SMALL)
    prompts = prompts_of(12, seed=3)
    alone, said = tokens(run(llm, prompts)), [[]] * 4
    threads = [
        threading.Thread(target=lambda i=i: said.__setitem__(i, tokens(run(llm, prompts[3 * i : 3 * i + 3]))))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer for some in said for answer in some] == alone
    usable(llm)


def test_requests_of_ones_own_keep_their_names(engine: Engine) -> None:
    llm = engine(**SMALL)
    llm.llm_engine.add_request("0", [5, 6], llm.get_default_sampling_params())
    assert run(llm, [[7]])[0].request_id == "1"
    llm.engine.abort("0")
    assert run(llm, [[7]])[0].request_id == "2"
    usable(llm)


def test_extra_args_are_for_samplers_that_name_them(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, encode, seen = engine(**SMALL), DefaultSampler.encode, []

    def spy(seq: Sequence, seed: int) -> np.ndarray:
        seen.append(seq.params.extra_args)
        return encode(seq, seed)

    monkeypatch.setattr(DefaultSampler, "extra_args", frozenset({"mood"}))
    monkeypatch.setattr(DefaultSampler, "encode", spy)
    run(llm, [1], GREEDY.clone(extra_args={"mood": 3}))
    assert seen == [{"mood": 3}]
    with pytest.raises(RequestError, match="extra_args has voice, and sampler=default takes mood"):
        run(llm, [1], GREEDY.clone(extra_args={"mood": 3, "voice": 1}))
    usable(llm)


def test_vllms_other_arguments_may_ask_for_nothing(engine: Engine) -> None:
    llm = engine(**SMALL)
    assert len(llm.generate([5], GREEDY, use_tqdm=False, lora_request=None)) == 1
    with pytest.raises(RequestError, match=r"lora_request: .* type enable_lora=true"):
        llm.generate([5], GREEDY, lora_request=5)
    with pytest.raises(TypeError, match="there is no argument 'nonsense'"):
        llm.generate([5], GREEDY, nonsense=None)
    with pytest.raises(TypeError, match=r"there is no argument 'max_tokens'; give SamplingParams\(max_tokens=...\)"):
        llm.generate([5], max_tokens=5)
    with pytest.raises(TypeError, match="there is no argument 'stream'; LLMEngine's step returns the tokens of each"):
        llm.chat([{"role": "user", "content": "x"}], stream=True)
    nothing: dict[str, Any] = {"guided_options_request": None, "prompt_adapter_request": None}
    nothing |= {"lora_request": [None, None], "tokenization_kwargs": {}, "mm_processor_kwargs": {}}
    assert len(llm.generate([[5], [6]], GREEDY, use_tqdm=False, prompt_token_ids=None, **nothing)) == 2
    nothing["lora_request"] = [None]
    assert len(llm.chat([{"role": "user", "content": "x"}], GREEDY, use_tqdm=False, **nothing)) == 1
    with pytest.raises(
        RequestError, match=r"prompt_token_ids=.* token ids are prompts: generate\(\[\[1, 2\], \[3\]\]\)"
    ):
        llm.generate(prompt_token_ids=[[1, 2]], sampling_params=GREEDY)
    with pytest.raises(RequestError, match=r"give SamplingParams\(structured_outputs="):
        llm.generate("a", guided_options_request={"json": {}})
    usable(llm)


def test_vllms_other_methods_say_that_they_are_not_supported(engine: Engine) -> None:
    llm = engine(**SMALL)
    for name, instead in (
        ("beam_search", "n="), ("encode", "generate"), ("embed", "generate"), ("classify", "generate"),
        ("score", "generate"), ("collective_rpc", "plugin"),
        ("apply_model", "plugin"), ("start_profile", "bench"), ("stop_profile", "bench"),
        ("get_metrics", "engine.stats"), ("set_tokenizer", "tokenizer="),
    ):  # fmt: skip
        assert not hasattr(llm, name)
        with pytest.raises(AttributeError, match=f"LLM.{name} of vLLM is not supported: .*{instead}"):
            getattr(llm, name)
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'nonsense'"):
        llm.nonsense  # type: ignore[attr-defined]  # noqa: B018


def test_the_engines_other_members_say_what_to_do_instead(engine: Engine) -> None:
    llm = engine(**SMALL)
    for owner, name, instead in (
        (llm.llm_engine, "vllm_config", "LLMEngine.vllm_config of vLLM is not supported: llm_engine.config has"),
        (llm.llm_engine, "collective_rpc", "LLMEngine.collective_rpc of vLLM is not supported: reload_weights"),
        (llm, "update_weights", "LLM.update_weights of vLLM is not supported: reload_weights.weights_iterator"),
        (llm.llm_engine, "nonsense", "'LLMEngine' object has no attribute 'nonsense'"),
        (llm.llm_engine.model_config, "max_model_len", "ModelConfig.max_model_len .*: llm_engine.max_model_len has it"),
        (llm.llm_engine.model_config, "sleep", "'ModelConfig' object has no attribute 'sleep'"),
    ):
        assert not hasattr(owner, name)
        with pytest.raises(AttributeError, match=instead):
            getattr(owner, name)
    assert pickle.loads(pickle.dumps(llm.llm_engine.model_config)) == llm.llm_engine.model_config


def test_the_engine_has_vllms_names(engine: Engine) -> None:
    llm = engine(**SMALL)
    assert llm.llm_engine.get_tokenizer() is llm.get_tokenizer()
    nothing: dict[str, Any] = dict.fromkeys(["arrival_time", "trace_headers", "tokenization_kwargs"])
    llm.llm_engine.add_request("a", [5, 6], GREEDY, lora_request=None, **nothing)
    for name in nothing:
        with pytest.raises(RequestError, match=f"{name}=1.5 is not supported"):
            llm.llm_engine.add_request("b", [5, 6], GREEDY, **{name: 1.5})
    assert llm.llm_engine.get_num_unfinished_requests() == 1
    llm.llm_engine.abort_request(["a"])
    usable(llm)


@pytest.mark.parametrize(
    ("prompt", "params", "why"),
    [
        ([5], {"max_tokens": 3}, "sampling_params is SamplingParams"),
        ([[5]], [{"max_tokens": 3}], "sampling_params holds dict"),
        (b"abc", GREEDY, "not bytes"),
        ({"prompt": [5, 6]}, GREEDY, "token ids are prompt_token_ids"),
        ({"prompt_token_ids": [5], "cache_salt": 5}, GREEDY, "cache_salt=5 is not Unicode text"),
        ({"prompt_token_ids": [5], "cache_salt": "\ud800"}, GREEDY, "is not Unicode text"),
        ([10**30], GREEDY, "is outside the vocabulary"),
        (np.array(5), GREEDY, "a prompt is text or a list of token ids, not ndarray"),
        (torch.tensor(5), GREEDY, "a prompt is text or a list of token ids, not Tensor"),
        ([{"prompt_token_ids": np.array(5)}], GREEDY, "list of token ids, not ndarray"),
        ([{"prompt_token_ids": torch.tensor(5)}, str], GREEDY, "prompt 0: .*list of token ids, not Tensor"),
        ([{"prompt": list}], GREEDY, "is not text"),
    ],
)
def test_values_of_the_wrong_kind_are_refused(engine: Engine, prompt: Any, params: Any, why: str) -> None:
    llm = engine(**SMALL)
    with pytest.raises(RequestError, match=why):
        llm.generate(prompt, params, use_tqdm=False)
    with pytest.raises(RequestError, match="request_id=5 is not a string"):
        llm.engine.add_request(5, [5])  # type: ignore[arg-type]
    usable(llm)


# --------------------------------------------------------------------------- errors


ERRORS: list[tuple[Any, dict[str, Any], list[str]]] = [
    # prompt, parameters, and what the message must say: value, limit, way out
    ("", {}, ["the prompt is empty", "at least one token"]),
    ([[]], {}, ["the prompt is empty", "at least one token"]),
    ([5] * 128, {"max_tokens": 1}, ["128 tokens", "max_model_len=128", "shorten the prompt", "a larger max_model_len"]),
    ([5] * 500, {}, ["500 tokens", "max_model_len=128", "shorten the prompt"]),
    ([5] * 120, {"max_tokens": 9}, ["max_tokens=9", "120-token prompt", "max_model_len=128", "lower max_tokens"]),
    ([5] * 60, {"max_tokens": 30}, ["60-token prompt", "max_tokens=30", "needs 23 cache blocks", "has 20",
                                    "raise cache.num_blocks"]),
    ([5] * 90, {"max_tokens": None}, ["90-token prompt", "cache blocks", "has 20", "raise cache.num_blocks"]),
    ([1, 512], {}, ["token id 512 at index 1", "outside the vocabulary", "0 to 511"]),
    ([1, -1], {}, ["token id -1 at index 1", "outside the vocabulary", "0 to 511"]),
    ([[1, 2.5]], {}, ["flat list of whole numbers"]),
    ([[[1, 2], [3]]], {}, ["flat list of whole numbers"]),
    ([None], {}, ["text or a list of token ids", "NoneType"]),
    ({"prompt": "a", "max_tokens": 3}, {}, ["prompt_token_ids and cache_salt", "not max_tokens"]),
    ({"prompt": "a", "multi_modal_data": {"image": 1}}, {}, ["multi_modal_data is not supported", "leave it out"]),
    ({}, {}, ["text or a list of token ids"]),
    (None, {}, ["there are no prompts", "a list of token ids"]),
    (["fine", "a\ud800"], {}, ["prompt 1:", "a lone surrogate, '\\ud800'", "at index 1", "errors='replace'"]),
    ({"prompt": "\ud800"}, {}, ["a lone surrogate", "at index 0"]),
    ([1], {"stop_token_ids": [512]}, ["stop_token_ids", "512", "0 to 511"]),
    ([1], {"min_tokens": 4, "stop_token_ids": list(range(20))}, ["min_tokens=4", "21 stop and end", "at most 16"]),
    ([1], {"max_tokens": None, "min_tokens": 2**40}, ["min_tokens=", "lower min_tokens"]),
    ([1], {"max_tokens": 2**40, "min_tokens": 2**40}, ["max_tokens=", "max_model_len=128", "lower max_tokens"]),
]  # fmt: skip


@pytest.mark.parametrize("prompt,values,words", ERRORS, ids=[" ".join(e[2])[:50] for e in ERRORS])
def test_a_request_that_cannot_run_is_refused_and_the_engine_goes_on(
    engine: Engine, prompt: Any, values: dict[str, Any], words: list[str]
) -> None:
    llm = engine(**SMALL | {"cache.num_blocks": 20})
    with pytest.raises(RequestError) as error:
        run(llm, prompt, SamplingParams(**values))
    for word in words:
        assert word in str(error.value)
    usable(llm)


@pytest.mark.parametrize(
    "values", [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"logprobs": 99}]
)
def test_parameters_that_were_made_wrong_later_are_refused(engine: Engine, values: dict[str, Any]) -> None:
    llm = engine(**SMALL)
    with pytest.raises(RequestError):
        SamplingParams(**values)
    params = SamplingParams()
    for name, value in values.items():
        setattr(params, name, value)
    with pytest.raises(RequestError, match=next(iter(values))):
        run(llm, [[1]], params)
    usable(llm)


def test_no_prompt_is_named_for_parameters_that_all_share(engine: Engine) -> None:
    llm, wrong = engine(**SMALL), SamplingParams(logit_bias={99_999: 1.0})
    with pytest.raises(RequestError, match=r"^logit_bias: 99999 is outside"):
        run(llm, [[1], [2]], wrong)
    with pytest.raises(RequestError, match=r"^prompt 1: logit_bias: 99999 is outside"):
        run(llm, [[1], [2]], [SamplingParams(), wrong])
    usable(llm)


def test_one_bad_prompt_is_named_and_none_is_run(engine: Engine) -> None:
    llm = engine(**SMALL)
    with pytest.raises(RequestError, match=r"prompt 2: token id 999"):
        run(llm, [[1], [2], [999], [3]])
    assert llm.engine.stats.steps == 0
    usable(llm)


def test_an_id_twice_is_refused(engine: Engine) -> None:
    llm = engine(**SMALL)
    llm.engine.add_request("a", [1, 2], GREEDY)
    for params in (GREEDY, GREEDY.clone(n=2)):
        with pytest.raises(RequestError, match="'a' is already waiting or running"):
            llm.engine.add_request("a", [1, 2], params)
    llm.engine.add_request("b", [1, 2], GREEDY.clone(n=2, output_kind=RequestOutputKind.FINAL_ONLY))
    for other in ("0_b", "b_0", "b0"):  # whatever a completion's name may be
        llm.engine.add_request(other, [3], GREEDY.clone(output_kind=RequestOutputKind.FINAL_ONLY))
    assert llm.engine.num_unfinished_requests == 5
    assert {o.request_id for o in drain(llm)} == {"0_b", "a", "b", "b_0", "b0"}
    usable(llm)


# --------------------------------------------------------------------------- Ctrl-C


def test_ctrl_c_in_generate_leaves_a_usable_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(**SMALL)
    step, count = llm.engine.step, 0

    def interrupted() -> Any:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(llm, prompts_of(10), GREEDY.clone(max_tokens=30))
    monkeypatch.undo()
    usable(llm)


def test_ctrl_c_while_requests_come_in_leaves_none(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(**SMALL, **{"scheduler.max_num_batched_tokens": 16})
    launch = llm.engine.executor.launch

    def interrupted(batch: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return launch(batch)

    monkeypatch.setattr(llm.engine.executor, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(llm, [[5] * 16, [6] * 16])
    monkeypatch.undo()
    assert not llm.engine.has_unfinished_requests()
    usable(llm)


@pytest.mark.parametrize("split", ["in front of it", "behind it"])
def test_ctrl_c_while_a_request_is_queued_or_aborted_leaves_no_half_of_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    """The scheduler and the engine know the same requests, whichever of them Ctrl-C finds at work."""
    llm = engine(**SMALL)
    scheduler = llm.engine.scheduler

    def struck(inner: Callable[[Any], None]) -> Callable[[Any], None]:
        done = []

        def act(what: Any) -> None:
            if split == "behind it":
                inner(what)
            if not done:
                done.append(what)
                os.kill(os.getpid(), signal.SIGINT)
            if split == "in front of it":
                inner(what)

        return act

    monkeypatch.setattr(scheduler, "add", struck(scheduler.add))
    with pytest.raises(KeyboardInterrupt):
        run(llm, [[1, 2, 3], [4, 5, 6]])
    monkeypatch.undo()
    assert not scheduler.has_work and not llm.engine.has_unfinished_requests()
    llm.engine.add_request("a", [1, 2, 3], GREEDY.clone(n=2))
    monkeypatch.setattr(scheduler, "abort", struck(scheduler.abort))
    with pytest.raises(KeyboardInterrupt):
        llm.engine.abort("a")
    monkeypatch.undo()
    assert not scheduler.has_work and not llm.engine.has_unfinished_requests()
    usable(llm)


@pytest.mark.parametrize("pipeline", ["true", "false"])
@pytest.mark.parametrize("where", ["launch", "result", "schedule", "commit"])
@pytest.mark.parametrize("moment", [1, 2, 5])
def test_ctrl_c_anywhere_in_a_step_leaves_no_wrong_tokens_in_the_cache(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, pipeline: str, where: str, moment: int
) -> None:
    """A prompt whose step was cut off must not be found in the prefix cache; a neighbour loses nothing."""
    llm = engine(**SMALL, **{"scheduler.async_scheduling": pipeline})
    folder = Path(llm.engine.config.model.path or "")
    prompts, other = prompts_of(4, longest=40, seed=2), prompts_of(1, longest=40, seed=12)[0]
    llm.engine.add_request("other", other, GREEDY)
    runner = llm.engine.executor._worker.runner
    target, name = {
        "launch": (runner, "_launch_layers"),
        "result": (runner, "land"),
        "schedule": (llm.engine.scheduler.blocks, "take_updates"),
        "commit": (llm.engine.scheduler, "commit"),
    }[where]
    inner, count = getattr(target, name), 0

    def struck(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == moment:
            os.kill(os.getpid(), signal.SIGINT)  # as a terminal does it
        return inner(*args)

    monkeypatch.setattr(target, name, struck)
    with pytest.raises(KeyboardInterrupt):
        run(llm, prompts)
    monkeypatch.undo()
    got = {o.request_id: o.outputs[0].token_ids for o in drain(llm)}
    assert got == {"other": reference_tokens(folder, other, 8)}
    assert tokens(run(llm, prompts)) == [reference_tokens(folder, p, 8) for p in prompts]
    usable(llm)


def test_a_second_ctrl_c_does_not_wait_and_ends_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(**SMALL)

    def stuck(*_: Any) -> Any:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("went on after the second Ctrl-C")

    monkeypatch.setattr(llm.engine.executor, "launch", stuck)
    with pytest.raises(KeyboardInterrupt):
        run(llm, [[1]])
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(EngineDeadError, match="stopped earlier: KeyboardInterrupt"):
        run(llm, [[1]])


def test_ctrl_c_in_the_step_that_ends_a_request_loses_no_output(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of who goes on; not of who aborts it, or ends the engine."""
    llm = engine(**SMALL)
    commit = llm.engine.scheduler.commit

    def struck(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return commit(*args)

    def end_in_a_struck_step() -> None:
        llm.engine.add_request("a", [1, 2, 3], GREEDY.clone(max_tokens=1))
        monkeypatch.setattr(llm.engine.scheduler, "commit", struck)
        with pytest.raises(KeyboardInterrupt):
            llm.engine.step()
        monkeypatch.undo()
        assert llm.engine.has_unfinished_requests()

    for aborts in (False, True):
        end_in_a_struck_step()
        if aborts:
            llm.engine.abort("a")
        assert [output.finished for output in llm.engine.step()] == [True] * (not aborts)
        drain(llm)
    usable(llm)
    end_in_a_struck_step()
    llm.shutdown()
    assert not llm.engine.has_unfinished_requests()


def test_an_observer_that_aborts_leaves_ctrl_c_as_it_was(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(**SMALL)

    class Aborts:
        def scheduled(self, *_: Any) -> None: ...

        def launched(self, *_: Any) -> None: ...

        def committed(self, *_: Any) -> None:
            llm.engine.abort("a")

    monkeypatch.setattr(llm.engine, "observer", Aborts())
    for name in "ab":
        llm.engine.add_request(name, [1, 2, 3], GREEDY)
    assert [output.request_id for output in drain(llm)] == ["b"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_before_a_step_begins_leaves_the_next_ones_whole(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, was = engine(**SMALL), interrupts.handlers.getsignal

    def struck(number: int) -> Any:
        monkeypatch.setattr(interrupts.handlers, "getsignal", was)
        raise KeyboardInterrupt

    llm.engine.add_request("a", [1, 2, 3], GREEDY)
    monkeypatch.setattr(interrupts.handlers, "getsignal", struck)
    with pytest.raises(KeyboardInterrupt):
        llm.engine.step()
    commit = llm.engine.scheduler.commit

    def struck_again(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return commit(*args)

    monkeypatch.setattr(llm.engine.scheduler, "commit", struck_again)
    with pytest.raises(KeyboardInterrupt):
        llm.engine.step()
    monkeypatch.undo()
    assert [output.finished for output in drain(llm)] == [True]
    usable(llm)


def test_somebody_elses_ctrl_c_handler_is_left_alone(engine: Engine) -> None:
    llm, seen = engine(**SMALL), []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        launch = llm.engine.executor.launch
        llm.engine.executor.launch = lambda batch: (os.kill(os.getpid(), signal.SIGINT), launch(batch))[1]
        run(llm, [[1]])
        del llm.engine.executor.launch
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(seen) == 8
    usable(llm)


# --------------------------------------------------------------------------- the engine beneath


def drain(llm: LLM) -> list[RequestOutput]:
    """Step to the end; the last output of each request."""
    last: dict[str, RequestOutput] = {}
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            last[output.request_id] = output
    assert all(o.finished for o in last.values())
    return list(last.values())


@pytest.mark.parametrize("moment", range(7))
def test_abort_at_any_moment(engine: Engine, moment: int) -> None:
    llm = engine(**SMALL, **{"scheduler.max_num_batched_tokens": 16})
    folder, prompts = Path(llm.engine.config.model.path or ""), prompts_of(4, longest=30, seed=6)
    for i, prompt in enumerate(prompts):
        llm.engine.add_request(str(i), prompt, GREEDY)
    for _ in range(moment):
        llm.engine.step()
    llm.engine.abort("1")
    llm.engine.abort(["2", "2", "unknown"])
    outputs = drain(llm)
    assert not {"1", "2"} & {o.request_id for o in outputs} and len(outputs) == 2
    for o in outputs:
        assert o.outputs[0].token_ids == reference_tokens(folder, prompts[int(o.request_id)], 8)
    usable(llm)


def test_whether_the_next_step_is_of_decodes_alone_is_known_before(engine: Engine) -> None:
    """With more requests than slots, chunks of prompts, preemption and aborts."""
    llm = engine(**{"scheduler.max_num_seqs": 3, "cache.num_blocks": 12, "scheduler.max_num_batched_tokens": 16})
    schedule, seen, said = llm.engine.scheduler.schedule, [], False

    def checked() -> Batch | None:
        batch = schedule()
        if batch is not None:
            seen.append((said, batch.num_decodes == len(batch.slots)))
        return batch

    llm.engine.scheduler.schedule = checked  # type: ignore[method-assign]
    for i, prompt in enumerate(prompts_of(14, longest=60, seed=3)):
        llm.engine.add_request(str(i), prompt, GREEDY.clone(max_tokens=5 + 9 * i % 40))
    for i in itertools.count():
        if not llm.engine.has_unfinished_requests():
            break
        said = llm.engine.decodes_next
        llm.engine.step()
        if i == 60:
            llm.engine.abort("9")
    assert not llm.engine.decodes_next
    assert (True, False) not in seen, "it was promised"
    assert seen.count((True, True)) > 20 and seen.count((False, False)) > 20


def test_abort_of_one_with_several_completions(engine: Engine) -> None:
    llm = engine(**SMALL)
    llm.engine.add_request("many", [1, 2, 3], GREEDY.clone(n=4))
    llm.engine.add_request("one", [1, 2, 3], GREEDY)
    llm.engine.step()
    llm.engine.abort("many")
    assert llm.engine.num_unfinished_requests == 1
    assert [o.request_id for o in drain(llm)] == ["one"]
    usable(llm)


def test_a_name_of_a_completion_that_has_ended_is_anybodys(engine: Engine) -> None:
    llm = engine(**SMALL)
    first = llm.generate([1, 2, 3], GREEDY.clone(n=2, temperature=1.0, seed=0), use_tqdm=False)[0].outputs
    index = next(i for i, one in enumerate(first) if one.token_ids[0] != first[1 - i].token_ids[0])
    ends = GREEDY.clone(n=2, temperature=1.0, seed=0, max_tokens=40, stop_token_ids=[first[index].token_ids[0]])
    llm.engine.add_request("x", [1, 2, 3], ends)
    while f"x{COMPLETION}{index}" in llm.engine._requests._by_sequence:
        llm.engine.step()
    llm.engine.add_request(f"x{COMPLETION}{index}", [4, 5, 6], GREEDY)
    llm.engine.abort("x")
    assert [(o.request_id, len(o.outputs[0].token_ids)) for o in drain(llm)] == [(f"x{COMPLETION}{index}", 8)]
    usable(llm)


def test_each_request_has_the_parameters_that_it_was_added_with(engine: Engine) -> None:
    llm = engine(**SMALL)
    params = GREEDY.clone(max_tokens=3)
    for name, most in (("a", 3), ("b", 3), ("c", 5), ("d", 5), ("e", 2)):
        params.max_tokens = most
        llm.engine.add_request(name, [1, 2, 3], params)
    params.max_tokens = 7
    assert {o.request_id: len(o.outputs[0].token_ids) for o in drain(llm)} == {"a": 3, "b": 3, "c": 5, "d": 5, "e": 2}
    usable(llm)


def test_parameters_may_hold_arrays(engine: Engine) -> None:
    llm = engine(**SMALL)
    said = llm.generate([1, 2, 3], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    for name in ("a", "b"):
        params = GREEDY.clone()
        params.stop_token_ids = np.array([said[1], 500])  # type: ignore[assignment]
        llm.engine.add_request(name, [1, 2, 3], params)
    assert [o.outputs[0].token_ids for o in drain(llm)] == [said[: said.index(said[1]) + 1]] * 2
    usable(llm)


def test_generate_beside_requests_of_the_engine_beneath(engine: Engine) -> None:
    llm = engine(**SMALL)
    folder, prompts = Path(llm.engine.config.model.path or ""), prompts_of(3, seed=4)
    llm.engine.add_request("mine", prompts[0], GREEDY.clone(max_tokens=40))
    assert tokens(run(llm, prompts[1:])) == [reference_tokens(folder, p, 8) for p in prompts[1:]]
    assert llm.engine.num_unfinished_requests == 1
    [mine] = drain(llm)
    assert mine.outputs[0].token_ids == reference_tokens(folder, prompts[0], 40)


def test_requests_may_come_while_others_run(engine: Engine) -> None:
    llm = engine(**SMALL)
    folder, prompts = Path(llm.engine.config.model.path or ""), prompts_of(12, longest=40, seed=3)
    final: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        llm.engine.add_request(str(i), prompt, GREEDY.clone(output_kind=RequestOutputKind.FINAL_ONLY))
        for output in llm.engine.step():
            final[output.request_id] = output.outputs[0].token_ids
    final |= {o.request_id: o.outputs[0].token_ids for o in drain(llm)}
    assert final == {str(i): reference_tokens(folder, p, 8) for i, p in enumerate(prompts)}


@pytest.mark.parametrize("pipeline", [True, False])
def test_a_full_step_does_not_wait_for_the_requests_behind(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, pipeline: bool
) -> None:
    llm = engine(**SMALL, **{"scheduler.max_num_batched_tokens": 16, "scheduler.async_scheduling": pipeline})
    prompts, launched, after = [[n + 3] * 7 for n in range(6)], [], []
    expected = tokens(run(llm, prompts))
    llm.reset_prefix_cache()
    launch = llm.engine.executor.launch
    monkeypatch.setattr(llm.engine.executor, "launch", lambda batch: launched.append(batch) or launch(batch))
    for n, prompt in enumerate(prompts):
        llm.engine.add_request(str(n), prompt, GREEDY)
        after.append(len(launched))
    assert after == ([0, 0, 1, 1, 1, 1] if pipeline else [0] * 6)
    outputs: dict[str, RequestOutput] = {}
    while llm.engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.engine.step() if output.finished}
    assert tokens([outputs[str(n)] for n in range(6)]) == expected
    with pytest.raises(RequestError, match="prompt 6: token id 512"):
        run(llm, [*prompts, [512]])
    assert not llm.engine.has_unfinished_requests()
    usable(llm)


def test_a_full_step_that_fails_at_once_ends_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(batch: Any) -> Any:
        raise ValueError("boom")

    llm = engine(**SMALL, **{"scheduler.max_num_batched_tokens": 16})
    monkeypatch.setattr(llm.engine.executor, "launch", fail)
    with pytest.raises(EngineDeadError, match="ValueError: boom"):
        llm.engine.add_request("0", [5] * 16, GREEDY)
    with pytest.raises(EngineDeadError, match="stopped earlier"):
        llm.engine.step()


def test_a_step_with_nothing_to_do_is_empty(engine: Engine) -> None:
    llm = engine(**SMALL)
    assert llm.engine.step() == [] and not llm.engine.has_unfinished_requests()
    usable(llm)


def test_stats_count_what_happened(engine: Engine) -> None:
    llm = engine(**SMALL)
    run(llm, [[1, 2, 3], [4, 5]], GREEDY)
    stats = llm.engine.stats
    assert (stats.prompt_tokens, stats.output_tokens) == (5, 16)
    assert 8 <= stats.steps < 16 and stats.preemptions == stats.cached_tokens == 0  # both in the same steps


# --------------------------------------------------------------------------- several engines, ends of engines


def test_two_engines_one_after_the_other_and_two_at_once(engine: Engine, tiny_checkpoint: Callable[..., Path]) -> None:
    folders = [tiny_checkpoint("qwen3"), tiny_checkpoint("llama", seed=1)]
    prompts = prompts_of(5, seed=21)
    params = [GREEDY, *[SamplingParams(seed=i, max_tokens=9, ignore_eos=True) for i in range(4)]]
    alone = []
    for folder in folders:
        llm = engine(folder, **SMALL)
        alone.append(tokens(run(llm, prompts, params)))
        llm.shutdown()
    assert alone[0] != alone[1]
    both = [engine(folder, **SMALL) for folder in folders]
    for llm in both:
        for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            llm.engine.add_request(str(i), prompt, one)
    final: list[dict[str, list[int]]] = [{}, {}]
    while any(llm.engine.has_unfinished_requests() for llm in both):
        for llm, mine in zip(both, final, strict=True):
            for output in llm.engine.step():
                mine[output.request_id] = output.outputs[0].token_ids
    assert [[mine[str(i)] for i in range(5)] for mine in final] == alone
    both[0].shutdown()
    assert tokens(run(both[1], prompts, params)) == alone[1], "one engine's end is not the other's"


def test_a_shut_down_engine_says_so_and_can_be_shut_down_again(engine: Engine) -> None:
    with engine(**SMALL) as llm:
        llm.engine.add_request("a", [1, 2], GREEDY)
        llm.engine.step()
    llm.shutdown()
    llm.engine.shutdown()
    for use in (lambda: run(llm, [[1]]), lambda: llm.engine.add_request("b", [1]), llm.engine.step):
        with pytest.raises(EngineDeadError, match="shut down; make a new one"):
            use()
    assert not llm.engine.has_unfinished_requests()


def test_an_abort_that_fails_is_one_clear_error(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(**SMALL)

    def broken(*_: Any) -> Any:
        raise KeyError("a")

    llm.engine.add_request("a", [1], GREEDY)
    monkeypatch.setattr(llm.engine.scheduler, "abort", broken)
    place = r"\(\S*test_llm, line \d+, in broken\)"
    with pytest.raises(EngineDeadError, match=f"an abort failed: KeyError: 'a' {place}"):
        llm.engine.abort("a")
    with pytest.raises(EngineDeadError, match="stopped earlier: 'a'"):
        llm.engine.step()


@pytest.mark.parametrize("where", ["launch", "result"])
def test_a_step_that_fails_is_one_clear_error_and_the_engine_stays_dead(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    llm = engine(**SMALL)

    def broken(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    class Handle:
        result = broken

    monkeypatch.setattr(llm.engine.executor, "launch", broken if where == "launch" else lambda batch: Handle())
    place = r"\(\S*test_llm, line \d+, in broken\)"
    with pytest.raises(EngineDeadError, match=f"a step failed: RuntimeError: out of memory {place}"):
        run(llm, [[1], [2]])
    monkeypatch.undo()
    with pytest.raises(EngineDeadError, match=r"stopped earlier: .*out of memory"):
        run(llm, [[1]])
    llm.shutdown()
    llm.shutdown()


def test_a_request_aborted_from_elsewhere_ends_generate_with_an_error(engine: Engine) -> None:
    llm = engine(**SMALL)
    step = llm.engine.step

    def aborting() -> list[RequestOutput]:
        llm.engine.abort(["0", "1"])
        return step()

    llm.engine.step = aborting  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="2 of 2 requests were aborted from elsewhere"):
        run(llm, [[1, 2], [3]])
    llm.engine.step = step  # type: ignore[method-assign]
    usable(llm)


def test_an_engine_shut_down_from_elsewhere_ends_generate_with_its_own_error(engine: Engine) -> None:
    """At any place: the step may end before, and then nothing is left to wait for."""
    llm = engine(**SMALL)
    step = llm.engine.step

    def ending() -> list[RequestOutput]:
        step()
        llm.shutdown()
        return []

    llm.engine.step = ending  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError, match="the engine was shut down; make a new one"):
        run(llm, [[1, 2], [3]])


def test_max_logprobs_is_the_most_that_a_request_may_ask_for(engine: Engine) -> None:
    llm = engine(**SMALL, max_logprobs=2)
    asked = SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=1)
    assert all(len(at) >= 2 for at in run(llm, [1, 2], asked)[0].outputs[0].logprobs or [])
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(RequestError, match=f"^{name}=3 is more than max_logprobs=2, .*; ask for fewer"):
            run(llm, [1, 2], asked.clone(**{name: 3}))
    usable(llm)


def test_ranks_found_dead_between_steps_are_told_as_those_found_in_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine()

    def dead() -> None:
        raise EngineDeadError("rank 1 is gone")

    monkeypatch.setattr(llm.engine.executor, "check_health", dead)
    with pytest.raises(EngineDeadError, match="rank 1 is gone"):
        llm.engine.step()
    with pytest.raises(EngineDeadError, match="stopped earlier: rank 1 is gone"):
        llm.engine.step()


def test_a_scheduler_that_gives_no_step_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than asked for ever."""
    llm = engine(**SMALL)
    monkeypatch.setattr("minivllm.core.engine._PATIENCE", 0.05)
    monkeypatch.setattr(llm.engine.scheduler, "schedule", lambda: None)
    with pytest.raises(MinivllmError, match="scheduler=mixed has requests, no step is under way"):
        run(llm, [[1]])


def test_a_scheduler_that_loses_a_request_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than waited for for ever."""
    llm = engine(**SMALL)
    monkeypatch.setattr("minivllm.core.engine._PATIENCE", 0.05)
    monkeypatch.setattr(llm.engine.scheduler, "add", lambda seq: None)
    llm.engine.add_request("a", [1])
    assert llm.engine.step() == []
    time.sleep(0.1)
    with pytest.raises(MinivllmError, match="scheduler=mixed has requests, no step is under way"):
        llm.engine.step()


def test_a_step_runs_on_its_own_gpu_whatever_the_thread_that_asks_uses(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for a GPU's number; torch keeps that of each thread."""
    worker = engine(**SMALL).engine.executor._worker  # type: ignore[attr-defined]
    current, seen = [2], []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(worker, "device_type", "cuda")
    monkeypatch.setattr(worker, "device_index", 1)
    monkeypatch.setattr(worker, "runner", SimpleNamespace(launch=lambda batch: seen.append((batch, current[0]))))
    worker.launch("a step")
    assert seen == [("a step", 1)] and current == [2]
    current[0] = 1
    worker.launch("another")
    assert seen[1:] == [("another", 1)]
    monkeypatch.undo()


def test_biases_are_for_samplers_that_take_them(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine()
    params = GREEDY.clone(logit_bias={"7": 1e30}, max_tokens=3)  # JSON's keys are strings
    assert run(llm, [1], params)[0].outputs[0].token_ids == [7, 7, 7]
    for wrong in ({"logit_bias": {10**6: 1.0}}, {"allowed_token_ids": [10**6]}):
        with pytest.raises(RequestError, match=f"{next(iter(wrong))}: 1000000 is outside the vocabulary"):
            run(llm, [1], GREEDY.clone(**wrong))
    monkeypatch.setattr(DefaultSampler, "takes_biases", False)
    with pytest.raises(RequestError, match="sampler=default does not support logit_bias; leave it out"):
        run(llm, [1], params)
    run(llm, [1], GREEDY)


@pytest.mark.parametrize(("asked", "before", "threads"), [(None, 4, 2), (None, 1, 1), ("3", 3, 3)])
def test_a_cpu_takes_no_more_threads_than_a_container_grants(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, asked: str | None, before: int, threads: int
) -> None:
    monkeypatch.setattr("minivllm.executors.worker.usable_cores", lambda: 2)
    if asked is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    torch.set_num_threads(before)
    engine(**SMALL)
    assert torch.get_num_threads() == threads
