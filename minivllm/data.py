"""``map_batches``: offline inference over a Ray Dataset, with replicas of a model in actors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minivllm.errors import ConfigError, RequestError
from minivllm.executors.urgency import be_as_urgent_as_others

if TYPE_CHECKING:
    from pyarrow import Table
    from ray.data import Dataset

    from minivllm.core.sampling_params import SamplingParams

TEXT, TOKENS, REASON = "generated_text", "generated_token_ids", "finish_reason"  # the columns that are added


def map_batches(
    dataset: Dataset,
    model: str = "demo",
    *,
    sampling_params: SamplingParams | None = None,
    prompt_column: str = "prompt",
    concurrency: int = 1,
    batch_size: int = 64,
    tp: int = 1,
    device: str = "auto",
    overrides: Sequence[str] = (),
    **options: Any,
) -> Dataset:
    """Complete the prompt of each row of ``dataset``; lazily, when the result is read.

    Args:
        dataset: rows whose ``prompt_column`` holds text or a list of token ids. Other columns are kept.
        model, tp, device, overrides, **options: as for ``LLM``; each replica takes ``tp`` GPUs, or CPUs if the cluster
            has no GPU.
        sampling_params: one for all rows; give it a ``seed`` if sampled rows must not depend on where they ran.
        concurrency: number of replicas.
        batch_size: rows per call of a replica; several times ``scheduler.max_num_seqs`` keeps it busy.

    Returns:
        The rows with ``generated_text``, ``generated_token_ids`` and ``finish_reason``, in the order in which Ray Data
        delivers them (``DataContext.execution_options.preserve_order`` keeps that of the input).

    Raises:
        ConfigError: the setup cannot run. Errors in a replica are raised where the result is read.
    """
    ray = _ray()
    from minivllm.config.compose import compose_engine_config

    config = compose_engine_config(model=model, tp=tp, device=device, overrides=overrides, **options)
    if config.executor.name not in ("auto", "single", "multiproc"):
        raise ConfigError(
            f"executor={config.executor.name} in map_batches: a replica runs inside one actor; use executor=auto"
        )
    if concurrency < 1 or batch_size < 1:
        raise ConfigError(f"concurrency={concurrency}, batch_size={batch_size}: both are at least 1")
    if sampling_params is not None:
        sampling_params.verify()
        if sampling_params.n != 1:
            raise RequestError(f"n={sampling_params.n}: map_batches gives one row for a row; use n=1, repeat the rows")
    if not ray.is_initialized():
        ray.init()
    on_gpu = config.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
    if config.device == "cuda" and not on_gpu:
        raise ConfigError("device=cuda in map_batches: the cluster has no GPU; use device=cpu")
    llm = {"model": model, "tp": tp, "device": "cuda" if on_gpu else "cpu", "overrides": list(overrides), **options}
    return dataset.map_batches(
        Replica,
        fn_constructor_args=(llm, prompt_column, sampling_params),
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=concurrency),
        num_gpus=tp if on_gpu else None,
        num_cpus=None if on_gpu else tp,
    )


class Replica:
    """One actor's LLM."""

    def __init__(self, llm: Mapping[str, Any], prompt_column: str, params: SamplingParams | None) -> None:
        from minivllm.llm import LLM

        be_as_urgent_as_others()
        self.llm, self.prompt_column, self.params = LLM(**llm), prompt_column, params

    def __call__(self, rows: Table) -> Table:
        import pyarrow as pa

        there = rows.column_names
        if self.prompt_column not in there:
            raise RequestError(f"prompt_column={self.prompt_column!r} is not among the columns: {', '.join(there)}")
        if taken := {TEXT, TOKENS, REASON} & set(there):
            raise RequestError(f"the rows have {', '.join(sorted(taken))} already, which map_batches adds: rename it")
        prompts = rows.column(self.prompt_column).to_pylist()
        if wrong := [prompt for prompt in prompts if not isinstance(prompt, str | list | dict)]:
            raise RequestError(
                f"prompt_column={self.prompt_column!r} holds {wrong[0]!r}: a prompt is text or a list of token ids"
            )
        said = [output.outputs[0] for output in self.llm.generate(prompts, self.params, use_tqdm=False)]
        tokens = pa.array([list(one.token_ids) for one in said], pa.list_(pa.int32()))
        rows = rows.append_column(TEXT, pa.array([one.text for one in said], pa.string()))
        rows = rows.append_column(TOKENS, tokens)
        return rows.append_column(REASON, pa.array([one.finish_reason for one in said], pa.string()))


def _ray() -> Any:
    """Raises ConfigError if Ray Data is not installed."""
    try:
        import pyarrow  # noqa: F401
        import ray
        import ray.data
    except ImportError as error:
        raise ConfigError(f"map_batches needs Ray Data ({error}): pip install 'minivllm[ray]'") from None
    return ray
