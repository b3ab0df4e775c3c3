"""Tokens equal transformers': routed and dense layers, either way to weigh the experts, either backend."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from minivllm_qwen3_moe.experts.torch import route as route_reference
from minivllm_qwen3_moe.model import Qwen3MoeForCausalLM

from minivllm import LLM, SamplingParams
from minivllm.core.model_config import FrozenDict, ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.errors import CheckpointError, ConfigError
from minivllm.models.checkpoint import read_model_config
from minivllm.models.loader import build_model, iterate_safetensors
from minivllm.plugins import default_registry
from minivllm.testing import ModelConformance
from minivllm.testing.checkpoints import random_checkpoint, reference_tokens
from minivllm.testing.outputs import common_tokens

ONE = TensorParallel()
ARCHITECTURE = "Qwen3MoeForCausalLM"
CONFIG = {
    "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True,
}  # fmt: skip


class TestEveryLayerRouted(ModelConformance):
    """As Qwen3-30B-A3B."""

    architecture = ARCHITECTURE
    config = CONFIG


class TestSomeLayersDense(ModelConformance):
    """Layers 1 and 3 are routed by the step, of which 3 is made dense; weights are the softmax's own."""

    architecture = ARCHITECTURE
    config = CONFIG | {
        "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False,
        "num_experts": 6, "num_experts_per_tok": 2,
    }  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3MoeForCausalLM as Reference

    return random_checkpoint(tmp_path_factory.mktemp("moe"), Reference, CONFIG | {"num_experts_per_tok": 4}, shards=3)


def changed(folder: Path, to: Path, *drop: str, **changes: object) -> Path:
    shutil.copytree(folder, to)
    config = {k: v for k, v in json.loads((to / "config.json").read_text()).items() if k not in drop}
    (to / "config.json").write_text(json.dumps(config | changes))
    return to


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["torch", "triton"])
def test_backends_by_name(checkpoint: Path, experts: str) -> None:
    """On a CPU ``triton`` runs in its interpreter, which conftest.py chooses."""
    if experts == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("the interpreter must be chosen before Triton is imported")
    prompts = [[3, 1, 4, 1, 5], list(range(50, 80))]  # together more tokens than one program routes
    settings = [f"model.options.experts={experts}", "cache.num_blocks=16", "max_model_len=64"]
    with LLM(str(checkpoint), device="cpu", overrides=settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        said = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    assert said == [reference_tokens(checkpoint, prompt, 3) for prompt in prompts]


def test_what_the_kernel_of_all_layers_is_told_is_what_the_mlp_computes(checkpoint: Path) -> None:
    config = read_model_config(checkpoint)
    model = build_model(Qwen3MoeForCausalLM, config, ONE, "cpu", torch.float32, iterate_safetensors(checkpoint), 64)
    mlp = model.get_submodule("model.layers.1.mlp")  # type: ignore[attr-defined]
    norm = model.get_submodule("model.layers.1.post_attention_layernorm")  # type: ignore[attr-defined]
    told = mlp.routed_experts()
    x = torch.randn(5, config.hidden_size)
    h, expected = norm(x), x.clone()
    weights, ids = route_reference(h @ told.router.T, told.top_k, told.renormalize)
    for row, expert, weight in zip(range(5 * told.top_k), ids.flatten(), weights.flatten(), strict=True):
        gate, up = (told.gate_up[expert] @ h[row // told.top_k]).chunk(2)
        expected[row // told.top_k] += weight * (told.down[expert] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(mlp(x, norm), expected)


def test_whoever_names_a_backend_gets_it_and_ranks_go_apart(checkpoint: Path) -> None:
    config = read_model_config(checkpoint)
    with torch.device("meta"):
        named = Qwen3MoeForCausalLM(replace(config, options={"experts": "torch"}), ONE)
        ranks = Qwen3MoeForCausalLM(config, TensorParallel(0, 2))
    assert all(m.get_submodule("model.layers.0.mlp").routed_experts() is None for m in (named, ranks))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")
def test_one_kernel_of_all_layers_says_what_the_triton_experts_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of the published shape, random weights: where tokens differ, which are nearly as likely, no more is
    compared."""
    from minivllm.kernels import nvrtc
    from minivllm.layers import whole

    if not nvrtc.available(torch.device("cuda")):
        pytest.skip("no Hopper GPU, or no cuda-bindings")
    rng, kernel, used = random.Random(0), whole.megakernel, []
    monkeypatch.setattr(whole, "megakernel", lambda *args: used.append(len(args[0])) or kernel(*args))
    prompts = [[rng.randrange(1000, 100_000) for _ in range(n)] for n in (1, 15, 16, 60, 300)]
    together = [*([prompt] for prompt in prompts), prompts[:2], prompts[2:], prompts[:4]]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    told = []
    for experts in ("auto", "triton"):
        settings = [f"model.options.experts={experts}", "model.hf_config.num_hidden_layers=2", "cache.num_blocks=256"]
        settings += ["load_format=dummy", "max_model_len=512", "scheduler.max_num_seqs=8"]
        with LLM("qwen3-30b-a3b", overrides=settings) as llm:
            outputs = [out.outputs[0] for some in together for out in llm.generate(some, params, use_tqdm=False)]
        told.append(outputs)
        if experts == "auto":
            assert set(used) == {1, 2, 4}, "when their graphs were captured"
            used.clear()
    assert not used
    same = sum(common_tokens(*both) for both in zip(*told, strict=True))
    assert same > 0.75 * 8 * sum(map(len, together))


def test_a_config_as_published_reads_the_same(checkpoint: Path, tmp_path: Path) -> None:
    """transformers 5 saves the number of experts under another name than published checkpoints have it."""
    assert "num_experts" not in json.loads((checkpoint / "config.json").read_text())
    folder = changed(checkpoint, tmp_path / "published", "num_local_experts", num_experts=8)
    models = [
        build_model(Qwen3MoeForCausalLM, read_model_config(f), ONE, "cpu", torch.float32, iterate_safetensors(f), 64)
        for f in (checkpoint, folder)
    ]
    ours, published = (dict(m.named_parameters()) for m in models)  # type: ignore[attr-defined]
    assert all(torch.equal(ours[name], published[name]) for name in ours)


@pytest.mark.parametrize("dummy", [False, True])
def test_ranks_hold_slices_of_every_expert(checkpoint: Path, dummy: bool) -> None:
    """Of checkpoints and of dummy weights alike: gate's and up's rows, down's columns."""
    config = read_model_config(checkpoint)

    def experts_of(tp: TensorParallel) -> tuple[torch.Tensor, ...]:
        weights = 7 if dummy else iterate_safetensors(checkpoint)
        model = build_model(Qwen3MoeForCausalLM, config, tp, "cpu", torch.float32, weights, 64)
        mlp = model.get_submodule("model.layers.1.mlp")  # type: ignore[attr-defined]
        return *mlp.gate_up_experts.stacked()[0].chunk(2, dim=1), mlp.down_experts.weight

    whole = experts_of(ONE)
    parts = [experts_of(TensorParallel(rank, 2)) for rank in range(2)]
    for i, dim in enumerate((1, 1, 2)):
        assert torch.equal(torch.cat([part[i] for part in parts], dim), whole[i])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"use_sliding_window": True, "sliding_window": 8}, CheckpointError, "use_sliding_window=true"),
        ({"use_sliding_window": None, "sliding_window": 8}, CheckpointError, "use_sliding_window=null"),
        ({"num_experts_per_tok": 9}, CheckpointError, "num_experts_per_tok=9 is more than the 8 experts"),
        ({"moe_intermediate_size": None}, CheckpointError, "lacks moe_intermediate_size"),
        ({"hidden_act": "gelu"}, CheckpointError, "hidden_act='gelu'"),
    ],
)
def test_configs_that_cannot_run_are_refused(
    checkpoint: Path, tmp_path: Path, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(str(changed(checkpoint, tmp_path / "changed", **changes)), device="cpu")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.options.experts=cutlas", "there is no such backend. Allowed: auto, triton, torch"),
        ("model.options.expert=torch", "qwen3-moe has no such option. Did you mean experts?"),
    ],
)
def test_options_that_mean_nothing_are_refused(checkpoint: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(checkpoint), device="cpu", overrides=[override])


def test_ranks_that_do_not_divide_the_experts_are_refused() -> None:
    shape = default_registry().config_options("model")["qwen3-30b-a3b"].option.node["hf_config"]
    config = ModelConfig.from_hf(FrozenDict(shape | {"moe_intermediate_size": 770}))
    message = r"tp=4 does not divide .*moe_intermediate_size \(770\)"
    with torch.device("meta"), pytest.raises(ConfigError, match=message):
        Qwen3MoeForCausalLM(config, TensorParallel(0, 4))


def test_the_published_shape_has_the_published_size() -> None:
    shape = default_registry().config_options("model")["qwen3-30b-a3b"].option.node["hf_config"]
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(ModelConfig.from_hf(shape), ONE)
    assert sum(p.numel() for p in model.parameters()) == 30_532_122_624
