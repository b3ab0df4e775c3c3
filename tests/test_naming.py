"""Names that errors suggest: those that may be meant, and none that only look alike because they are short."""

from __future__ import annotations

import pytest

from minivllm.naming import nearest

FLAGS = ("-h", "--help", "-V", "--version", "--cfg", "--json", "-m", "--multirun", "--kind")


@pytest.mark.parametrize(
    ("value", "allowed", "best"),
    [
        ("--helpp", FLAGS, "--help"), ("-help", FLAGS, "--help"), ("--cgf", FLAGS, "--cfg"),
        ("--confg", FLAGS, "--cfg"),
        ("--jsn", FLAGS, "--json"), ("--knd", FLAGS, "--kind"), ("--multi-run", FLAGS, "--multirun"),
        ("-v", FLAGS, "-V"), ("tpp", ["tp", "top_p"], "tp"), ("hots", ["host", "port"], "host"),
        ("nam", ["name", "role"], "name"), ("flsh", ["flash", "torch"], "flash"), ("regx", ["regex"], "regex"),
        ("Qwen33", ["qwen3", "llama"], "qwen3"), ("max_token", ["max_tokens", "min_tokens"], "max_tokens"),
    ],
)  # fmt: skip
def test_a_name_that_may_be_meant_is_suggested(value: str, allowed: list[str], best: str) -> None:
    assert nearest(value, allowed)[0] == best


def test_the_group_of_a_key_says_nothing_of_its_name() -> None:
    keys = ["cache.block_size", "cache.dtype", "cache.num_blocks", "dtype", "scheduler.max_num_seqs"]
    assert nearest("cache.zzz", keys) == []
    assert nearest("cache.num_block", keys) == ["cache.num_blocks"]
    assert nearest("cash.dtype", keys) == ["cache.dtype"]


@pytest.mark.parametrize("value", ["--foo", "--bar", "-x", "--", "foo", "--dir"])
def test_a_short_name_is_not_taken_for_another(value: str) -> None:
    assert nearest(value, FLAGS) == []
