"""How much of a streamed text must be held back."""

from __future__ import annotations


def tail_of(text: str, tag: str) -> int:
    """How many characters at its end cannot be sent yet: white space, and what may be the start of ``tag``."""
    if not text or (not text[-1].isspace() and tag[0] not in text[-len(tag) :]):  # nearly always
        return 0
    begun = next((n for n in range(min(len(tag), len(text)), 0, -1) if text.endswith(tag[:n])), 0)
    before = text[: len(text) - begun]
    return begun + len(before) - len(before.rstrip())
