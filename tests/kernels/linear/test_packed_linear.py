"""A product of packed weights in one kernel: what the driver is told, without a GPU; the results against float32, on
the CPU, where the kernel runs thread by thread, and on Hopper, from buffers full of NaN."""

import pytest
import torch

from minivllm.kernels import nvrtc
from minivllm.kernels.linear import packed_config
from minivllm.kernels.linear import packed_linear as packed
from minivllm.kernels.linear.packed_linear import linear_config, linear_kernel, packed_linear, use_packed_linear
from minivllm.kernels.linear.packed_weights import Order, pack_all

BF16 = torch.bfloat16
HEADS = {  # lines and k of published models
    "Qwen3-0.6B": (151936, 1024),  # an odd number of blocks, nine a program
    "Llama-3.2-1B": (128256, 2048),
    "Qwen3-8B": (151936, 4096),
    "Qwen3-14B, half": (76800, 5120),
}
ROWS = [1, 8, 9, 24, 33, 48, 64]


class Tensors:
    def __init__(self, rows, lines, k, device):
        weight = (torch.randn(lines, k, device=device) / k**0.5).to(BF16)
        weight.view(-1)[2500::4999], weight.view(-1)[1000::7919] = 0.0, -8.0
        weight[lines - 7] *= 2.0**-40
        weight[lines // 2] = 0
        self.x = torch.randn(rows, k, device=device).to(BF16)
        (self.packed,) = pack_all([weight], [False], [Order.UNITS])
        self.expected = self.x.float() @ weight.float().T
        self.config = linear_config(rows, lines, k, packed.num_sms(self.x.device))

    def run(self):
        out = packed_linear(self.x, self.packed)
        assert (self.config.parts(self.x.device) == -1).all(), "what stays between launches is as it was"
        return out


def test_where_it_runs(monkeypatch):
    monkeypatch.setattr(nvrtc, "available", lambda device: device.type == "cuda")
    monkeypatch.setattr(packed, "num_sms", lambda device: 132)
    monkeypatch.setattr(packed_config, "loads", lambda kernel, device: True)
    monkeypatch.setattr(packed_config, "_fits", lambda config, kernel, device: dict(kernel.macros)["N"] != 256)
    cuda = torch.device("cuda")
    for lines, k in HEADS.values():
        assert all(use_packed_linear(rows, lines, k, BF16, cuda) for rows in ROWS)
        assert not any(use_packed_linear(rows, lines, k, BF16, cuda) for rows in (0, 65))
    assert not use_packed_linear(8, 151936, 1024, torch.float16, cuda)
    assert not use_packed_linear(8, 151936, 1024, BF16, torch.device("cpu"))
    assert not use_packed_linear(8, 151936 + 64, 1024, BF16, cuda) and not use_packed_linear(8, 151936, 960, BF16, cuda)
    assert not use_packed_linear(8, 256, 128, BF16, cuda), "fewer units than clusters"
    assert not use_packed_linear(8, 256, 16384, BF16, cuda), "programs that do not run at once"


@pytest.mark.parametrize("rows", [8, 64])
def test_it_compiles(compiled, reads_in_time, rows):
    cubin = nvrtc.compile_cubin(linear_kernel(128256, 2048, linear_config(rows, 128256, 2048, 132)).source)
    assert b"packed_linear" in cubin
    reads_in_time(cubin)


def test_the_driver_is_told_the_launch(told):
    tensors = Tensors(40, 2048, 1536, "cpu")
    tensors.x = torch.zeros(40, 2000, dtype=BF16)[:, :1536]
    out = tensors.run()
    ((config, kernel, values),) = told.seen
    assert kernel == linear_kernel(2048, 1536, tensors.config) and out.shape == (40, 2048) and out.dtype == BF16
    pointers = [
        t.data_ptr() for t in (tensors.packed.data, tensors.packed.scales, out, tensors.config.parts(out.device))
    ]
    assert values == [5, *pointers, 40]
    assert told.maps == [(tensors.x.data_ptr(), 40, 1536, 2000, 24, 64)]
    assert (config.gridDimX, config.blockDimX, config.sharedMemBytes) == (132, 384, tensors.config.shared_bytes)


# Three clusters. Pairs of blocks: two parts of one; two whole ones and a part, of an odd number of blocks, of whose
# last pair the second is missing; three whole ones, that block among them.
@pytest.mark.parametrize("lines", [256, 7 * 256 - 128, 9 * 256 - 128])
@pytest.mark.parametrize("rows", [1, 27, 60])
def test_it_computes_the_product_wherever_it_runs(emulated, close, rows, lines):
    tensors = Tensors(rows, lines, 384, "cpu")
    out = tensors.run()
    close(out, tensors.expected)
    emulated.seed = 2
    assert torch.equal(tensors.run(), out)


MISTAKES = {
    "a program that goes before the other": ("inputs.drain();", ";"),
    "exceptions of other lines": ("each_exception(pieces + half * PIECE_BYTES", "each_exception(pieces"),
    "sums that stay": ("if (some + c <= to) take_away_four(place(c));", ""),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_emulator_notices(emulated, close, mistake):
    emulated.changes = (MISTAKES[mistake],)
    tensors = Tensors(32, 7 * 256 - 128, 384, "cpu")
    with pytest.raises((AssertionError, RuntimeError)):
        for emulated.seed in range(8):
            close(tensors.run(), tensors.expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("model", HEADS)
def test_it_computes_the_product(gpu, close, monkeypatch, model, rows):
    tensors = Tensors(rows, *HEADS[model], gpu)
    assert use_packed_linear(rows, *HEADS[model], BF16, gpu)
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *args: new_empty(self, *args).fill_(float("nan")))
    out = tensors.run()
    close(out, tensors.expected)
    assert all(torch.equal(tensors.run(), out) for _ in range(5))


@pytest.mark.gpu
def test_nan_come_out_as_nan(gpu):
    tensors = Tensors(9, *HEADS["Llama-3.2-1B"], gpu)
    clean = tensors.run()
    tensors.x[3] = torch.tensor(-1, dtype=torch.int16).view(BF16)  # the NaN whose bits are all set
    out = tensors.run()
    assert out[3].isnan().all() and torch.equal(out[:3], clean[:3]) and torch.equal(out[4:], clean[4:])


@pytest.mark.gpu
@pytest.mark.parametrize("number", [5, 32])
def test_it_waits_for_its_rows_in_a_graph(gpu, captured, number):
    """Launched behind what writes them, and again behind itself."""
    first, second = Tensors(number, 151936, 1024, gpu), Tensors(number, 2048, 2048, gpu)
    start, rows = torch.randn(number, 1024, device=gpu).to(BF16), torch.empty(number, 1024, dtype=BF16, device=gpu)
    outs = []

    def step():
        rows.copy_(start)
        outs[:] = [packed_linear(rows, first.packed)]
        outs.append(packed_linear(outs[0][:, :2048], second.packed))

    with torch.no_grad():
        step()
        torch.cuda.synchronize()
        expected = [out.clone() for out in outs]
        graph = captured(step)
        for _ in range(500):
            rows.fill_(float("nan"))
            graph.replay()
        assert all(torch.equal(out, one) and out.isfinite().all() for out, one in zip(outs, expected, strict=True))
