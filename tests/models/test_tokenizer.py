"""Text in, text out: tokenizers of checkpoints, bytes for dummy weights, and text as it grows."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import ASSISTANT, END, USER, byte_level_tokenizer

from minivllm import SamplingParams
from minivllm.config.engine_config import ModelOptions
from minivllm.core.requests import Completion, TokenTexts
from minivllm.core.sampling_params import RequestOutputKind
from minivllm.core.sequence import FinishReason, Sequence
from minivllm.errors import CheckpointError, RequestError
from minivllm.models.checkpoint import read_model_config
from minivllm.models.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from minivllm.models.tokenizer import ByteTokenizer, CheckpointTokenizer, Tokenizer, load_tokenizer, tokenizer_folder

TEXTS = [
    "Once upon a time there was a quick brown fox.",
    "Größe, naïve café, Zürich — “quoted” … 10 €",
    "日本語のテキストと漢字、한국어 문장, 中文句子。",
    "Привет, мир! Καλημέρα κόσμε. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया",
    "emoji: 😀 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽, math: ∑∞ 𝔸𝔹, combining: e\u0301 n\u0303",
    "  leading, \t tabs\n\n\nlines   and trailing  ",
    "a\ufffdb\ufffd",  # the replacement character itself
    "",
]


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> CheckpointTokenizer:
    """Like Qwen's and Llama 3's: tokens are byte strings."""
    folder = tmp_path_factory.mktemp("byte_level")
    byte_level_tokenizer().save_pretrained(folder)
    return CheckpointTokenizer(folder)


@pytest.fixture(scope="session")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> CheckpointTokenizer:
    """Like Llama 2's: ▁ for spaces, bytes only where the vocabulary ends, the first space stripped."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁time", "▁▁", "é", "日"]
    pieces += [chr(c) for c in range(0x21, 0x7F)]
    inner = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    folder = tmp_path_factory.mktemp("metaspace")
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return CheckpointTokenizer(folder)


def grown(detokenizer: Detokenizer, ids: list[int], at_once: int = 1) -> str:
    pieces = [detokenizer.add(ids[i : i + at_once]) for i in range(0, len(ids), at_once)]
    return "".join(pieces) + detokenizer.finish()


def kinds(tokenizer: Tokenizer) -> list[Detokenizer]:
    return [tokenizer.detokenizer(), WindowDetokenizer(tokenizer.decode)]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_grown_text_is_the_text(
    byte_level: CheckpointTokenizer, metaspace: CheckpointTokenizer, text: str, at_once: int
) -> None:
    assert isinstance(byte_level.detokenizer(), ByteDetokenizer)
    assert isinstance(metaspace.detokenizer(), WindowDetokenizer)
    for tokenizer in (byte_level, metaspace, ByteTokenizer(300)):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        for detokenizer in kinds(tokenizer):
            assert grown(detokenizer, ids, at_once) == text
        assert tokenizer.detokenizer().finish(ids) == text


@pytest.mark.parametrize("text", TEXTS[:-2])
def test_no_piece_holds_half_a_character(
    byte_level: CheckpointTokenizer, metaspace: CheckpointTokenizer, text: str
) -> None:
    for tokenizer in (byte_level, metaspace, ByteTokenizer(256)):
        for detokenizer in kinds(tokenizer):
            pieces = [detokenizer.add([i]) for i in tokenizer.encode(text)]
            assert "\ufffd" not in "".join(pieces)
            assert "".join(pieces) == text  # and nothing is left for finish


def test_random_ids_grow_to_what_decoding_them_at_once_gives(
    byte_level: CheckpointTokenizer, metaspace: CheckpointTokenizer
) -> None:
    generator = random.Random(0)
    # a byte of the metaspace tokenizer changes the bytes before it, if together they are no text: left out
    for tokenizer, first in ((byte_level, 0), (metaspace, 259)):
        for _ in range(200):
            ids = [generator.randrange(first, tokenizer.vocab_size + 20) for _ in range(generator.randrange(60))]
            for detokenizer in kinds(tokenizer):
                assert grown(detokenizer, ids) == tokenizer.decode(ids)


def test_text_goes_on_from_the_prompt(byte_level: CheckpointTokenizer, metaspace: CheckpointTokenizer) -> None:
    ids = metaspace.encode("Once a time")
    cut = len(metaspace.encode("Once"))
    assert metaspace.decode(ids[cut:]) == "a time"  # alone it loses its space
    assert grown(metaspace.detokenizer(ids[:cut]), ids[cut:]) == " a time"
    ids = byte_level.encode("日本")
    for detokenizer in (byte_level.detokenizer(ids[:1]), WindowDetokenizer(byte_level.decode, ids[:1])):
        assert grown(detokenizer, ids[1:]) == "日本"  # the prompt ended within a character


def test_a_prompt_that_is_cut_within_a_character_adds_nothing(
    byte_level: CheckpointTokenizer, metaspace: CheckpointTokenizer
) -> None:
    for tokenizer in (byte_level, metaspace):
        for text in ("😀😀", "a😀\ufffd", "\ufffd" * 9, "日" * 5):
            prompt, answer = tokenizer.encode(text), tokenizer.encode("x the")[-2:]
            whole = tokenizer.decode(prompt + answer)
            assert text + grown(tokenizer.detokenizer(prompt), answer) == whole


def test_an_answer_begins_with_the_character_within_which_the_prompt_ends(
    byte_level: CheckpointTokenizer, metaspace: CheckpointTokenizer
) -> None:
    generator = random.Random(0)
    for tokenizer in (byte_level, metaspace):
        for _ in range(100):
            text = "".join(generator.choices("a é日本語😀👍ß\ufffd", k=generator.randrange(1, 14)))
            ids = tokenizer.encode(text)
            ends = [len(tokenizer.encode(text[: i + 1])) for i in range(len(text))]
            for cut in range(1, len(ids)):
                rest = text[sum(end <= cut for end in ends) :]
                assert grown(tokenizer.detokenizer(ids[:cut]), ids[cut:]) == rest, (text, cut)


def test_bytes_that_are_no_text_do_not_multiply(metaspace: CheckpointTokenizer) -> None:
    ids = metaspace.encode("語")  # behind a space, three bytes
    assert metaspace.decode([*ids, ids[1]]) == "\ufffd" * 4  # all of them, as they are one run
    assert grown(metaspace.detokenizer(), [*ids, ids[1]]) == "語\ufffd"
    a = metaspace.encode("a")[-1:]
    assert grown(metaspace.detokenizer(), [*ids, *ids[1:3], *a]) == "語\ufffd\ufffda"


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("stop", [None, ["zz"]])
def test_a_stop_tokens_own_text_is_left_out_with_its_space(
    byte_level: CheckpointTokenizer, metaspace: CheckpointTokenizer, kept: bool, stop: list[str] | None
) -> None:
    for tokenizer in (byte_level, metaspace):
        prompt, ids = tokenizer.encode("Once"), tokenizer.encode("Once upon a")[len(tokenizer.encode("Once")) :]
        params = SamplingParams(stop=stop, stop_token_ids=ids[-1:], include_stop_str_in_output=kept)
        seq = Sequence("r", prompt, params, max_len=99, stop_ids=(ids[-1],))
        completion = Completion(0, seq, tokenizer, TokenTexts(tokenizer))
        for token in ids:
            completion.add(token)
        completion.end(FinishReason.STOP)
        told = completion.output(RequestOutputKind.FINAL_ONLY)
        assert "Once" + told.text == tokenizer.decode(prompt + (ids if kept else ids[:-1]))
        assert (told.token_ids, told.stop_reason) == (ids, ids[-1])


def test_special_tokens_are_skipped_or_shown(byte_level: CheckpointTokenizer) -> None:
    ids = byte_level.encode(f"one{END}two{USER}")
    assert byte_level.decode(ids) == "onetwo"
    assert byte_level.decode(ids, skip_special_tokens=False) == f"one{END}two{USER}"
    for skip, text in ((True, "onetwo"), (False, f"one{END}two{USER}")):
        assert grown(byte_level.detokenizer(skip_special_tokens=skip), ids) == text


def test_a_window_stays_short_whatever_comes(byte_level: CheckpointTokenizer) -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return byte_level.decode(ids)

    broken = byte_level.encode("é")[:1]  # never completed
    special = byte_level.encode(END)  # no text at all
    for ids in (broken * 500, special * 500, byte_level.encode("a time " * 100), byte_level.encode("\ufffd" * 100)):
        longest = 0
        assert grown(WindowDetokenizer(decode), ids) == byte_level.decode(ids)
        assert longest <= 2 * WindowDetokenizer.WINDOW + 3  # and what the first one's character began with


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@pytest.mark.parametrize("special", [True, False])
def test_a_batch_is_what_transformers_makes_of_each(
    kind: str, special: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    from tokenizers.processors import TemplateProcessing

    plain: CheckpointTokenizer = request.getfixturevalue(kind)
    inner = plain.hf_tokenizer.__class__.from_pretrained(plain.path)
    end = inner.eos_token_id
    inner.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{inner.eos_token} $A", special_tokens=[(inner.eos_token, end)]
    )
    inner.save_pretrained(tmp_path)
    tokenizer = CheckpointTokenizer(tmp_path)
    texts = [*TEXTS, f"special {END} inside", *(text * 40 for text in TEXTS)]
    want = [inner.encode(text, add_special_tokens=special) for text in texts]
    assert all((ids[:1] == [end]) == special for ids in want)
    assert tokenizer.encode_batch(texts, add_special_tokens=special) == want
    assert [tokenizer.encode(text, add_special_tokens=special) for text in texts] == want
    assert tokenizer.encode_batch([], add_special_tokens=special) == []
    # what a user did with the tokenizer that they were given stays theirs
    user = tokenizer.hf_tokenizer
    user.pad_token = user.eos_token
    user(texts, padding="max_length", max_length=7, truncation=True, split_special_tokens=True)
    assert tokenizer.encode_batch(texts, add_special_tokens=special) == want


def test_a_tokenizer_that_is_more_than_its_backend_is_asked_itself(tmp_path: Path) -> None:
    byte_level_tokenizer().save_pretrained(tmp_path)
    tokenizer = CheckpointTokenizer(tmp_path)

    class Reversing(type(tokenizer.hf_tokenizer)):  # type: ignore[misc]
        def _encode_plus(self, text: str, **options: Any) -> Any:
            return super()._encode_plus(text[::-1], **options)

    want = tokenizer.encode_batch(["abc", "xyz"])
    Reversing.from_pretrained(tmp_path).save_pretrained(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minivllm.models.tokenizer._load", Reversing.from_pretrained)
        assert CheckpointTokenizer(tmp_path).encode_batch(["cba", "zyx"]) == want


@pytest.mark.parametrize("text,at", [("a\ud800b", 1), ("\udcff", 0)])
def test_half_of_a_character_is_refused(
    byte_level: CheckpointTokenizer, metaspace: CheckpointTokenizer, text: str, at: int
) -> None:
    for tokenizer in (byte_level, metaspace, ByteTokenizer(300)):
        with pytest.raises(RequestError, match=f"a lone surrogate, .*, at index {at}: .*errors='replace'"):
            tokenizer.encode_batch(["fine", text])


def test_chat_template(byte_level: CheckpointTokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a time"}]
    ids = byte_level.apply_chat_template(messages)
    assert byte_level.decode(ids, skip_special_tokens=False) == f"{USER}hi{END}{ASSISTANT}a time{END}{ASSISTANT}"
    ids = byte_level.apply_chat_template(messages, add_generation_prompt=False)
    assert byte_level.decode(ids, skip_special_tokens=False) == f"{USER}hi{END}{ASSISTANT}a time{END}"


@pytest.mark.parametrize(
    ("write", "cut", "other"),
    [
        ("{{ call.function.arguments | tojson }}", '"{\\"city\\": \\"Par"', '"[1]"'),
        ("{% set a = call.function.arguments %}{{ a if a is string else a | tojson }}", '{"city": "Par', "[1]"),
        ("{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "", ""),  # only a mapping
        ("{% for k in call.function.arguments %}{{ k }}={{ call.function.arguments[k] }}{% endfor %}", "", ""),
    ],
)
def test_arguments_that_are_no_object_are_what_the_template_takes(
    byte_level: CheckpointTokenizer, write: str, cut: str, other: str
) -> None:
    template = f"{{% for call in messages[-1].tool_calls or [] %}}{write}{{% endfor %}}"

    def rendered(arguments: str) -> str:
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        return byte_level.render_chat(messages, chat_template=template, add_generation_prompt=False)

    assert (rendered('{"city": "Par'), rendered("[1]")) == (cut, other)
    assert rendered("") == rendered("null") == rendered("{}") and "Paris" in rendered('{"city": "Paris"}')
    assert ("[[" in rendered("[" * 10**5)) == bool(cut)  # too deep for a parser


def test_a_checkpoint_without_chat_template_says_so(metaspace: CheckpointTokenizer) -> None:
    with pytest.raises(RequestError, match="has no chat template; use generate"):
        metaspace.apply_chat_template([{"role": "user", "content": "hi"}])


def test_what_a_chat_template_refuses_is_a_request_error(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "refuses"
    shutil.copytree(tiny_checkpoint("qwen3"), folder)
    refuses = "{{ raise_exception('no system role') if messages[0]['role'] == 'system' }}{{ messages[0].content + 1 }}"
    (folder / "chat_template.jinja").write_text(refuses)
    tokenizer = CheckpointTokenizer(folder)
    for role, why in (("system", "no system role"), ("user", "can only concatenate str")):
        with pytest.raises(RequestError, match=f"messages: the chat template refuses this: {why}"):
            tokenizer.apply_chat_template([{"role": role, "content": "hi"}])


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 1 / 0 }}", "messages: the chat template refuses this: ZeroDivisionError: division by zero"),
        ("{% for i in range(10**9) %}{% endfor %}", "refuses this: OverflowError: Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses this: RecursionError: maximum recursion depth"),
        ("{{ {}['a'].b }}", "refuses this: 'dict object' has no attribute 'a'"),
        (5, "^chat_template=5 is not text"),
        ("a\n{% for %}", "^chat_template: line 2 is not valid Jinja: Expected an expression"),
    ],
)
def test_what_is_wrong_within_a_chat_template_is_a_request_error(
    byte_level: CheckpointTokenizer, template: Any, why: str
) -> None:
    with pytest.raises(RequestError, match=why):
        byte_level.apply_chat_template([{"role": "user", "content": "hi"}], chat_template=template)


def test_a_checkpoints_chat_template_that_is_no_jinja_is_named(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(tiny_checkpoint("qwen3"), folder)
    (folder / "chat_template.jinja").write_text("{{")
    with pytest.raises(RequestError, match=r"^the chat template of .*broken: line 1 is not valid Jinja: "):
        CheckpointTokenizer(folder).apply_chat_template([{"role": "user", "content": "hi"}])


def test_a_tokenizer_that_is_not_there_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("/nope", "./nope", "~/nope", "no/such/folder"):
        with pytest.raises(CheckpointError, match=rf"^model.tokenizer={name} does not exist; pass a folder"):
            tokenizer_folder(name)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=rf"tokenizer.json is a file; .* \(model.tokenizer={tmp_path}\)"):
        tokenizer_folder(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"cannot fetch nobody/nothing: .*model.tokenizer=DIR"):
        tokenizer_folder("nobody/nothing")
    with pytest.raises(CheckpointError, match=r"cannot be read: its tokenizer.json is damaged, .*; fetch it again"):
        CheckpointTokenizer(tmp_path)


def test_end_of_sequence_ids_are_the_configs_and_the_tokenizers(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint("qwen3", eos_token_id=[3, 7])
    config = read_model_config(folder)
    tokenizer = load_tokenizer(ModelOptions(path=str(folder)), folder, config)
    own = tokenizer.encode(END)[0]
    assert tokenizer.eos_token_ids == (own, 3, 7)
    assert tokenizer.eos_token_id == own


def test_which_tokenizer(tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tiny_checkpoint("qwen3")
    config = read_model_config(folder)
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(folder / "config.json", bare)
    with pytest.raises(CheckpointError, match=r"has no tokenizer .*set model.tokenizer"):
        load_tokenizer(ModelOptions(path=str(bare)), bare, config)
    assert isinstance(load_tokenizer(ModelOptions(path=str(bare)), bare, config, "dummy"), ByteTokenizer)
    assert isinstance(
        load_tokenizer(ModelOptions(path=str(bare), tokenizer=str(folder)), bare, config), CheckpointTokenizer
    )
    published = ModelOptions(name="qwen3", repo="nobody/nothing")
    assert isinstance(load_tokenizer(published, None, config, "dummy"), ByteTokenizer)
    with pytest.raises(CheckpointError, match="hf download nobody/nothing"):
        load_tokenizer(published, None, config)
    shutil.copy(folder / "tokenizer_config.json", bare)
    with pytest.raises(CheckpointError, match=r"bare cannot be read: it has no tokenizer.json: fetch it"):
        load_tokenizer(ModelOptions(path=str(bare)), bare, config)
    (bare / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"the tokenizer in .*bare cannot be read"):
        load_tokenizer(ModelOptions(path=str(bare)), bare, config)


def test_bytes_stay_inside_a_small_vocabulary() -> None:
    tokenizer = ByteTokenizer(100, (3,))
    ids = tokenizer.encode("héllo 😀")
    assert ids and all(0 <= i < 100 for i in ids)
    assert isinstance(tokenizer.decode([*ids, 3, 99]), str)
    chat = ByteTokenizer(300).apply_chat_template([{"role": "user", "content": "hi"}])
    assert ByteTokenizer(300).decode(chat) == "user: hi\nassistant: "


def test_reading_a_tokenizer_needs_no_torch(tiny_checkpoint: Callable[..., Path]) -> None:
    code = (
        "import sys; from pathlib import Path; from minivllm.models.tokenizer import CheckpointTokenizer as T;"
        f"t = T(Path({str(tiny_checkpoint('qwen3'))!r})); assert t.decode(t.encode('a é')) == 'a é';"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
