"""Which memory of an engine is given back, and what is refused meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

from minivllm.errors import RequestError, of_whole_request, shown

MEMORY_TAGS = ("weights", "kv_cache")  # in the order in which they come back


class Sleeping:
    """``tags``: what sleeps. ``weights_lost``: the weights, asleep or not, are zeros until others are loaded."""

    def __init__(self) -> None:
        self.tags: set[str] = set()
        self.weights_lost = False

    def begun(self, level: int) -> None:
        self.weights_lost |= level == 2 and "weights" not in self.tags
        self.tags.update(MEMORY_TAGS)

    @property
    def takes_requests(self) -> bool:
        return not (self.tags or self.weights_lost)

    def refuse_requests(self) -> None:
        """Raises RequestError if none can be answered."""
        if self.takes_requests:
            return
        with of_whole_request():
            if not self.tags:
                raise RequestError(
                    "sleep(level=2) gave the weights up; call reload_weights first (of a server: POST /reload_weights)"
                )
            which = "" if len(self.tags) == len(MEMORY_TAGS) else f" (its {', '.join(self.tags)} not yet woken)"
            raise RequestError(f"the engine sleeps{which}; call wake_up() first (of a server: POST /wake_up)")

    def refuse_weights(self) -> None:
        """Raises RequestError if none can be loaded."""
        if "weights" in self.tags:
            raise RequestError(
                "the engine's weights sleep; call wake_up() or wake_up(['weights']) first (of a server: POST /wake_up, "
                "or /wake_up?tags=weights)"
            )


def checked_level(level: int) -> int:
    if type(level) is not int or level not in (1, 2):
        raise RequestError(
            f"level={shown(level)} is neither 1, which keeps the weights in the host's memory, nor 2, which gives them "
            "up"
        )
    return level


def checked_tags(tags: Iterable[str] | None) -> list[str]:
    """Each once; None: all."""
    if tags is None:
        return list(MEMORY_TAGS)
    given = list(tags) if isinstance(tags, Iterable) and not isinstance(tags, str) else [tags]
    if not given or any(tag not in MEMORY_TAGS for tag in given):
        raise RequestError(f"tags={shown(tags)}: name some of {', '.join(MEMORY_TAGS)}, or leave it out for all")
    return list(dict.fromkeys(given))
