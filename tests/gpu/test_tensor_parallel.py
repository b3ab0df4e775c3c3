"""Several GPUs say what one says, graphs on and off; what is killed leaves no memory behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from test_engine import GREEDY, PROMPTS, assert_close, llguidance

from minivllm import LLM, RequestOutput, SamplingParams
from minivllm.core.parallel import TensorParallel
from minivllm.errors import EngineDeadError
from minivllm.kernels import nvrtc
from minivllm.kernels.collectives.exchange import least_rows

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two CUDA GPUs")]
SIZES = [tp for tp in (2, 4) if tp <= max(GPUS, 2)]


@pytest.fixture(scope="module")
def on_one() -> list[RequestOutput]:
    with LLM("demo", attention="triton", max_num_seqs=16, gpu_memory_utilization=0.3) as llm:
        return llm.generate(PROMPTS, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("tp", SIZES)
def test_the_demo_says_the_same_on_several(tp: int, eager: bool, on_one: list[RequestOutput]) -> None:
    with LLM("demo", attention="triton", tp=tp, enforce_eager=eager or None, max_num_seqs=16) as llm:
        about = llm.engine.describe()
        assert about["ranks"] == tp and about["cuda_graphs"] is not eager
        for _ in range(2):
            for ours, reference in zip(llm.generate(PROMPTS, GREEDY, use_tqdm=False), on_one, strict=True):
                assert_close(ours, reference)


@pytest.mark.parametrize("tp", SIZES)
def test_each_of_several_has_the_draft_model(tp: int, on_one: list[RequestOutput]) -> None:
    drafts = {"model": "demo", "num_speculative_tokens": 4}
    with LLM("demo", attention="triton", tp=tp, max_num_seqs=40, speculative_config=drafts) as llm:
        for ours, reference in zip(llm.generate(PROMPTS, GREEDY, use_tqdm=False), on_one, strict=True):
            assert_close(ours, reference)
        stats = llm.engine.stats
        assert stats.accepted_tokens > 0.9 * stats.draft_tokens > 0


def test_graphs_change_no_token_in_float32() -> None:
    """With every kind of sampling; so many at first that ranks sample together, and few at the end."""
    prompts = [p for p in PROMPTS for _ in range(4)]
    params = [
        SamplingParams(
            temperature=0.8 if i % 3 else 0, seed=i, max_tokens=3 + 7 * i % 50, ignore_eos=True,
            top_k=20 if i % 5 == 1 else 0, top_p=0.9 if i % 4 == 1 else 1, frequency_penalty=0.3 if i % 7 == 0 else 0,
            logit_bias={7: 2.5, 300: -4.0} if i % 6 == 2 else None, allowed_token_ids=[*range(99)] if i == 9 else None,
            structured_outputs={"regex": "[a-z ,.]*"} if i % 8 == 7 and llguidance else None,
            bad_words=["the", "a"] if i % 8 == 4 else None,
        )
        for i in range(len(prompts))
    ]  # fmt: skip
    texts = []
    for eager in (True, False):
        with LLM(
            "demo", attention="triton", tp=2, dtype="float32", enforce_eager=eager or None, max_num_seqs=24
        ) as llm:
            texts.append([o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("tp", SIZES)
def test_dummy_qwen3_says_the_same_on_several(tp: int) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(10000) for _ in range(rng.randint(5, 300))] for _ in range(8)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=20)
    options = {"load_format": "dummy", "max_num_seqs": 16, "max_model_len": 1024, "gpu_memory_utilization": 0.3}
    said = []
    for size in (1, tp):
        with LLM("qwen3", attention="triton", tp=size, **options) as llm:
            said.append(llm.generate(prompts, params, use_tqdm=False))
    for ours, reference in zip(said[1], said[0], strict=True):
        assert_close(ours, reference)


@pytest.mark.parametrize("tp", SIZES)
def test_ranks_with_packed_weights_say_the_same(tp: int) -> None:
    """Each has its parts in 12 bits: decodes of one and of few rows, prompts, rows of which ranks draw together."""
    if not nvrtc.available(torch.device("cuda")):
        pytest.skip("no Hopper GPU, or no cuda-bindings")
    rng = random.Random(2)
    prompts = [[rng.randrange(10000) for _ in range(rng.randint(5, 90))] for _ in range(40)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=20)
    options = {"load_format": "dummy", "max_num_seqs": 64, "max_model_len": 1024, "gpu_memory_utilization": 0.3}
    said = []
    for packed in ("true", "false"):
        overrides = ["model.hf_config.num_hidden_layers=2", f"packed_weights={packed}"]
        with LLM("qwen3-8b", attention="triton", tp=tp, overrides=overrides, **options) as llm:
            assert llm.engine.describe()["packed_weights"] == (packed == "true")
            said.append([out for some in (prompts[:1], prompts) for out in llm.generate(some, params, use_tqdm=False)])
    for ours, reference in zip(*said, strict=True):
        assert_close(ours, reference)


@pytest.mark.parametrize("full", [False, True], ids=["part by part", "products wait"])
@pytest.mark.parametrize("tp", SIZES)
def test_large_steps_whose_sums_go_beside_products_say_the_same(tp: int, full: bool) -> None:
    """Of 8,192 tokens a rank's products have even shares, and wait for rows by themselves."""
    rng = random.Random(1)
    tokens = max(8192, least_rows(tp)) if full else least_rows(tp) + 300
    prompts = [[rng.randrange(10000) for _ in range(rng.randint(300, 900))] for _ in range(2 * tokens // 600)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=20)
    options = {"load_format": "dummy", "max_num_seqs": 64, "max_model_len": 1024, "gpu_memory_utilization": 0.3}
    batched = [f"scheduler.max_num_batched_tokens={tokens}"]
    said = []
    for size in (1, tp):
        with LLM("qwen3", attention="triton", tp=size, enforce_eager=True, overrides=batched, **options) as llm:
            said.append(llm.generate(prompts, params, use_tqdm=False))
    for ours, reference in zip(said[1], said[0], strict=True):
        assert_close(ours, reference)


def test_prefixes_that_several_gpus_read_once_change_nothing() -> None:
    """128 rows save 260,000 keys a layer, 530 MB of each rank, and have nobody decode beside others' prompts."""
    rng = random.Random(3)
    prefix = [rng.randrange(10000) for _ in range(2048)]
    prompts = [prefix + [rng.randrange(10000) for _ in range(rng.randint(1, 40))] for _ in range(128)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=20)
    options = {"load_format": "dummy", "max_num_seqs": 128, "max_model_len": 4096, "gpu_memory_utilization": 0.5}
    said = []
    for cascade in ("false", "true"):
        with LLM("qwen3", attention="triton", tp=2, overrides=[f"attention.cascade={cascade}"], **options) as llm:
            said.append(llm.generate(prompts, params, use_tqdm=False))
    for ours, reference in zip(said[1], said[0], strict=True):
        assert_close(ours, reference)


def test_500_random_requests_with_aborts_end_and_leak_nothing() -> None:
    rng = random.Random(0)
    prefix = [rng.randrange(1000) for _ in range(70)]
    blocks = 180
    overrides = ["scheduler.max_num_batched_tokens=512"]
    with LLM("demo", tp=2, max_num_seqs=48, num_gpu_blocks_override=blocks, overrides=overrides) as llm:
        engine, done, aborted = llm.engine, set(), set()
        for i in range(500):
            shared = prefix[: rng.choice([16, 40, 70])] if i % 2 else []
            prompt = shared + [rng.randrange(1000) for _ in range(1 + i % 60)]
            params = SamplingParams(
                temperature=rng.choice([0, 0.7]), seed=i, max_tokens=rng.randint(1, 60), ignore_eos=True,
                top_k=rng.choice([0, 0, 20]), top_p=rng.choice([1.0, 0.9]), logprobs=rng.choice([None, None, 3]),
            )  # fmt: skip
            engine.add_request(str(i), prompt, params)
        while engine.has_unfinished_requests():
            done |= {int(o.request_id) for o in engine.step() if o.finished}
            if rng.random() < 0.1 and (victim := rng.randrange(500)) not in done:
                engine.abort(str(victim))
                aborted.add(victim)
        engine.scheduler.check()
        assert engine.stats.preemptions > 0 and engine.stats.cached_tokens > 0
        assert engine.scheduler.blocks.num_free == blocks
        assert done | aborted == set(range(500))


def free() -> list[int]:
    return [torch.cuda.mem_get_info(gpu)[0] for gpu in range(2)]


def test_a_killed_rank_leaves_no_memory_and_a_new_engine_starts() -> None:
    before = free()
    llm = LLM("demo", tp=2, max_num_seqs=8, gpu_memory_utilization=0.5)
    llm.engine.add_request("a", "Once upon a time", SamplingParams(max_tokens=1500, ignore_eos=True))
    for _ in range(5):
        llm.engine.step()
    assert min(b - f for b, f in zip(before, free(), strict=True)) > 1 << 30
    os.kill(llm.engine.executor._ranks.ranks[1].process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match="rank 1"):
        while True:
            llm.engine.step()
    assert time.monotonic() - began < 5
    after = free()
    assert max(b - a for b, a in zip(before, after, strict=True)) < 64 << 20, (before, after)
    with LLM("demo", tp=2, max_num_seqs=8, gpu_memory_utilization=0.5) as new:
        assert new.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_a_stopped_rank_is_named_within_ten_seconds() -> None:
    llm = LLM("demo", tp=2, max_num_seqs=8, gpu_memory_utilization=0.5)
    llm.engine.add_request("a", "Once upon a time", SamplingParams(max_tokens=1500, ignore_eos=True))
    llm.engine.step()
    os.kill(llm.engine.executor._ranks.ranks[1].process.pid, signal.SIGSTOP)  # type: ignore[attr-defined]
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"rank 1 .* has not answered"):
        while True:
            llm.engine.step()
    assert time.monotonic() - began < 10


# --------------------------------------------------------------------------- the all-reduce through peer memory

PEER = ["executor=multiproc", "+executor.options.all_reduce=peer"]


def check_all_reduce(rank: int, ranks: int, port: int) -> None:
    """One rank, in its own process: random data against NCCL and the reference, eager and in a graph."""
    import torch.distributed as dist

    from minivllm.executors.group import join
    from minivllm.kernels.collectives.all_reduce import PeerAllReduce, all_reduce_reference

    tp = join("cuda", rank, rank, ranks, "127.0.0.1", port)
    device = torch.device("cuda", rank)
    check_exchange(tp, device)
    check_arrival(tp, device)
    peer = PeerAllReduce.create(tp.group, 64 << 20, device)
    generator = torch.Generator(device).manual_seed(rank)
    for dtype in (torch.bfloat16, torch.float32):
        for size in [1 << k for k in range(10, 27)] + [5120 * 2, 1 << 24, 5120 * 2 * 33, 64, 1 << 18, 64]:
            x = torch.randn(size // dtype.itemsize, generator=generator, device=device).to(dtype)
            parts = [torch.empty_like(x) for _ in range(ranks)]
            dist.all_gather(parts, x)
            expected = all_reduce_reference(parts)
            nccl = x.clone()
            dist.all_reduce(nccl)
            torch.testing.assert_close(nccl, expected, rtol=2e-2, atol=1e-2 * ranks)  # it rounds at every rank
            for two_shots in peer.ways(x):
                assert torch.equal(peer(x.clone(), two_shots), expected), (dtype, size, two_shots)
                residual = torch.zeros_like(x)  # so that rounding twice is rounding once
                assert torch.equal(peer.add_to(residual, x, two_shots), expected)
    # an odd number of calls in a graph, other calls between its replays, and one rank that is late
    x, y = torch.zeros(5120, dtype=torch.bfloat16, device=device), torch.ones(4096, device=device)
    ways = peer.ways(y)
    start = torch.full_like(x, rank + 1)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        x.copy_(start)
        for _ in range(3):
            peer(x).div_(ranks)
    for turn in range(200):
        if turn % 50 == rank:
            time.sleep(0.02)
        graph.replay()
        y.fill_(turn)
        peer(y, ways[turn % len(ways)])
        assert float(y.min()) == float(y.max()) == turn * ranks
        assert abs(float(x.float().mean()) - (ranks + 1) / 2) < 1e-2
    dist.barrier()
    print("right", flush=True)
    os._exit(0)


def check_exchange(tp: TensorParallel, device: torch.device) -> None:
    """Sums by copy engines: random data against a sum in float32, call after call, beside products and late ranks."""
    import torch.distributed as dist

    from minivllm.kernels.collectives.exchange import PeerExchange
    from minivllm.kernels.rms_norm import row_factors_reference

    rows, width = 5000, 5120
    exchange = PeerExchange.create(tp.group, rows, width, torch.bfloat16, device)
    generator = torch.Generator(device).manual_seed(tp.rank)
    busy = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    stream, results = exchange.stream, []
    for turn, t in enumerate((5000, 1, 4999, 130, 5000, 5000)):
        x = torch.randn(t, width, generator=generator, device=device).to(torch.bfloat16)
        parts = [torch.empty_like(x) for _ in range(tp.size)]
        dist.all_gather(parts, x)
        stream.fill_(float("nan"))
        if turn % tp.size == tp.rank:
            time.sleep(0.02)
        for _ in range(4):
            busy = busy @ busy
        results.append((exchange.all_reduce(x, 0.25).clone(), sum(part.float() for part in parts)))
        factors = exchange.factors[:t].clone()
        torch.testing.assert_close(factors, row_factors_reference(results[-1][0], 0.25), rtol=1e-4, atol=1e-5)
        assert_same_on_all_ranks(tp, results[-1][0], factors)
        dist.barrier()  # the stream is poisoned again
    for total, expected in results:
        torch.testing.assert_close(total.float(), expected, rtol=2e-2, atol=1e-2 * tp.size)
    numbers = torch.arange(rows * width, device=device).view(rows, width) % 5
    for turn in range(300):  # nothing between calls but a rank that is late
        if turn % 50 == tp.rank:
            time.sleep(0.02)
        total = exchange.all_reduce((numbers[: 1000 + turn] + turn % 3).to(torch.bfloat16))
        same = (total == (numbers[: 1000 + turn] + turn % 3) * tp.size).all()
        results.append((same, same))
    x, y = torch.empty_like(stream[:1300]), torch.empty_like(stream[:77])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        totals = [exchange.all_reduce(part).clone() for part in (x, y, x)]
    for turn in range(100):  # replays with and without other calls between, ranks late by turns
        if turn % 20 == tp.rank:
            time.sleep(0.02)
        x.copy_(numbers[:1300] + turn % 3)
        y.copy_(numbers[:77] + turn % 2)
        graph.replay()
        for total, part in zip(totals, (x, y, x), strict=True):
            same = (total == part * tp.size).all()
            results.append((same, same))
        if turn % 3 == 0:
            same = (exchange.all_reduce(x[: 1 + turn]) == x[: 1 + turn] * tp.size).all()
            results.append((same, same))
    assert all(bool(same) for same, _ in results[6:])


def assert_same_on_all_ranks(tp: TensorParallel, *tensors: torch.Tensor) -> None:
    import torch.distributed as dist

    for tensor in tensors:
        parts = [torch.empty_like(tensor) for _ in range(tp.size)]
        dist.all_gather(parts, tensor)
        assert all(torch.equal(part, tensor) for part in parts)


class Addend:
    """A row-parallel product that is there already."""

    def write(self, out: torch.Tensor, y: torch.Tensor) -> None:
        out.copy_(y)

    def add_own(self, residual: torch.Tensor, y: torch.Tensor) -> None:
        residual.add_(y)


def check_arrival(tp: TensorParallel, device: torch.device) -> None:
    """A product that waits for the others' parts itself gives the same bits as one of rows that are there; call after
    call, ranks late by turns, with nothing between."""
    from minivllm.kernels import nvrtc
    from minivllm.kernels.collectives.exchange import PeerExchange
    from minivllm.kernels.linear.persistent_linear import persistent_gate_up
    from minivllm.layers.parts import PartedStream

    if not nvrtc.available(device):
        return
    rows, width = 5000, 5120
    exchange = PeerExchange.create(tp.group, rows, width, torch.bfloat16, device)
    generator = torch.Generator(device).manual_seed(tp.rank)
    weight = (torch.randn(4352, width, generator=generator, device=device) / width**0.5).to(torch.bfloat16)
    results = []
    for turn in range(48):
        t = (5000, 4999, 3400, 4100)[turn % 4]
        x = torch.randn(t, width, generator=generator, device=device).to(torch.bfloat16)
        if turn % 3 == 0 and turn // 3 % tp.size == tp.rank:
            torch.cuda.synchronize()
            time.sleep(0.02)
        stream = PartedStream(exchange, torch.zeros_like(x))
        for peer in exchange.others:
            exchange.stream[stream.parts[peer].rows] = float("nan")
            exchange.factors[stream.parts[peer].rows] = float("nan")
        stream.add(Addend(), [x[part.rows] for part in stream.parts], 0.25)  # type: ignore[arg-type]
        whole, factors, arrival = stream.hand_over(0.25)
        out = persistent_gate_up(whole, weight, factors, arrival=arrival)
        results.append((out, whole.clone(), factors.clone()))
    for out, whole, factors in results:
        assert torch.equal(out, persistent_gate_up(whole, weight, factors))
        assert out.isfinite().all()
        assert_same_on_all_ranks(tp, whole, factors)


@pytest.mark.parametrize("ranks", SIZES)
def test_all_reduce_through_peer_memory_equals_the_reference(ranks: int) -> None:
    from minivllm.executors.group import open_store

    store = open_store("127.0.0.1")
    here = os.path.dirname(os.path.abspath(__file__))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([here, *(p for p in sys.path if p), os.getcwd()])}
    code = "import sys, test_tensor_parallel as t; t.check_all_reduce(*map(int, sys.argv[1:]))"
    options = {"env": env, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    command = [sys.executable, "-c", code]
    processes = [
        subprocess.Popen([*command, str(rank), str(ranks), str(store.port)], **options) for rank in range(ranks)
    ]
    try:
        for process in processes:
            said, _ = process.communicate(timeout=180)
            assert process.returncode == 0 and "right" in said, said
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_the_demo_says_the_same_through_peer_memory(eager: bool, on_one: list[RequestOutput]) -> None:
    with LLM("demo", attention="triton", tp=2, enforce_eager=eager or None, max_num_seqs=16, overrides=PEER) as llm:
        for ours, reference in zip(llm.generate(PROMPTS, GREEDY, use_tqdm=False), on_one, strict=True):
            assert_close(ours, reference)
