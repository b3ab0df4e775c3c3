"""What follows from the methods that a sampler's class overrides."""

from __future__ import annotations

from minivllm.core.interfaces import Sampler
from minivllm.core.overrides import definer


def finds_logprobs(cls: type[Sampler]) -> bool:
    """Whether it overrides a method that returns log-probabilities."""
    return cls.refine is not Sampler.refine or cls.refine_captured is not Sampler.refine_captured


def undoes_sample(cls: type[Sampler]) -> str | None:
    """A warning for a sampler that overrides ``sample`` but inherits the methods that resample; None if all is well."""
    mro = cls.__mro__
    changes, inherited = [c for c in mro if "sample" in vars(c)][:2]
    others = ("refine", "refine_captured", "resample", "needs_refine")
    left = all(mro.index(definer(cls, other)) >= mro.index(inherited) for other in others)
    if inherited is Sampler or definer(cls, "refine") is Sampler or not left:
        return None
    return (
        f"{changes.__name__} overrides sample and leaves the refine of {definer(cls, 'refine').__name__}, which "
        "chooses again, from the logits as they came, for penalties, min_tokens, logit_bias, bad_words and the like: "
        "override resample, too, to do the same there"
    )
