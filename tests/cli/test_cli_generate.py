"""``generate`` and ``chat`` from the command line, with a tiny random checkpoint."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from minivllm import LLM, CompletionOutput, RequestOutput, SamplingParams, cli, generate
from minivllm.chat import _lines
from minivllm.config.modes import GenerateOptions
from minivllm.core.engine import LLMEngine
from minivllm.core.scheduler import MixedScheduler
from minivllm.core.sequence import Sequence
from minivllm.errors import ConfigError
from minivllm.generate import SAMPLES, Asked, parse_prompts, read_prompts

REPO = Path(__file__).resolve().parents[2]
Checkpoint = Callable[..., Path]


@pytest.fixture
def small(tiny_checkpoint: Checkpoint) -> list[str]:
    """The overrides that run a tiny model."""
    return [f"model.path={tiny_checkpoint('qwen3')}", "device=cpu", "dtype=float32", "cache.num_blocks=64"]


@pytest.fixture
def no_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)


# --------------------------------------------------------------------------- where prompts come from


def asked(*prompts: str | list[int]) -> list[Asked]:
    return [Asked(prompt) for prompt in prompts]


def test_lines_and_jsonl() -> None:
    assert parse_prompts("one\n\n  two \r\nthree", "x") == asked("one", "two", "three")
    text = '{"prompt": "a"}\n{"prompt_token_ids": [1, 0]}\n\n{"prompt": "b", "prompt_token_ids": [2], "text": "z"}\n'
    assert parse_prompts(text, "x") == asked("a", [1, 0], [2])
    assert parse_prompts('"quoted"\n{"prompt": "b"}', "x", jsonl=True) == asked("quoted", "b")
    assert parse_prompts('"quoted"', "x") == asked('"quoted"')
    assert parse_prompts('"quoted"\n{"prompt": "b"}', "x") == asked("quoted", "b"), "an object with a prompt is JSONL"
    for text in ("{name} likes {food}", '{"a": 1}\nplain', "{" * 100_000):
        assert parse_prompts(text, "x") == asked(*text.split("\n"))
    for wrong in ('{"prompt": "b",}', "{'prompt': 'b'}", '{"prompt_token_ids": [1,]}'):
        with pytest.raises(ConfigError, match="x, line 2 is not JSON"):
            parse_prompts(f'"a"\n{wrong}', "x")
    with pytest.raises(ConfigError, match="x, line 1 has neither prompt"):
        parse_prompts('{"text": "a"}', "x")
    text = '{"prompt": "a", "priority": -3}\n{"prompt_token_ids": [1], "priority": 0}'
    assert parse_prompts(text, "x") == [Asked("a", -3), Asked([1], 0)]
    text = '{"prompt": "a", "lora_path": "DIR"}\n{"prompt_token_ids": [1], "lora_path": null}'
    assert parse_prompts(text, "x") == [Asked("a", 0, "DIR"), Asked([1])]
    for path in ("5", '""', '["a"]'):
        with pytest.raises(ConfigError, match=r"x, line 1: lora_path=.* is not the path of a folder, nor ORG/NAME"):
            parse_prompts(f'{{"prompt": "a", "lora_path": {path}}}', "x")
    assert parse_prompts("", "x") == []
    line = json.dumps({"prompt": "a\u2028b\x85\x0c", "topic": "c"}, ensure_ascii=False)
    assert parse_prompts(line, "x") == asked("a\u2028b\x85\x0c")
    assert parse_prompts("a\x0cb\n", "x") == asked("a\x0cb"), "lines end at line ends alone"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{nonsense}", "x, line 2 is not JSON"),
        ("9" * 5000, "x, line 2 is not JSON"),
        ("[" * 100_000, "x, line 2 is not JSON"),
        ("5", "x, line 2 is 5; each line is one prompt: a string in quotes, or an object with prompt or"),
        ('[{"prompt": "a"}, {"prompt": "b"}]', "x, line 2 is .*; each line is one prompt"),
        ("[", "x, line 2 is not JSON: .*; each line is one prompt"),
        ('{"text": "a"}', "x, line 2 has neither prompt nor prompt_token_ids, only text"),
        ("{}", "x, line 2 has neither prompt nor prompt_token_ids$"),
        ('{"prompt": null}', "x, line 2: prompt=null is not a string"),
        ('{"prompt": null, "prompt_token_ids": null}', "x, line 2: prompt_token_ids=null is not a list of token ids"),
        ('{"prompt": "a", "stopp": "b"}', "x, line 2 has stopp, which a prompts file cannot set; type stop="),
        ('{"prompt": "a", "lora_paht": "b"}', "x, line 2 has lora_paht; did you mean lora_path?"),
        ('{"promptt": "a"}', "x, line 2 has neither prompt nor prompt_token_ids, only promptt"),
        ('{"prompt": "a", "prioritty": 1}', "x, line 2 has prioritty; did you mean priority?"),
        ('{"prompt": "a", "lora": "b"}', "x, line 2 has lora, which a prompts file cannot set; the key is lora_path"),
        (
            '{"prompt": "a", "adapter": "b"}',
            "x, line 2 has adapter, which a prompts file cannot set; the key is lora_p",
        ),
        ('{"prompt": "a", "n": 2}', "x, line 2 has n, which a prompts file cannot set; repeat the line"),
        ('{"prompt": "a", "max_new_tokens": 2}', "which a prompts file cannot set; type max_tokens=... once"),
        ('{"prompt": 5}', "x, line 2: prompt=5 is not a string"),
        ('{"prompt_token_ids": ["a"]}', "is not a list of token ids"),
        *(
            (f'{{"prompt": "a", "priority": {wrong}}}', f"x, line 2: priority={wrong} is not a whole number$")
            for wrong in ('"high"', "1.5", "true", "null")
        ),
        *(
            (f'{{"prompt": "a", "{name}": 1}}', f"x, line 2 has {name}, which a prompts file cannot set; type {name}=")
            for name in (
                "max_tokens",
                "presence_penalty",
                "frequency_penalty",
                "repetition_penalty",
                "stop_token_ids",
                "ignore_eos",
                "min_tokens",
            )
        ),
        ('{"messages": []}', "has messages, which a prompts file cannot set; LLM.chat takes them"),
    ],
)
def test_a_bad_line_is_named(line: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_prompts('{"prompt": "fine"}\n' + line, "x", jsonl=True)


def test_a_file_without_a_suffix_is_read_as_a_pipe_is(tmp_path: Path) -> None:
    text = '"a"\n{"prompt": "b"}\n'
    for name, expected in {"in": ["a", "b"], "in.JSONL": ["a", "b"], "in.txt": text.split()[:1]}.items():
        (tmp_path / name).write_text(text)
        found = read_prompts(GenerateOptions(prompts_file=str(tmp_path / name)), None)
        assert [one.prompt for one in found][: len(expected)] == expected


@pytest.mark.usefixtures("no_stdin")
def test_answers_do_not_replace_the_prompts(
    tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text('"a"\n')
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "in.jsonl")
    for output in ("in.jsonl", "link.jsonl"):
        typed = [f"prompts_file={tmp_path / 'in.jsonl'}", f"output={tmp_path / output}"]
        assert cli.main([*small, *typed]) == 2
        assert "is the prompts_file; name another file" in capsys.readouterr().err
    assert (tmp_path / "in.jsonl").read_text() == '"a"\n'


def test_typed_prompts_come_before_a_pipe(tmp_path: Path) -> None:
    file = tmp_path / "in.txt"
    file.write_text("from a file\n")
    with file.open() as piped:
        assert read_prompts(GenerateOptions(prompts=("a", (1, 2))), piped) == asked("a", [1, 2])
    with file.open() as piped:
        assert read_prompts(GenerateOptions(), piped) == asked("from a file")
    with file.open() as piped:
        assert read_prompts(GenerateOptions(prompts_file="-"), piped) == asked("from a file")
    assert read_prompts(GenerateOptions(prompts_file=str(file)), None) == asked("from a file")


def test_standard_input_may_have_a_byte_order_mark_and_must_be_utf_8(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    for options in (GenerateOptions(), GenerateOptions(prompts_file="-")):
        with file.open(encoding="utf-8") as piped:
            assert read_prompts(options, piped) == asked("a")
    file.write_bytes(b"caf\xe9\n")
    for options in (GenerateOptions(), GenerateOptions(prompts_file="-")):
        with file.open(encoding="utf-8") as piped, pytest.raises(ConfigError, match="standard input is not UTF-8 text"):
            read_prompts(options, piped)


def test_no_input_gives_the_samples(tmp_path: Path) -> None:
    closed = io.StringIO("x")
    closed.close()
    with open(os.devnull) as null:
        for stdin in (None, closed, null, io.StringIO("no descriptor")):
            assert read_prompts(GenerateOptions(), stdin) == asked(*SAMPLES)
    reading, writing = os.pipe()
    os.close(writing)
    with os.fdopen(reading) as empty:
        assert read_prompts(GenerateOptions(), empty) == asked(*SAMPLES)


def test_a_pipe_that_stays_open_and_silent_does_not_hang(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("minivllm.generate._PATIENCE", 1.1)
    reading, writing = os.pipe()
    with os.fdopen(reading) as silent:
        assert read_prompts(GenerateOptions(), silent) == asked(*SAMPLES)
    os.close(writing)
    assert "waiting for prompts" in capsys.readouterr().err


def test_empty_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "in.txt"
    file.write_text("\n\n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts(GenerateOptions(prompts_file=str(file)), None)


@pytest.mark.parametrize("name,why", [
    ("none.txt", "No such file or directory"),
    ("folder", "Is a directory"),
    ("latin.txt", "it is not UTF-8 text"),
    ("file.txt/in.txt", "Not a directory"),
])  # fmt: skip
def test_a_file_that_cannot_be_read_is_told_plainly(
    tmp_path: Path, name: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.txt").write_text("a prompt")
    (tmp_path / "latin.txt").write_bytes("Müll".encode("latin-1"))
    assert cli.main([f"prompts_file={tmp_path / name}"]) == 2
    assert capsys.readouterr().err == f"minivllm: prompts_file={tmp_path / name} cannot be read: {why}\n"


def test_no_prompts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for typed in ("prompts=[]", "prompts=[ ]"):
        assert cli.main([typed]) == 2
        assert capsys.readouterr().err == (
            "minivllm: prompts=[] holds no prompt, so there is nothing to generate; type prompts='...' or "
            "prompts_file=FILE, or leave prompts out for the samples\n"
        )


# --------------------------------------------------------------------------- generate


@pytest.mark.usefixtures("no_stdin")
def test_generate_prints_prompts_completions_and_a_last_line(
    small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*small, 'prompts=["Once upon a time","The engine"]', "max_tokens=7", "ignore_eos=true"]) == 0
    out = capsys.readouterr().out
    assert out.index("Once upon a time") < out.index("The engine")
    last = out.splitlines()[-1]
    assert last.startswith("14 tokens in ")
    for part in ("tokens/s", "batch size 2", "device cpu", "attention "):
        assert part in last


@pytest.mark.usefixtures("no_stdin")
def test_the_same_command_gives_the_same_text(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def text(*typed: str) -> str:
        assert cli.main([*small, "max_tokens=12", "temperature=0.9", *typed]) == 0
        return capsys.readouterr().out.rpartition("\n\n")[0]

    assert text("seed=1") == text("seed=1")
    assert text("seed=1") != text("seed=2")


@pytest.mark.usefixtures("no_stdin")
def test_penalties_change_the_demos_greedy_text_as_in_python(tmp_path: Path) -> None:
    def tokens(*typed: str) -> list[int]:
        out = tmp_path / "out.jsonl"
        assert cli.main(["device=cpu", "prompts=Once upon a time", "max_tokens=40", f"output={out}", *typed]) == 0
        found: list[int] = json.loads(out.read_text())["token_ids"]
        return found

    plain = tokens()
    with LLM(device="cpu") as llm:
        for name, value in (("presence_penalty", 1.5), ("frequency_penalty", 1.0), ("repetition_penalty", 1.5)):
            typed = tokens(f"{name}={value}")
            params = SamplingParams(temperature=0, max_tokens=40, **{name: value})
            assert typed == llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].token_ids, name
            assert typed != plain, name


@pytest.mark.usefixtures("no_stdin")
def test_output_to_standard_output_is_nothing_else(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*small, "prompts=[one,two]", "output=-", "max_tokens=2"]) == 0
    said = capsys.readouterr()
    assert [json.loads(line)["prompt"] for line in said.out.splitlines()] == ["one", "two"]
    assert "tokens/s" in said.err


def test_lines_come_in_the_order_of_prompts_whatever_the_order_of_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out.jsonl"
    outputs = [RequestOutput(str(i), None, [i], [CompletionOutput(0, "", [])], True) for i in range(4)]

    def written() -> str:
        return "".join(json.loads(line)["request_id"] for line in file.read_text().splitlines())

    with generate._Lines(str(file)) as lines:
        lines.take(1, outputs[1])
        assert not file.exists()
        for place, so_far in ((0, "01"), (3, "01"), (2, "0123")):
            lines.take(place, outputs[place])
            assert written() == so_far
    with pytest.raises(KeyError), generate._Lines(str(file)) as lines:
        lines.take(2, outputs[2])
        lines.take(0, outputs[0])
        raise KeyError
    assert written() == "02", "what has waited, too"


def test_a_terminal_that_holds_few_characters_loses_no_answer(small: list[str]) -> None:
    command = [sys.executable, "-m", "minivllm", *small, 'prompts=["漢é"]', "max_tokens=2"]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    for to in ([], ["output=-"]):
        done = subprocess.run([*command, *to], env=env, capture_output=True, stdin=subprocess.DEVNULL, timeout=120)
        assert done.returncode == 0, done.stderr
        assert not to or json.loads(done.stdout)["prompt"] == "漢é"


@pytest.mark.usefixtures("no_stdin")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_one_line(small: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    dup = os.dup(1)
    try:
        assert cli.main([*small, "prompts=one", "output=/dev/full", "max_tokens=2"]) == 1
    finally:
        os.dup2(dup, 1)
    assert "minivllm: results could not be written: No space left on device" in capfd.readouterr().err


@pytest.mark.usefixtures("no_stdin")
def test_a_cache_that_is_too_large_says_how_large(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*small, "cache.num_blocks=99999999999", "prompts=one"]) == 2
    assert re.search(r"a cache of 99999999999 blocks of 16 tokens takes [\d.]+ GiB", capsys.readouterr().err)


@pytest.mark.usefixtures("no_stdin")
def test_output_is_one_object_a_request_and_can_be_read_again(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, again = tmp_path / "out.jsonl", tmp_path / "again.jsonl"
    assert cli.main([*small, "prompts=[one,[5,0,7]]", f"output={out}", "max_tokens=4", "logprobs=2"]) == 0
    assert "tokens/s" in capsys.readouterr().out
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["prompt"] for r in records] == ["one", None]
    assert records[1]["prompt_token_ids"] == [5, 0, 7]
    for record in records:
        assert set(record) == {
            "request_id", "prompt", "prompt_token_ids", "text", "token_ids", "finish_reason", "num_cached_tokens",
            "logprobs",
        }  # fmt: skip
        assert record["finish_reason"] in ("length", "stop")
        assert len(record["logprobs"]) == len(record["token_ids"])
        assert all(len(at) >= 2 for at in record["logprobs"])
    assert cli.main([*small, f"prompts_file={out}", f"output={again}", "max_tokens=4"]) == 0
    assert [json.loads(line)["token_ids"] for line in again.read_text().splitlines()] == [
        r["token_ids"] for r in records
    ]


@pytest.mark.usefixtures("no_stdin")
def test_what_is_complete_when_a_run_ends_early_is_written_and_until_then_a_file_stays(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, step = tmp_path / "out.jsonl", LLMEngine.step
    lines: list[str] = []
    typed = [*small, f"output={out}", "max_tokens=3", "scheduler.max_num_seqs=2"]
    out.write_text("former")
    assert cli.main([*typed, "prompts=[[1,99999999]]"]) == 1 and out.read_text() == "former"

    def stops(self: LLMEngine) -> list[RequestOutput]:
        lines.append(out.read_text())
        if "two" in lines[-1]:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(LLMEngine, "step", stops)
    assert cli.main([*typed, "prompts=[one,two,three]"]) == 130
    assert lines[0] == "former"
    assert [json.loads(line)["prompt"] for line in out.read_text().splitlines()] == ["one", "two"]


@pytest.mark.usefixtures("no_stdin")
def test_priorities_reach_the_scheduler_or_are_refused_by_it(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, seen = tmp_path / "in.jsonl", {}
    file.write_text('{"prompt": "a"}\n"b"\n\n{"prompt_token_ids": [1, 2], "priority": 3}\n')
    assert cli.main([*small, f"prompts_file={file}", "max_tokens=2"]) == 1
    assert "in.jsonl, line 4: priority=3 is not supported by scheduler=mixed; leave it 0, or" in capsys.readouterr().err
    add = MixedScheduler.add

    def remember(self: MixedScheduler, seq: Sequence) -> None:
        seen[seq.request_id] = seq.priority
        add(self, seq)

    monkeypatch.setattr(MixedScheduler, "add", remember)
    monkeypatch.setattr(MixedScheduler, "uses_priority", True)
    assert cli.main([*small, f"prompts_file={file}", "max_tokens=2"]) == 0
    assert seen == {"0": 0, "1": 0, "2": 3}


@pytest.mark.usefixtures("no_stdin")
def test_a_prompt_that_cannot_run_is_one_paragraph(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*small, "prompts=[[1,99999999]]"]) == 1
    err = capsys.readouterr().err
    assert "99999999" in err
    assert "Traceback" not in err


def start(argv: list[str], cwd: Path, stdin: int) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(REPO)}
    return subprocess.Popen(
        [sys.executable, "-m", "minivllm", *argv], cwd=cwd, env=env, text=True, stdin=stdin,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_prompts_are_piped_in_and_nothing_is_left_behind(small: list[str], tmp_path: Path) -> None:
    process = start([*small, "max_tokens=3"], tmp_path, subprocess.PIPE)
    out, err = process.communicate("first of all\n\nsecond\n", timeout=120)
    assert process.returncode == 0, err
    assert "first of all" in out
    assert "batch size 2" in out
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_cleanly(small: list[str], tmp_path: Path) -> None:
    file = tmp_path / "in.txt"
    file.write_text("hello\n" * 400)  # enough that the signal comes in the middle, whatever the machine
    typed = [f"prompts_file={file}", "max_tokens=900", "ignore_eos=true", "scheduler.max_num_seqs=2"]
    process = start([*small, *typed, "cache.num_blocks=512"], tmp_path, subprocess.DEVNULL)
    assert process.stderr is not None
    while "attention=" not in (line := process.stderr.readline()):  # said when the engine is there
        assert line, process.communicate()
    time.sleep(1)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err


# --------------------------------------------------------------------------- chat


def test_chat_of_what_is_not_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "said").write_bytes(b"caf\xe9\n")
    with (tmp_path / "said").open(encoding="utf-8") as piped:
        monkeypatch.setattr("sys.stdin", piped)
        with pytest.raises(ConfigError, match="standard input is not UTF-8 text"):
            next(_lines(terminal=False))


def test_chat_answers_each_line_and_remembers(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from minivllm.models.tokenizer import CheckpointTokenizer

    seen: list[list[tuple[str, str]]] = []
    real = CheckpointTokenizer.apply_chat_template

    def spy(self: CheckpointTokenizer, messages: list[dict[str, str]], **kwargs: object) -> list[int]:
        seen.append([(m["role"], m["content"]) for m in messages])
        return real(self, messages, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointTokenizer, "apply_chat_template", spy)
    monkeypatch.setattr(
        "sys.stdin", io.StringIO("hi\n\nand you\n/help\n/clear\nagain\n" + "long " * 2000 + "\n/exit\nno\n")
    )
    assert cli.main(["chat", *small, "system=Be kind", "max_tokens=4", "temperature=0"]) == 1, "a line had no reply"
    assert [[role for role, _ in turn] for turn in seen[:3]] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    assert len(seen) == 4
    out, err = capsys.readouterr()
    assert seen[1][2][1] in out
    assert "/clear forgets" in out
    assert "/clear starts over" in err
