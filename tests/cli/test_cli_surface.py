"""What the command line does before any model is loaded: words, flags, help, refusals, plugins list."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
from fake_plugins import BACKEND, FakePlugin

from minivllm import cli
from minivllm.config.keys import keys_of
from minivllm.errors import ConfigError, MinivllmError

REPO = Path(__file__).resolve().parents[2]


def minivllm(
    *argv: str, cwd: Path, path: Path | None = None, code: str | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("MINIVLLM_")} | environ
    env["PYTHONPATH"] = os.pathsep.join(map(str, filter(None, [path, REPO])))
    start = [sys.executable, "-c", code] if code else [sys.executable, "-m", "minivllm"]
    return subprocess.run(
        [*start, *argv], cwd=cwd, env=env, text=True, capture_output=True, timeout=120, stdin=subprocess.DEVNULL
    )


# --------------------------------------------------------------------------- words and flags


def test_overrides_and_flags_come_in_any_order() -> None:
    for argv in (
        ["bench", "-m", "attention=torch", "tp=1"],
        ["-m", "attention=torch", "bench", "tp=1"],
        ["attention=torch", "tp=1", "bench", "-m"],
    ):
        args = cli.parse(argv)
        assert args.word == "bench"
        assert args.overrides == ["attention=torch", "tp=1"]
        assert args.flags == ["-m"]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["genrate"], "neither a mode nor key=value. Did you mean generate?"),
        (["hello"], "A prompt is typed as prompts="),
        (["chat", "bench"], "'bench' after chat"),
        (["serve", "Qwen/Qwen3-0.6B"], "settings are typed as key=value. For the model type model=qwen3."),
        (["serve", "someone/Some-Model"], "For the model type model.repo=someone/Some-Model."),
        (["bench", "qwen3-4b"], "For the model type model=qwen3-4b."),
        (["chat", "/"], "For the model type model.path=/."),
        (["generate", "./nowhere"], "A model is typed as model=NAME, model.path=FOLDER or model.repo"),
        (["generate", "Hello, world"], "A prompt is typed as prompts='...'"),
        (["Qwen/Qwen3-4B"], "neither a mode nor key=value. For the model type model=qwen3-4b. Modes:"),
        (["--helpp"], "Did you mean --help?"),
        (["serve", "--enable-lora"], "there is no such flag. Did you mean enable_lora=...? Settings are typed as"),
        (["serve", "--lora-modules", "a=b"], "Did you mean lora_modules=...? Settings are typed as key=value"),
        (["--foo"], "there is no such flag. Settings are typed as key=value"),
        (["--max-tokens", "3"], "Did you mean max_tokens=...? Settings are typed as key=value"),
        (["--model=qwen3"], "Did you mean model=qwen3?"),
        (["--cfg=hydra"], "only --cfg job"),
        (["--version=3"], "takes no value"),
        (["-m", "tp=1,2"], "in bench, not in generate: type `minivllm bench -m ...`"),
        (["bench", "-m", "tpp=1,2"], "Did you mean tp"),
        (["bench", "compare", "a.json"], "takes two files"),
        (["bench", "compar", "a.json", "b.json"], "Did you mean compare?"),
        (["bench", "compare", "a.json", "b.json", "-m"], "-m: bench compare takes no flag"),
        (["--kind", "model"], "--kind belongs to `minivllm plugins new"),
        (["plugins", "list", "--kind", "model"], "--kind belongs to `minivllm plugins new"),
        (["plugins", "list", "-m"], "plugins list takes no flag but --json"),
        (["--json"], "belongs to `minivllm plugins list --json`"),
        (["plugins", "show"], "there is only `plugins list`"),
        (["plugins", "tp=2"], "plugins takes no settings"),
        (["chat", "mode=bench"], "name two modes"),
        (["tpp=2"], "Did you mean tp"),
        (["+tpp=2"], "Did you mean tp"),
        (["model=qwen33"], "Did you mean qwen3"),
        (["temperature=-1", "prompts=hi"], "temperature=-1"),
        (["top_p=0", "prompts=hi"], "top_p=0"),
        (["max_tokens=0", "prompts=hi"], "max_tokens=0"),
        (["presence_penalty=2.5", "prompts=hi"], "=2.5 is out of range: it must be at least -2 and at most 2"),
        (["chat", "frequency_penalty=-3"], "=-3.0 is out of range: it must be at least -2 and at most 2"),
        (["repetition_penalty=0", "prompts=hi"], "repetition_penalty=0.0 is out of range: it must be more than 0"),
        (["repetition_penalty=much"], "repetition_penalty=much"),
        (["repetition_penaltyy=1.2"], "Did you mean repetition_penalty"),
        (["chat", "top_k=-3"], "top_k=-3"),
        (["prompts_file=/no/such/file"], "prompts_file=/no/such/file cannot be read"),
        (["output=/no/such/folder/x", "prompts=hi"], "output=/no/such/folder/x cannot be written"),
    ],
)
def test_a_wrong_command_line_is_one_paragraph_and_exit_2(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert err.startswith("minivllm: ")
    assert err.count("\n") == 1


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_DEBUG", "1")
    assert cli.main(["tpp=2"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_other_errors_exit_1_and_ctrl_c_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, code in ((MinivllmError("the rank\n died"), 1), (ConfigError("no"), 2), (KeyboardInterrupt(), 130)):

        def run(args: cli.Arguments, error: BaseException = error) -> int:
            raise error

        monkeypatch.setattr(cli, "_run", run)
        assert cli.main([]) == code
        err = capsys.readouterr().err
        assert "Traceback" not in err
        assert len(err.strip().splitlines()) == 1


def test_a_mode_whose_packages_are_not_installed_says_how_to_get_them() -> None:
    with pytest.raises(MinivllmError, match=r"needs the package 'no_such_package'.*pip install no_such_package"):
        cli._load("generate", "no_such_package:run")
    with pytest.raises(MinivllmError, match=r"needs the package 'no_such_package'.*pip install 'minivllm\[serve\]'"):
        cli._load("serve", "no_such_package:run")


# --------------------------------------------------------------------------- help, version, config


def test_help_names_every_key_group_option_and_mode(capsys: pytest.CaptureFixture[str]) -> None:
    from minivllm.config.modes import MODES

    for word in ("generate", "chat", "serve", "bench"):
        assert cli.main([word, "--help"]) == 0
        text = capsys.readouterr().out
        for key in keys_of(MODES[word].schema).values():
            if key.name != "mode" and not key.name.endswith(".name"):
                assert f"  {key.name}=" in text or f"  {key.name}.KEY=" in text, key.name
        for name in ("qwen3-32b", "flashinfer", "prefill_first", "MINIVLLM_DEBUG", *MODES):
            assert name in text
        assert max(map(len, text.splitlines())) <= 120
    assert cli.main(["--help"]) == 0
    assert "prompts=null" in capsys.readouterr().out
    assert cli.main(["-h", "plugins"]) == 0
    assert "--json" in capsys.readouterr().out


def test_help_imports_neither_torch_nor_hydra(tmp_path: Path) -> None:
    code = (
        "import sys; from minivllm.cli import main; main(sys.argv[1:]); "
        "print(sorted({'torch', 'hydra', 'omegaconf', 'numpy'} & set(sys.modules)))"
    )
    for argv in (["--help"], ["--version"], ["plugins", "list"], ["plugins", "--json"]):
        done = minivllm(*argv, cwd=tmp_path, code=code)
        assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_importing_minivllm_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys, minivllm, minivllm.plugins\n"
        "assert not {'torch', 'hydra', 'omegaconf', 'numpy', 'transformers'} & set(sys.modules)\n"
        "assert {'LLM', 'SamplingParams', '__version__'} <= set(dir(minivllm))\n"
        "from minivllm import SamplingParams\n"
        "assert 'torch' not in sys.modules\n"
        "try: minivllm.nothing\n"
        "except AttributeError as e: print(e)\n"
    )
    done = minivllm(cwd=tmp_path, code=code)
    assert done.stdout == "module 'minivllm' has no attribute 'nothing'\n", done.stderr


def test_vllms_modules_are_as_light_as_what_is_in_them(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from minivllm.sampling_params import SamplingParams, RequestOutputKind, StructuredOutputsParams\n"
        "from minivllm.outputs import RequestOutput, CompletionOutput\n"
        "assert not {'torch', 'hydra', 'numpy', 'transformers'} & set(sys.modules)\n"
        "from minivllm.inputs import TextPrompt, TokensPrompt\n"
        "from minivllm import PromptType, RequestOutputKind as kind\n"
        "assert kind is RequestOutputKind and not {'torch', 'hydra', 'transformers'} & set(sys.modules)\n"
    )
    done = minivllm(cwd=tmp_path, code=code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "name", "told"),
    [
        ("minivllm", "EngineArgs", "give LLM"),
        ("minivllm", "AsyncEngineArgs", "minivllm serve"),
        ("minivllm", "AsyncLLMEngine", "minivllm serve"),
        ("minivllm", "PoolingParams", "generate text"),
        ("minivllm.sampling_params", "BeamSearchParams", "n="),
        ("minivllm.sampling_params", "GuidedDecodingParams", "structured_outputs=StructuredOutputsParams"),
        ("minivllm.outputs", "EmbeddingRequestOutput", "generate text"),
    ],
)
def test_a_name_of_vllm_that_is_not_here_says_so_when_it_is_imported(module: str, name: str, told: str) -> None:
    with pytest.raises(ImportError, match=f"{name} of vLLM is not supported: .*{told}"):
        exec(f"from {module} import {name}")
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        exec(f"from {module} import Nothing")
    assert not hasattr(import_module(module), "nothing")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from minivllm import API_VERSION, __version__

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"minivllm {__version__} (plugin API {API_VERSION})\n"


def test_cfg_prints_the_config_and_leaves_no_litter(tmp_path: Path) -> None:
    import yaml

    for argv in (["--cfg", "job", "tp=2", "chat"], ["chat", "tp=2", "--cfg"], ["mode=chat", "--cfg=job", "tp=2"]):
        done = minivllm(*argv, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        tree = yaml.safe_load(done.stdout)
        assert (tree["tp"], tree["mode"], tree["temperature"]) == (2, "chat", 0.7)
        assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------- plugins


def test_plugins_list_tells_what_is_usable_and_what_is_broken(fake_plugin: FakePlugin, tmp_path: Path) -> None:
    fake_plugin("minivllm-fast", BACKEND.format(name="fast"), version="3.1")
    site = fake_plugin("minivllm-broken", "import no_such_package")
    needs = BACKEND.format(name="needy").replace("options=", "requires=('no_such_lib',), options=")
    fake_plugin("minivllm-needy", needs)
    for argv in (["plugins"], ["plugins", "list"]):
        text = minivllm(*argv, cwd=tmp_path, path=site).stdout
        row = next(line for line in text.splitlines() if " fast " in line)
        assert "minivllm-fast 3.1" in row
        assert " yes" in row
        row = next(line for line in text.splitlines() if " needy " in line)
        assert "no  " in row
        assert "the package 'no_such_lib' is not installed" in row
        assert "minivllm-broken 1.0" in text.partition("Problems:")[2]
    tree = json.loads(minivllm("plugins", "list", "--json", cwd=tmp_path, path=site).stdout)
    by_name = {(c["kind"], c["name"]): c for c in tree["components"]}
    assert by_name["attention", "fast"]["version"] == "3.1"
    assert by_name["attention", "needy"]["usable"] is False
    assert by_name["model", "qwen3"]["architectures"] == ["Qwen3ForCausalLM"]
    assert {c["kind"] for c in tree["components"]} == {"model", "attention", "scheduler", "sampler", "executor"}
    assert tree["problems"][0]["package"] == "minivllm-broken 1.0"
    off = minivllm("plugins", cwd=tmp_path, path=site, MINIVLLM_DISABLE_PLUGINS="all").stdout
    assert " fast " not in off
    assert "Disabled by MINIVLLM_DISABLE_PLUGINS: minivllm_broken" in off
    strict = minivllm("plugins", cwd=tmp_path, path=site, MINIVLLM_STRICT_PLUGINS="1")
    assert strict.returncode == 1
    assert "minivllm-broken" in strict.stderr
    assert "Traceback" not in strict.stderr


def test_a_broken_plugin_is_told_once_when_something_runs(fake_plugin: FakePlugin, tmp_path: Path) -> None:
    site = fake_plugin("minivllm-broken", "1 / 0")
    done = minivllm("--cfg", cwd=tmp_path, path=site)
    assert done.returncode == 0
    assert done.stderr.count("minivllm-broken 1.0") == 1
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other workers use these cores, too")
def test_plugins_list_is_quick(tmp_path: Path) -> None:
    def once() -> float:
        started = time.perf_counter()
        minivllm("plugins", "list", cwd=tmp_path)
        return time.perf_counter() - started

    # The least of several: other work on the machine is not ours to measure.
    times = [once() for _ in range(7)]
    assert min(times) < 0.3, statistics.median(times)
