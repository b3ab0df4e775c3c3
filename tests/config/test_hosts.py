"""Composing leaves a host's Hydra as it was: inside another Hydra app, beside one, in threads, in a notebook."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]

HOST = """
    import os
    from dataclasses import dataclass
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.singleton import Singleton
    from omegaconf import OmegaConf

    @dataclass
    class Model:
        name: str = "the host's own"
        depth: int = 3

    ConfigStore.instance().store(group="model", name="demo", node=Model)
    ConfigStore.instance().store(name="schema", node={"host": 1})
    ConfigStore.instance().store(name="config", node={"defaults": [{"model": "demo"}, "_self_"], "x": 1})
    OmegaConf.register_new_resolver("now", lambda pattern: "the host's now")

    @hydra.main(config_path=None, config_name="config", version_base="1.3")
    def main(cfg):
        OmegaConf.register_new_resolver("now", lambda pattern: "the host's now", replace=True)
        before, hydra_instance = dict(Singleton._instances), GlobalHydra.instance().hydra
        from minivllm.config.compose import compose_engine_config
        from minivllm.errors import ConfigError

        config = compose_engine_config("qwen3", overrides=["cache.num_blocks=5"])
        assert config.model.repo == "Qwen/Qwen3-0.6B" and config.cache.num_blocks == 5
        try:
            compose_engine_config("qwen3", overrides=["seed=${nope}"])
        except ConfigError:
            pass
        else:
            raise AssertionError
        assert Singleton._instances.keys() == before.keys()
        assert all(Singleton._instances[k] is v for k, v in before.items())
        assert GlobalHydra.instance().is_initialized() and GlobalHydra.instance().hydra is hydra_instance
        assert HydraConfig.get().job.name == "host"
        assert OmegaConf.to_container(hydra.compose("config", overrides=["model.depth=9"])) == {
            "model": {"name": "the host's own", "depth": 9}, "x": 1}
        assert OmegaConf.create({"a": "${now:%Y}"}).a == "the host's now"
        print("host done", cfg.model.depth)

    main()
"""

BEFORE = """
    # minivllm composes first; the host's Hydra, imported later, must find all it needs.
    import sys
    from minivllm.config.compose import compose_engine_config
    compose_engine_config()
    from omegaconf import OmegaConf
    assert not OmegaConf.has_resolver("hydra") and not OmegaConf.has_resolver("now")
    import hydra

    @hydra.main(config_path=None, version_base="1.3")
    def main(cfg):
        print("host done", cfg.a)

    sys.argv = ["host", "+a=1"]
    main()
"""

THREADS = """
    from concurrent.futures import ThreadPoolExecutor
    from hydra.core.singleton import Singleton
    from minivllm.config.compose import compose_engine_config

    def one(i):
        return compose_engine_config("qwen3", overrides=[f"cache.num_blocks={i}"]).cache.num_blocks

    compose_engine_config()
    before = Singleton._instances
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(1, 25))) == list(range(1, 25))
    assert Singleton._instances is before
    print("host done")
"""


def run(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "host.py"
    script.write_text(textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env={"PYTHONPATH": str(REPO), "PATH": ""}, text=True,
        capture_output=True, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_inside_a_hydra_app(tmp_path: Path) -> None:
    done = run(HOST, tmp_path)
    assert "host done 3" in done.stdout, done.stderr


def test_before_a_hydra_app(tmp_path: Path) -> None:
    done = run(BEFORE, tmp_path)
    assert "host done 1" in done.stdout, done.stderr


def test_in_many_threads(tmp_path: Path) -> None:
    done = run(THREADS, tmp_path)
    assert "host done" in done.stdout, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["host.py"]
