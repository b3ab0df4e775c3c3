"""The bundled demo model: small, loads by its name, says what transformers says, and answers simple questions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import reference_tokens

import minivllm
from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError

DEMO = Path(minivllm.__file__).parent / "models" / "demo"
NAMES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    overrides = ["cache.num_blocks=256"]
    with LLM("demo", device="cpu", dtype="float32", attention="torch", overrides=overrides) as made:
        yield made


def test_folder_is_complete_and_small() -> None:
    files = [file for file in DEMO.rglob("*") if file.is_file()]
    assert {file.name for file in files} >= NAMES
    assert sum(file.stat().st_size for file in files) <= 12 * 1024 * 1024


def test_greedy_equals_transformers(llm: LLM) -> None:
    # At every one of these tokens the best logit leads by 0.02 or more: rounding does not decide.
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(["Once upon a time", "A KV cache is"], params, use_tqdm=False)
    for output in outputs:
        expected = reference_tokens(DEMO, output.prompt_token_ids, 24)
        assert list(output.outputs[0].token_ids) == expected, output.prompt


@pytest.mark.parametrize(
    "question,answer",
    [("What is the capital of France?", "Paris"), ("What is 7 plus 5?", "12"), ("What is a KV cache?", "keys")],
)
def test_answers_and_ends_its_turn(llm: LLM, question: str, answer: str) -> None:
    text, reason = ask(llm, question)
    assert answer in text
    assert reason == "stop"


def test_greeting_gets_a_sentence(llm: LLM) -> None:
    text, reason = ask(llm, "Hello!")
    assert len(text) > 1 and text.endswith((".", "!", "?")), text
    assert reason == "stop"


def test_the_tokenizer_is_transformers_own_as_in_vllm(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is 7 plus 5?"}]
    text = llm.get_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    params = SamplingParams(max_tokens=80, temperature=0.0)
    alone = llm.generate(text, params, use_tqdm=False)[0].outputs[0].text
    assert alone == llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text


def test_an_unknown_option_of_the_model_is_told_with_the_name_that_was_typed() -> None:
    with pytest.raises(
        ConfigError, match=r"model.options.a: model=demo is a qwen3, and qwen3 has no such option. Allowed: none"
    ):
        LLM("demo", device="cpu", overrides=["model.options.a=1"])


def test_its_tokenizer_is_found_by_its_name(llm: LLM) -> None:
    shape = ["load_format=dummy", "cache.num_blocks=8", "attention=torch"]
    with LLM("demo", tokenizer="demo", device="cpu", overrides=shape) as other:
        assert other.get_tokenizer().encode("Hello!") == llm.get_tokenizer().encode("Hello!")


def ask(llm: LLM, question: str) -> tuple[str, str | None]:
    params = SamplingParams(max_tokens=80, temperature=0.0)
    completion = llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)[0].outputs[0]
    return completion.text.strip(), completion.finish_reason
