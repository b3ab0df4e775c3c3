"""CUDA graphs of ranks on a CPU: imported by a plugin, it makes each rank's runner capture and replay stand-ins, and
write down what."""

from __future__ import annotations

import os
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from recorded import Recorded

from minivllm.backends.torch import TorchBackend
from minivllm.core import cuda_graphs, mixed_graphs
from minivllm.core.batch import NO_INTS
from minivllm.core.cuda_graphs import DecodeGraphs, Kept, Key
from minivllm.core.landing import Layout, Packed
from minivllm.core.mixed_graphs import MixedGraphs
from minivllm.core.model_runner import ModelRunner
from minivllm.executors.worker import Worker

PROMPT_TOKENS = 64  # of a graph of decodes and prompts, at most


def take_graphs(runner: ModelRunner, rank: int, num_blocks: int, vocab: int) -> None:
    def say(what: str) -> None:
        with open(f"{os.environ['RECORDED']}.{rank}", "a") as file:
            file.write(what + "\n")

    def capture_graph(run: partial[Any], pool: Any) -> tuple[Recorded, Any]:
        result: Kept | Packed
        if isinstance(run.args[0], Kept):
            _, rows, kind, _ = run.args
            name, best = f"refine {rows} {tuple(kind)}", kind.best
            words = torch.full((rows * (2 + 2 * (best > 0) + 2 * best),), -1, dtype=torch.int32)
            result = Packed(words, Layout(rows, np.arange(rows) if best else NO_INTS, best))
        else:
            key, rows = run.args[0], run.args[0][0]
            decodes = isinstance(key, Key)
            name = f"step {rows if decodes else key}"
            logits = None if rows >= 16 or not decodes else torch.empty(rows, vocab)
            result = Kept(torch.empty(rows, runner.hidden_size), torch.full((rows,), -1), logits)
        say(f"capture {name}")
        return Recorded(run, result, lambda: say(f"replay {name}")), result

    def gather_and_plan(gather: Any, *args: Any) -> None:  # the torch backend wants lengths and block tables
        gather(*args)
        batch = runner.attention.batch
        assert batch is not None
        batch.host_seq_lens[: len(batch.seq_lens)] = batch.seq_lens
        runner.attention.plan(batch)

    plan_chunk = TorchBackend._plan_chunk
    TorchBackend._plan_chunk = lambda self, batch, i, start, count: (  # type: ignore[method-assign,assignment]
        plan_chunk(self, batch, i, start, count) if count else []
    )
    torch.cuda.graph_pool_handle = lambda: None  # type: ignore[assignment,return-value]
    runner.attention.plans_on_host = True
    for module in (cuda_graphs, mixed_graphs):
        module.capture_graph = capture_graph  # type: ignore[assignment]
        module.decode_inputs = partial(gather_and_plan, module.decode_inputs)  # type: ignore[assignment]
    mixed_graphs.prompt_inputs = partial(gather_and_plan, mixed_graphs.prompt_inputs)  # type: ignore[assignment]
    mixed_graphs._ROWS, mixed_graphs._OFTEN, mixed_graphs._TOKENS = 8, 2, (16, PROMPT_TOKENS)
    runner.graphs = DecodeGraphs(runner, runner.num_slots)
    runner.graphs.capture(num_blocks, vocab)
    prompts: Any = SimpleNamespace(
        flop=1,
        most_padding=1000,
        longest=1000,
        size_for=lambda batch: None,
        takes_apart=lambda batch: False,
        sees_too_much=lambda batch: False,
    )
    runner.mixed_graphs = MixedGraphs(runner, runner.graphs, prompts, PROMPT_TOKENS)


if sys.argv[0] == "rank":
    start = Worker.start

    def start_and_take_graphs(self: Worker) -> int:
        num_blocks = start(self)
        assert self.runner is not None
        with torch.inference_mode():
            take_graphs(self.runner, self.tp.rank, num_blocks, self.model_config.vocab_size)
        return num_blocks

    Worker.start = start_and_take_graphs  # type: ignore[method-assign]
