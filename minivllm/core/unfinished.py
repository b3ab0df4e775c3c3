"""Requests that are not finished: which sequences are theirs, and how the tokens of a step become their outputs."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.outputs import RequestOutput
from minivllm.core.requests import Completion, Request
from minivllm.core.sampling_params import RequestOutputKind
from minivllm.core.sequence import FinishReason, Sequence
from minivllm.errors import MinivllmError

if TYPE_CHECKING:
    from minivllm.config.engine_config import EngineConfig
    from minivllm.core.batch import Batch, Scored
    from minivllm.core.engine import EngineStats
    from minivllm.core.guides import Guide
    from minivllm.core.interfaces import Committed, Logprobs, Scheduler


class UnfinishedRequests:
    """``guided``: those whose sequences have guides."""

    def __init__(self, config: EngineConfig, scheduler: Scheduler, stats: EngineStats) -> None:
        self._config, self._scheduler, self._stats = config, scheduler, stats
        self._requests: dict[str, Request] = {}
        self._by_sequence: dict[str, tuple[Request, Completion]] = {}
        self._touched: dict[str, Request] = {}  # those with new output
        self._unscored: set[Request] = set()  # no output until their prompts' log-probabilities are complete
        self.guided: set[Request] = set()
        self._watched = np.zeros(config.scheduler.max_num_seqs, dtype=bool)  # slots whose tokens are read each step

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_sequences(self) -> int:
        """Those of all requests that have not ended."""
        return len(self._by_sequence)

    def adapter_ids(self) -> set[int]:
        """The ``lora_int_id`` of each LoRA adapter that one of them has."""
        adapters = (request.adapter for request in self._requests.values())
        return {adapter.request.lora_int_id for adapter in adapters if adapter is not None}

    def of(self, seq: Sequence) -> Request:
        """The request whose sequence this is."""
        return self._by_sequence[seq.request_id][0]

    def add(self, request: Request) -> None:
        """The scheduler has its sequences."""
        for completion in request.completions:
            self._by_sequence[completion.seq.request_id] = request, completion
        self._requests[request.request_id] = request
        if not request.scored:
            self._unscored.add(request)
        if request.params.guided:
            self.guided.add(request)

    def abort(self, names: list[str]) -> None:
        """Forget these, of which some may be unknown, and have the scheduler forget their sequences."""
        for name in names:
            request = self._requests.pop(name, None)
            self._touched.pop(name, None)
            if request is None:
                continue
            self._unscored.discard(request)
            self.guided.discard(request)
            for completion in request.completions:
                if completion.finish_reason is None:  # else another request may have its id by now
                    self._scheduler.abort(completion.seq.request_id)
                    self._by_sequence.pop(completion.seq.request_id, None)

    def clear(self) -> None:
        """Forget all, without a word to the scheduler."""
        for kept in (self._requests, self._by_sequence, self._touched, self._unscored, self.guided):
            kept.clear()

    # ------------------------------------------------------------------ a step

    def watch(self, slots: np.ndarray) -> None:
        """Sequences have begun in these."""
        for slot in slots.tolist():
            seq = self._scheduler.sequences[slot]
            pair = self._by_sequence.get(seq.request_id) if seq is not None else None
            self._watched[slot] = pair is not None and pair[0].needs_tokens

    def take_scores(self, batch: Batch, scored: Scored, requests: list[Request], found: Logprobs | None) -> None:
        """Give each row's log-probabilities to its request, which may be gone. Raises MinivllmError if None."""
        if found is None:
            name = self._config.executor.name
            raise MinivllmError(f"executor={name} returned a step without the prompt_logprobs that it was asked for")
        values = found.lists()
        begins = batch.num_computed[scored.rows].tolist()
        for request, begin, count in zip(requests, begins, scored.lens.tolist(), strict=True):
            request.add_prompt_logprobs(begin + 1, list(islice(values, count)))
            if request.scored:
                self._unscored.discard(request)

    def take_in(
        self, committed: Committed, logprobs: Logprobs | None, sequences: list[Sequence | None]
    ) -> dict[str, Request]:
        """Give the step's tokens to their requests; returns those that ended, forgotten here by then. ``sequences``:
        by slot, when the step was committed."""
        self._stats.output_tokens += len(committed.slots)
        self._stats.drafts += len(committed.drafts)
        for drafted, accepted in committed.drafts:
            self._stats.draft_tokens += drafted
            self._stats.accepted_tokens += accepted
        ended = self._read_tokens(committed, logprobs, sequences) if np.count_nonzero(self._watched) else {}
        for seq, reason in committed.finished:
            request, completion = self._by_sequence.pop(seq.request_id)
            if not request.needs_tokens:  # its tokens were not read at each step
                completion.token_ids = seq.output_token_ids
            if seq.guide is not None and (seq.guide.failed or seq.guide.cut_by(int(seq.known[-1]))):
                reason = FinishReason.LENGTH
            completion.end(reason)
            self._account(completion)
            self._touched[request.request_id] = ended[request.request_id] = request
        ended = {name: request for name, request in ended.items() if request.finished}
        for name, request in ended.items():
            self._requests.pop(name, None)
            self.guided.discard(request)
            if request in self._unscored:
                scheduler = self._config.scheduler.name
                raise MinivllmError(f"scheduler={scheduler} left out log-probabilities of the prompt of {name!r}")
        return ended

    def _read_tokens(
        self, committed: Committed, logprobs: Logprobs | None, sequences: list[Sequence | None]
    ) -> dict[str, Request]:
        """Give each watched slot's new token to its completion, and end completions whose stop string is complete;
        returns the requests of these."""
        stopped: dict[str, Request] = {}
        over: set[int] = set()  # slots whose completions end: tokens of the same step behind that do not count
        of_row: dict[int, tuple[float, int, list[int], list[float]]] = {}
        if logprobs is not None:
            of_row = dict(zip(logprobs.rows.tolist(), logprobs.lists(), strict=True))
        ended = {seq.slot: seq for seq, _ in committed.finished}
        last_rows = dict(zip(committed.slots.tolist(), committed.rows.tolist(), strict=True)) if ended else {}
        watched = self._watched[committed.slots]
        columns = (committed.slots[watched], committed.token_ids[watched], committed.rows[watched])
        for slot, token, row in zip(*(column.tolist() for column in columns), strict=True):
            if slot in over:
                self._stats.output_tokens -= 1
                continue
            seq = ended.get(slot) or sequences[slot]
            if seq is None:
                raise MinivllmError(
                    f"scheduler={self._config.scheduler.name} committed a token in slot {slot}, where no sequence is: "
                    "one that runs is in sequences, and one that has just ended keeps its slot"
                )
            request, completion = self._by_sequence[seq.request_id]
            self._touched[request.request_id] = request
            if completion.logprobs is not None and (values := of_row.get(row)) is not None:
                completion.add_logprobs(token, *values)
            stopped_here = completion.add(token)
            if not stopped_here and seq.guide is not None and not (slot in ended and last_rows[slot] == row):
                stopped_here = _ended_by(seq.guide, completion, token)
            if stopped_here:
                over.add(slot)
            if stopped_here and slot not in ended:
                self._scheduler.finish(seq)
                del self._by_sequence[seq.request_id]
                self._account(completion)
                stopped[request.request_id] = request
        return stopped

    def outputs(self, ended: dict[str, Request], hold: bool) -> list[RequestOutput]:
        """Of the requests with new output, except those that want only the last one. Some stay in ``_touched``, to be
        returned by a later step; with ``hold``, all that have had one before."""
        touched, self._touched = self._touched, {}
        if hold or self._unscored:  # a completion may be ahead of the one that computes the prompt
            self._touched = {
                name: request
                for name, request in touched.items()
                if name not in ended and ((hold and request.had_output) or request in self._unscored)
            }
            touched = {name: request for name, request in touched.items() if name not in self._touched}
        return [
            request.output()
            for name, request in touched.items()
            if name in ended or request.params.output_kind is not RequestOutputKind.FINAL_ONLY
        ]

    def _account(self, completion: Completion) -> None:
        self._stats.cached_tokens += completion.seq.num_cached_tokens
        self._stats.preemptions += completion.seq.num_preemptions


def _ended_by(guide: Guide, completion: Completion, token: int) -> bool:
    """Give a guide its completion's newest token; returns whether that was the last one."""
    guide.take(token)
    if not guide.failed and not guide.ended:
        return False
    completion.end(FinishReason.LENGTH if guide.failed else FinishReason.STOP)
    completion.stop_reason = None
    return True
