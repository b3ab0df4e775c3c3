"""What holds for every request body: unknown and unsupported fields are refused by name, unless they cannot change the
answer; numbers and texts are checked."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator

from minivllm.core.structured_outputs import StructuredOutputsParams
from minivllm.errors import lone_surrogate, shown
from minivllm.naming import did_you_mean
from minivllm.serve.errors import ClientError

# Ignored: they say who is asking, how to bill it or where to store it.
_PASSED_OVER = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "cache_control",
        "guided_decoding_backend",
    }
)
# Known but unsupported fields, each with the values that request the default behavior.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),  # of a message
    "add_special_tokens": (False,),  # for conversations: the template adds them
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),  # for conversations
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_obfuscation": (False, True),  # padding against traffic analysis
    "length_penalty": (1.0,),
    "logprobs": ([],),  # of a part of a message
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_STRUCTURES = frozenset(f.name for f in fields(StructuredOutputsParams))


def unicode_text(text: str) -> str:
    """Refuse lone surrogates, which JSON can express but no tokenizer accepts."""
    if (half := lone_surrogate(text)) is not None:
        raise ValueError(f"this is not Unicode text: it contains {half}")
    return text


Unicode = Annotated[str, AfterValidator(unicode_text)]


def _whole(value: Any) -> Any:
    """Accept whole floats as integers: some languages write all numbers as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


Whole = Annotated[int, BeforeValidator(_whole)]


class Body(BaseModel):
    """A request's body, or a part of it. A null field is treated as missing."""

    part_of: ClassVar[str | None] = None  # the field of the body that it is in

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = {}
        for name, value in data.items():
            if value is None or name in _PASSED_OVER:
                continue
            if name in cls.model_fields:
                known[name] = value
            elif name in _NEUTRAL:
                cls._refuse_unless_neutral(name, value)
            elif name == "best_of":
                if type(value) is not int or value != (data.get("n") or 1):
                    raise ClientError(f"best_of={shown(value)} is not supported: it must equal n", param=name)
            else:
                hint = did_you_mean(name, cls.model_fields)
                kind = name.removeprefix("guided_")
                asked = data.get("structured_outputs")
                if kind != name and isinstance(asked, dict) and asked.get(kind) == value:
                    continue  # guidance's client sends both
                if "structured_outputs" in cls.model_fields and kind != name and kind in _STRUCTURES:
                    hint = f' It is "structured_outputs": {{"{kind}": …}} now.'  # in vLLM, too
                if "model" in cls.model_fields and (name.startswith("lora") or "adapter" in name):
                    hint = ' A request\'s adapter is named by its "model".'
                raise cls._wrong(f"there is no field {shown(name)}.{hint}", name)
        return known

    @classmethod
    def _refuse_unless_neutral(cls, name: str, value: Any) -> None:
        allowed = _NEUTRAL[name]
        if value not in allowed:
            but = f", other than {' or '.join(map(repr, allowed))}" if allowed else ""
            raise cls._wrong(f"{name}: {shown(value)} is not supported{but}; leave {name} out", name)

    @classmethod
    def _wrong(cls, why: str, name: str) -> ClientError:
        return ClientError(why if cls.part_of is None else f"{cls.part_of}: {why}", param=cls.part_of or name)


def at_most(most: int, name: str, values: Any) -> Any:
    """Returns ``values``; checks their number before each is validated."""
    if isinstance(values, list) and len(values) > most:
        raise ClientError(f"{name}: {len(values)} are more than {most}; send several requests", param=name)
    return values
