"""Ranks forked from a process that has imported torch, for tests of what ranks do, not of how they are started.

To import torch takes a rank three seconds of CPU, and to run a test's steps a tenth of one. ``Zygote`` starts that
process; its ``popen`` stands in for ``subprocess.Popen`` in ``minivllm.child_process``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

_HIGH = 500  # descriptors of ours that must not be where a rank's are to be


class Zygote:
    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, str(theirs.fileno())]
        self.process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()])
        theirs.close()

    def ask(self, request: dict[str, Any], fds: list[int]) -> Any:
        socket.send_fds(self.socket, [json.dumps(request).encode()], fds)
        return json.loads(self.socket.recv(1 << 16))

    def popen(self, command: list[str], *, env: dict[str, str], pass_fds: list[int], **_: Any) -> Forked:
        request = {"argv": command[-1:], "env": env, "fds": pass_fds, "cwd": os.getcwd()}
        return Forked(self, self.ask(request, pass_fds))

    def close(self) -> None:
        self.socket.close()
        self.process.wait(10)


class Forked:
    """What is used of a Popen."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.zygote, self.pid = zygote, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.zygote.ask({"wait": self.pid}, [])
        return self.returncode

    def wait(self, timeout: float = 60) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, 9)


def serve(sock: socket.socket) -> None:
    while True:
        data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 64)
        if not data:
            return
        request = json.loads(data)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                sock.close()
                be_rank(request, fds)
            for fd in fds:
                os.close(fd)
        sock.send(json.dumps(answer).encode())


def be_rank(request: dict[str, Any], fds: list[int]) -> None:
    """Run as ``python -m minivllm.executors.rank FD`` would, with its environment and its descriptors."""
    import fcntl
    import signal

    from minivllm.executors import rank

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH) for fd in fds]
    for fd, number in zip(high, request["fds"], strict=True):
        os.dup2(fd, number)
    for fd in {*high, *fds} - set(request["fds"]):
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[:] = [p for p in request["env"]["PYTHONPATH"].split(os.pathsep) if p]
    sys.argv = ["rank", *request["argv"]]
    rank.ends_with = lambda pid: lambda: None  # the parent is not who asked
    try:
        rank.main()
    finally:
        os._exit(1)


if __name__ == "__main__":
    import torch
    import torch.distributed

    import minivllm.backends.torch
    import minivllm.core.sampler
    import minivllm.executors.group
    import minivllm.executors.peers
    import minivllm.executors.rank
    import minivllm.executors.step_bytes
    import minivllm.executors.worker
    import minivllm.models.llama
    import minivllm.models.qwen3  # noqa: F401

    torch.set_num_threads(1)
    serve(socket.socket(fileno=int(sys.argv[1])))
