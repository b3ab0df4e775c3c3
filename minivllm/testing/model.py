"""What a model must do: match transformers' tokens, however requests are chunked, cached, preempted or sharded."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch

from minivllm.core.interfaces import Model
from minivllm.core.parallel import TensorParallel
from minivllm.core.sampling_params import SamplingParams
from minivllm.errors import CheckpointError, ConfigError
from minivllm.kernels.linear.fp8_linear import quantize
from minivllm.llm import LLM
from minivllm.models.checkpoint import read_model_config
from minivllm.models.loader import HARMLESS, build_model, iterate_safetensors
from minivllm.models.reloading import reload_model
from minivllm.plugins.manager import default_registry
from minivllm.rounding import cdiv
from minivllm.testing.checkpoints import random_checkpoint, reference_model, reference_tokens
from minivllm.testing.conformance import DEVICES, SLOW, Conformance

_folders: dict[type, Path] = {}  # one checkpoint per class


class ModelConformance(Conformance):
    """Tokens must equal transformers' in float32, on a random checkpoint made from ``config``.

    The architecture must be registered: install the plugin (``pip install -e .``) before running its tests.
    """

    required = ("architecture", "config")
    architecture: ClassVar[str]  # as in config.json
    config: ClassVar[dict[str, Any]]  # of a tiny model, config.json's keys; the rest come from checkpoints.TINY
    prompt_lengths: ClassVar[tuple[int, ...]] = (1, 2, 17, 40, 65)
    max_tokens: ClassVar[int] = 12
    attention: ClassVar[str] = "torch"

    @classmethod
    def reference_class(cls) -> type[Any]:
        """The class that makes the checkpoint: transformers' class named ``architecture``, unless overridden."""
        import transformers

        found = getattr(transformers, cls.architecture, None)
        if found is None:
            raise AttributeError(
                f"transformers {transformers.__version__} has no {cls.architecture}; upgrade it, or override "
                f"{cls.__name__}.reference_class"
            )
        return found

    # ------------------------------------------------------------------ the world

    @pytest.fixture
    def checkpoint(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The checkpoint's folder, shared by all tests."""
        cls = type(self)
        if cls not in _folders:
            folder = tmp_path_factory.mktemp(self.architecture)
            _folders[cls] = random_checkpoint(
                folder, self.reference_class(), self.config, architecture=self.architecture
            )
        return _folders[cls]

    @contextmanager
    def engine(self, checkpoint: Path, *, tp: int = 1, device: str = "cpu", **settings: Any) -> Iterator[LLM]:
        """``settings``: config keys with ``__`` instead of dots."""
        overrides = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
        with LLM(
            str(checkpoint), attention=self.attention, tp=tp, device=device, dtype="float32", overrides=overrides
        ) as llm:
            yield llm

    def prompts(self, lengths: Sequence[int] | None = None, seed: int = 1) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        vocab = self.config.get("vocab_size", 512)
        return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths or self.prompt_lengths]

    def say(self, llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=self.max_tokens, ignore_eos=True)
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]

    def expected(self, checkpoint: Path, prompts: list[list[int]]) -> list[list[int]]:
        reference = self.reference_class()
        said = [reference_tokens(checkpoint, prompt, self.max_tokens, reference) for prompt in prompts]
        distinct = {token for one in said for token in one}
        assert len(distinct) > 4, f"the checkpoint says only {distinct}, which proves little: raise initializer_range"
        return said

    def build(self, checkpoint: Path, weights: Iterable[tuple[str, torch.Tensor]] | int) -> torch.nn.Module:
        """The model without an engine, its memory filled with NaN before weights are loaded."""
        registry = default_registry()
        config = read_model_config(checkpoint, registry.read_config)
        model_class = registry.model_class_for(config.architecture)
        try:
            with poisoned_memory():
                model = build_model(model_class, config, TensorParallel(), "cpu", torch.float32, weights, 128)
        except CheckpointError as error:
            assert "hold infinity or NaN" not in str(error), f"load_weights left some memory as it was: {error}"
            raise
        assert isinstance(model, torch.nn.Module)
        return model

    # ------------------------------------------------------------------ tokens

    @pytest.mark.parametrize("device", DEVICES)
    def test_greedy_tokens_equal_transformers(self, checkpoint: Path, device: str) -> None:
        prompts = self.prompts()
        with self.engine(checkpoint, device=device) as llm:
            assert self.say(llm, prompts) == self.expected(checkpoint, prompts)

    def test_log_probabilities_equal_transformers(self, checkpoint: Path) -> None:
        """For prompt and output tokens: greedy tokens alone do not show how logits are scaled or capped."""
        prompts = self.prompts()
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0, logprobs=0)
        with self.engine(checkpoint) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        oracle: Any = self.reference_class()
        reference = reference_model(checkpoint, oracle)
        for prompt, output in zip(prompts, outputs, strict=True):
            [new] = output.outputs
            assert output.prompt_logprobs is not None and new.logprobs is not None
            ids = torch.tensor([*prompt, *new.token_ids])
            with torch.inference_mode():
                logits = reference(ids[None]).logits[0, :-1]
            expected = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            of_tokens = zip([*output.prompt_logprobs[1:], *new.logprobs], ids[1:].tolist(), strict=True)
            said = torch.tensor([(values or {})[token].logprob for values, token in of_tokens])
            torch.testing.assert_close(said, expected, rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize(("block_size", "chunk"), [(1, 7), (4, 1), (16, 64)])
    def test_chunked_prefill(self, checkpoint: Path, block_size: int, chunk: int) -> None:
        prompts = self.prompts()
        with self.engine(checkpoint, cache__block_size=block_size, scheduler__max_num_batched_tokens=chunk) as llm:
            assert self.say(llm, prompts) == self.expected(checkpoint, prompts)

    def test_prefix_hits(self, checkpoint: Path) -> None:
        shared = self.prompts([40], seed=2)[0]
        prompts = [shared + own for own in self.prompts([1, 9, 30], seed=3)]
        params = SamplingParams(temperature=0, max_tokens=self.max_tokens, ignore_eos=True)
        with self.engine(checkpoint, cache__block_size=4) as llm:
            first, *others = self.expected(checkpoint, [shared, *prompts])
            assert self.say(llm, [shared]) == [first]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [o.num_cached_tokens for o in outputs] == [40, 40, 40]
            assert [list(o.outputs[0].token_ids) for o in outputs] == others

    def test_preemption(self, checkpoint: Path) -> None:
        lengths = [12, 20, 17, 9, 15, 20]
        prompts, blocks = self.prompts(lengths, seed=4), cdiv(max(lengths) + self.max_tokens, 4) + 6
        with self.engine(
            checkpoint, cache__block_size=4, cache__num_blocks=blocks, cache__enable_prefix_caching=False
        ) as llm:
            assert self.say(llm, prompts) == self.expected(checkpoint, prompts)
            assert llm.engine.stats.preemptions > 0, "the pool was not too small"

    @SLOW
    def test_tensor_parallel(self, checkpoint: Path) -> None:
        """Two ranks in spawned processes, which find the plugin by its entry point."""
        prompts = self.prompts()
        with self.engine(checkpoint, tp=2, scheduler__max_num_batched_tokens=32) as llm:
            assert self.say(llm, prompts) == self.expected(checkpoint, prompts)

    # ------------------------------------------------------------------ weights

    def test_dummy_weights(self, checkpoint: Path) -> None:
        """Random weights from shapes alone: every parameter is filled, and the same seed gives the same weights."""
        first, again, other = (dict(self.build(checkpoint, seed).named_parameters()) for seed in (3, 3, 4))
        for name, param in first.items():
            assert param.isfinite().all(), f"{name} is not filled"
            assert torch.equal(param, again[name]), f"{name} is not the seed's"
        assert any(not torch.equal(param, other[name]) for name, param in first.items())
        with self.engine(checkpoint, load_format="dummy") as llm:
            assert [len(one) for one in self.say(llm, self.prompts())] == [self.max_tokens] * len(self.prompt_lengths)

    def test_weights_in_any_order_and_file(self, checkpoint: Path, tmp_path: Path) -> None:
        """The same tensors in reverse order and other files fill the same parameters."""
        from safetensors.torch import save_file

        whole = self.build(checkpoint, iterate_safetensors(checkpoint)).state_dict()
        tensors = list(iterate_safetensors(checkpoint))[::-1]
        for i in range(3):
            save_file({name: t.contiguous() for name, t in tensors[i::3]}, tmp_path / f"part-{i}.safetensors")
        for name, param in self.build(checkpoint, iterate_safetensors(tmp_path)).state_dict().items():
            assert param.isfinite().all(), f"{name} is not filled"
            assert torch.equal(param, whole[name]), f"{name} depends on the order of the tensors"

    def test_weights_loaded_again(self, checkpoint: Path, tmp_path: Path) -> None:
        """Other weights loaded over the first are as if they were the only ones, in the same memory; engines reload."""
        from safetensors.torch import save_file

        other = tmp_path / "other"
        shutil.copytree(checkpoint, other, ignore=shutil.ignore_patterns("*.safetensors*"))
        changed = {name: tensor.flip(0).contiguous() / 2 for name, tensor in iterate_safetensors(checkpoint)}
        save_file(changed, other / "model.safetensors")
        again, fresh = self.build(checkpoint, iterate_safetensors(checkpoint)), self.build(other, changed.items())
        reload_model(cast(Model, again), changed.items())
        for name, param in fresh.state_dict().items():
            assert torch.equal(param, again.state_dict()[name]), f"{name} depends on what was loaded before"
        prompts = self.prompts()
        with self.engine(other) as llm:
            expected = self.say(llm, prompts)
        with self.engine(checkpoint) as llm:
            assert self.say(llm, prompts) != expected
            llm.reload_weights(other)
            assert self.say(llm, prompts) == expected

    def test_weights_in_float8(self, checkpoint: Path, tmp_path: Path) -> None:
        """``quantization=fp8`` changes log-probabilities about as much as rounding the checkpoint's matrices does."""
        from safetensors.torch import save_file

        rounded = tmp_path / "rounded"
        shutil.copytree(checkpoint, rounded, ignore=shutil.ignore_patterns("*.safetensors*"))
        tensors = {name: tensor.clone() for name, tensor in iterate_safetensors(checkpoint)}
        for name, tensor in tensors.items():
            if tensor.dim() == 2 and "embed" not in name and "lm_head" not in name:
                values, scales, _ = quantize(tensor)
                tensors[name] = values.float() * scales[:, None]
        save_file(tensors, rounded / "model.safetensors")
        prompts = self.prompts()
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
        said = []
        for folder, quantization in ((checkpoint, "none"), (rounded, "none"), (checkpoint, "fp8")):
            try:
                with self.engine(folder, quantization=quantization) as llm:
                    outputs = llm.generate(prompts, params, use_tqdm=False)
            except ConfigError as error:
                assert quantization == "fp8"
                pytest.skip(str(error))
            found = [
                entry[token].logprob
                for output in outputs
                for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
                if entry is not None
            ]
            said.append(torch.tensor(found))
        whole, expected, ours = said
        change, usual = ((other - whole).abs().mean().item() for other in (ours, expected))
        assert usual / 4 < change < 4 * usual

    def test_a_missing_tensor_is_named(self, checkpoint: Path) -> None:
        tensors = dict(iterate_safetensors(checkpoint))
        for absent in tensors:
            if absent.endswith(HARMLESS):
                continue
            left = [(name, tensor) for name, tensor in tensors.items() if name != absent]
            with pytest.raises(CheckpointError) as e:
                self.build(checkpoint, left)
            assert absent in str(e.value)

    def test_an_unknown_tensor_is_named(self, checkpoint: Path) -> None:
        surprise = "model.layers.0.self_attn.surprise.weight"
        with pytest.raises(CheckpointError, match=surprise):
            self.build(checkpoint, [*iterate_safetensors(checkpoint), (surprise, torch.zeros(3))])

    def test_a_misshapen_tensor_is_named(self, checkpoint: Path) -> None:
        tensors = dict(iterate_safetensors(checkpoint))
        name = max(tensors, key=lambda n: tensors[n].numel())
        tensors[name] = tensors[name][1:]
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            self.build(checkpoint, list(tensors.items()))


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within this context, memory that torch allocates without initializing is NaN."""
    deterministic: Any = torch.utils.deterministic
    was, fill = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)
        deterministic.fill_uninitialized_memory = fill
