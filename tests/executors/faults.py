"""What fails on purpose: a sampler that does as its options say, on one rank (a plugin, so that workers must find it),
and an actor that says of itself what it is told, and no more."""

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
