"""Replicas over a Ray Dataset say what one LLM says, row by row; what is wrong is one clear error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError, RequestError

ray = pytest.importorskip("ray")
data = pytest.importorskip("ray.data")
import pyarrow
from ray.exceptions import RayError

from minivllm.data import Replica, map_batches

Checkpoints = Callable[..., Path]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def app() -> Iterator[None]:
    """A program that uses Ray already."""
    ray.init(
        "local", num_cpus=3, num_gpus=0, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False
    )
    data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


def test_two_replicas_say_what_one_llm_says(app: None) -> None:
    """With the code of the documentation."""
    page = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "map_batches(" in block)
    names: dict[str, Any] = {}
    exec(code, names)
    said = sorted(names["rows"], key=lambda row: row["chapter"])
    prompts = [f"Chapter {i}. The fox" for i in range(8)]
    with LLM("demo", device="cpu") as llm:
        alone = [output.outputs[0] for output in llm.generate(prompts, names["params"], use_tqdm=False)]
    assert [row["prompt"] for row in said] == prompts
    assert [row["generated_text"] for row in said] == [one.text for one in alone]
    assert [list(row["generated_token_ids"]) for row in said] == [one.token_ids for one in alone]
    assert [row["finish_reason"] for row in said] == [one.finish_reason for one in alone]


def test_a_replica_of_two_ranks_takes_token_ids(app: None, tiny_checkpoint: Checkpoints) -> None:
    folder, prompts = str(tiny_checkpoint("qwen3")), [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    dataset = data.from_items([{"ids": ids} for ids in prompts], override_num_blocks=1)
    options: dict[str, Any] = {"prompt_column": "ids", "sampling_params": GREEDY, "device": "cpu", "tp": 2}
    said = map_batches(dataset, folder, **options).take_all()
    with LLM(folder, device="cpu") as llm:
        alone = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert [list(row["generated_token_ids"]) for row in said] == alone


def test_a_prompt_that_can_never_run_ends_the_dataset_with_its_error(app: None) -> None:
    dataset = data.from_items([{"prompt": "fine"}, {"prompt": "too long " * 2000}], override_num_blocks=1)
    with pytest.raises(RayError, match=r"minivllm.errors.ContextLengthError: prompt 1: .*max_model_len"):
        map_batches(dataset, sampling_params=GREEDY, device="cpu").take_all()


@pytest.mark.parametrize("column", [[5, 6], [5], ["text", None], [1.5]])
def test_a_column_that_holds_no_prompts(column: list[Any]) -> None:
    """Whole numbers, one a row, are not the token ids of one prompt."""
    replica = object.__new__(Replica)
    replica.llm, replica.prompt_column, replica.params = None, "id", GREEDY  # type: ignore[assignment]
    with pytest.raises(RequestError, match=r"prompt_column='id' holds (5|None|1\.5): a prompt is text or a list"):
        replica(pyarrow.table({"id": column}))


def test_what_cannot_run_is_said_at_once(app: None) -> None:
    dataset = data.from_items([{"prompt": "x"}])
    for options, message in [
        ({"overrides": ["executor=ray"]}, "executor=ray in map_batches"),
        ({"overrides": ["cache.blocks=3"]}, "cache.blocks"),
        ({"device": "cuda"}, "no GPU"),
        ({"concurrency": 0}, "concurrency=0"),
    ]:
        with pytest.raises(ConfigError, match=message):
            map_batches(dataset, **options)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="n=2"):
        map_batches(dataset, sampling_params=SamplingParams(n=2))
