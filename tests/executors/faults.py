"""What fails on purpose: a sampler that does as its options say, on one rank (a plugin, so that workers must find it);
a model that does when weights are loaded again, on rank 1; and an actor that says of itself what it is told, and no
more."""

from __future__ import annotations

import os

FAULTY = """
    import os, signal, time
    import torch
    from minivllm.core.sampler import DefaultSampler
    from minivllm.errors import CheckpointError
    from minivllm.plugins import Component, hookimpl

    class Sour(torch.Tensor):
        def numpy(self):
            raise ArithmeticError("the numbers were none")

    class Faulty(DefaultSampler):
        calls, fault = 0, ""

        def __init__(self, slots, vocab_size, device, options):
            import torch.distributed as dist

            super().__init__(slots, vocab_size, device)
            if dist.get_rank() == options["rank"]:
                self.fault = options["fault"]
            if self.fault == "bad start":
                raise CheckpointError("no such weights here")
            if self.fault == "stopped start":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.fault == "hanging start":
                time.sleep(600)

        def take_masks(self, *args):
            if self.fault == "masks":
                raise ArithmeticError("no masks today")
            super().take_masks(*args)

        def sample(self, *args):
            self.calls += 1
            if self.calls == 4:
                if self.fault == "raise":
                    raise ArithmeticError("the numbers ran out")
                if self.fault == "exit":
                    os._exit(7)
                if self.fault == "hang":
                    time.sleep(600)
                if self.fault == "raise late":
                    return super().sample(*args).as_subclass(Sour)
            return super().sample(*args)

    @hookimpl
    def minivllm_samplers():
        yield Component("faulty", __name__ + ":Faulty", options=("fault", "rank"))
"""


FAULTY_LOADER = """
    import os, signal, time
    from minivllm.models.qwen3 import Qwen3ForCausalLM
    from minivllm.plugins import ModelComponent, hookimpl

    class Faulty(Qwen3ForCausalLM):
        architectures = ("FaultyForCausalLM",)
        loads = 0

        def load_weights(self, weights):
            self.loads += 1
            if self.loads == 2:
                weights = self.at_fault(weights, self.config.options["fault"])
            super().load_weights(weights)

        def at_fault(self, weights, fault):
            for number, weight in enumerate(weights):
                yield weight
                if fault == "slow" and number < 12:  # at one place, then at another
                    time.sleep(0.3) if number % 2 else time.sleep(0.31)
                if number == 3 and self.model.tp.rank == 1:
                    if fault == "raise":
                        raise ArithmeticError("the numbers ran out")
                    if fault == "stop":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    if fault == "exit":
                        os._exit(7)
                    if fault == "hang":
                        time.sleep(600)

    @hookimpl
    def minivllm_models():
        yield ModelComponent(
            "faulty", __name__ + ":Faulty", architectures=("FaultyForCausalLM",), options=("fault",)
        )
"""


def fault_on(rank: int, fault: str) -> list[str]:
    """Overrides."""
    return ["sampler.name=faulty", f"+sampler.options.fault='{fault}'", f"+sampler.options.rank={rank}"]


class Talker:
    def __init__(self, where: str, seconds: float) -> None:
        self.where, self.seconds = where, seconds

    def pulse(self) -> bytes:
        import ray

        from minivllm.executors.messages import Pulse, Still, encode

        place = Still(self.where, self.seconds)
        return encode(Pulse(os.getpid(), ray.get_runtime_context().get_node_id(), place))
