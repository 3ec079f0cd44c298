"""Continuous batching: prompts of any length join a running batch and leave it, one token of every row at a time.

A thread repeats three things. It admits requests that wait, in the order in which they came, while there are rows and
memory for their states. It reads the next piece of the prompts of new rows, as many together as it has tokens for, so
that long prompts hold up the others for a piece only. It lets every row of the batch read its last token, and chooses
the next one. A row gets the same answer as alone: `start`, `extend`, `select` and `merge` are those of the mechanism.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.core.state import merge_all, state_bytes, take_rows, trim, with_capacity
from regard.decoding.captured import on_a_stream
from regard.decoding.searching import read_prompt
from regard.http.refused import Refused
from regard.serve import fixed
from regard.serve.batch import RunningBatch
from regard.serve.choosing import Chooser
from regard.serve.fixed import FixedBatch
from regard.serve.footprint import Footprint
from regard.serve.prefixes import PrefixCache
from regard.serve.requests import Failed, Finished, Generation, Row, Update
from regard.tasks.language.language_model import LanguageModel

# Tokens of a prompt, and of all prompts with their padding, between two steps. Beginnings of prompts that are kept end
# at multiples of the first: on a GPU reading a few hundred tokens takes less time than copying their state.
AT_ONCE = {"cpu": (64, 256), "cuda": (512, 16384)}
LOG = logging.getLogger("regard.serve")

Item = Update | Finished | Failed
Deliver = Callable[[list[tuple[Generation, Item]]], None]


class Fill:
    """A prompt that is being read."""

    def __init__(self, generation: Generation, digests: list[bytes], at: int, keep_at: int):
        self.generation, self.digests, self.keep_at = generation, digests, keep_at
        self.at = at  # tokens read


class Group(NamedTuple):
    """Prompts that are read together: a row of the state each. None: nothing is read yet."""

    fills: list[Fill]
    state: Any


class GeneratorLimits(NamedTuple):
    """What a generator takes on."""

    rows: int = 16  # of the batch and of the prompts being read, together
    waiting: int = 64  # requests
    state_bytes: int = 1 << 30
    prefix_bytes: int = 256 << 20
    context: int = 2048  # tokens of a row, where the model has positions for more
    threads: int = 0  # of PyTorch; 0: as many as the process has


class Counts:
    """What a generator has done, for whoever watches it."""

    def __init__(self) -> None:
        self.prompt_tokens = self.generated_tokens = self.steps = self.rows_stepped = self.rows_idle = 0
        self.finished = self.failed = self.cancelled = 0


class Generator:
    """The thread that decodes for all requests to one model. `deliver` is called from it, with what is new."""

    def __init__(self, language: LanguageModel, limits: GeneratorLimits, deliver: Deliver):
        language.check_decodes()
        self.language, self.limits, self.deliver = language, limits, deliver
        self.model: Any = language.model
        self.device = language.device
        self.context = min(limits.context, language.limit or limits.context)
        attentions = language.attentions()
        # Perceiver AR decides by the first call what its latents are; other models declare it
        self.splits = getattr(self.model, "predicts_last", None) is None and all(
            layer.facts.split_invariant and layer.facts.prefix_invariant for layer in attentions
        )
        self.footprint = Footprint.measure(self.model, self.context, language.tokenizer.eos, self.device)
        self.piece, self.prompt_tokens = AT_ONCE.get(self.device.type, AT_ONCE["cpu"])
        self.prefixes = PrefixCache(limits.prefix_bytes if self.splits else 0, self.piece)
        self.chooser = Chooser(language.tokenizer, self.device)
        self.makes_batch = self._choose_batch()
        self.batch = self.makes_batch()
        self.waiting: deque[Generation] = deque()
        self.running: dict[Generation, None] = {}  # admitted and not yet answered, in order
        self.groups: deque[Group] = deque()
        self.counts = Counts()
        self.outbox: list[tuple[Generation, Item]] = []
        self.seconds_each = 1.0  # of a request, from the first piece of its prompt to its end: a moving average
        self.changed, self.closed = threading.Condition(), False
        self.threads = limits.threads or torch.get_num_threads()
        self.thread = threading.Thread(target=self._work, name="regard-generator", daemon=True)

    def _choose_batch(self) -> Callable[[], RunningBatch | FixedBatch]:
        """On a GPU a batch of fixed size, if the states of the model have one and as many rows fit the memory."""
        if self.device.type == "cuda":
            needed = self.limits.rows * self.footprint.bytes(self.context)
            why = fixed.refusal(self.model, self.context, self.language.tokenizer.eos, self.device)
            if needed > self.limits.state_bytes:
                why = (
                    f"{self.limits.rows} rows of {self.context} tokens take {needed:,} bytes, "
                    f"more than the memory of {self.limits.state_bytes:,}"
                )
            if why is None:
                return partial(FixedBatch, self.model, self.device, self.limits.rows, self.context)
            LOG.warning("steps are not captured as a CUDA graph", extra={"fields": {"reason": why}})
        return partial(RunningBatch, self.model, self.device)

    # what other threads call

    def start(self) -> None:
        self.thread.start()

    def submit(self, generations: Sequence[Generation]) -> None:
        """Adds requests to the queue, all or none."""
        for generation in generations:
            self._check(generation)
        if len(generations) > self.limits.waiting:
            why = f"a request may have at most {self.limits.waiting} prompts here, got {len(generations)}"
            raise Refused(400, why, param="prompt")
        with self.changed:
            if self.closed:
                raise Refused(503, "the server is shutting down: send the request to another one", retry_after=1)
            if len(self.waiting) + len(generations) > self.limits.waiting:
                raise Refused(
                    429,
                    f"{len(self.waiting)} requests are waiting, and at most {self.limits.waiting} may: try again later",
                    code="rate_limit_exceeded",
                    retry_after=self._retry_after(),
                )
            self.waiting += generations
            self.changed.notify()

    def cancel(self, generation: Generation) -> None:
        """Ends a request that nobody waits for."""
        generation.cancelled = True
        with self.changed:
            self.changed.notify()

    def close(self) -> None:
        """Takes no more requests; the thread ends when it has answered those that it took."""
        with self.changed:
            self.closed = True
            self.changed.notify()

    def _check(self, generation: Generation) -> None:
        total, samples = len(generation.ids) + generation.tokens, len(generation.samples)
        if total > self.context:
            raise Refused(
                400,
                f"the prompt has {len(generation.ids)} tokens and max_tokens is {generation.tokens}: together at most "
                f"{self.context} fit the context of this model; shorten the prompt, or lower max_tokens",
                code="context_length_exceeded",
                param="max_tokens",
            )
        if samples > self.limits.rows:
            raise Refused(400, f"n must be at most {self.limits.rows} here, got {samples}", param="n")
        needed = max(1, samples) * self.footprint.bytes(generation.longest)
        if needed > self.limits.state_bytes:
            raise Refused(
                400,
                f"the request needs {needed:,} bytes of decoding state, the server has {self.limits.state_bytes:,}: "
                "shorten the prompt, or lower max_tokens or n",
                code="context_length_exceeded",
            )

    def _retry_after(self) -> int:
        """Seconds until the queue is likely to have moved by its length."""
        return min(60, max(1, math.ceil(self.seconds_each * len(self.waiting) / self.limits.rows)))

    # what the thread does

    def _work(self) -> None:
        torch.set_num_threads(self.threads)  # of this thread alone, and of those that set none
        with on_a_stream(self.device):
            while True:
                with self.changed:
                    while not (self.closed or self.waiting or self.running):
                        self.changed.wait()
                    if not (self.waiting or self.running):
                        return
                self.advance()

    @torch.inference_mode()
    def advance(self) -> None:
        """Admits what fits, reads a piece of a prompt, and lets every row of the batch choose a token."""
        try:
            self._drop()
            self._admit()
            self._read_prompts()
            self._step()
        except Exception as error:
            LOG.exception("decoding failed")
            self._fail_all(Refused(500, f"decoding failed ({type(error).__name__}): the log of the server says why"))
        if self.outbox:
            outbox, self.outbox = self.outbox, []
            self.deliver(outbox)

    def _drop(self) -> None:
        """Lets go of requests that nobody waits for, or that took too long."""
        now = time.monotonic()
        with self.changed:
            gone = [one for one in self.waiting if one.cancelled or now > one.deadline]
            self.waiting = deque(one for one in self.waiting if one not in gone) if gone else self.waiting
        running = [one for one in self.running if one.cancelled or now > one.deadline]
        for generation in (*gone, *running):
            if generation.cancelled:
                self.counts.cancelled += 1
                self.running.pop(generation, None)
            else:
                where = "in the queue" if generation in gone else "so far"
                spent = now - generation.created
                self._fail(
                    generation, Refused(504, f"the request took too long: {spent:.1f} seconds {where}", retry_after=1)
                )
        if running:
            self.batch.leave([row for row in self.batch.active if row.generation in running])
            self.groups = deque(self._without(group, running) for group in self.groups)
            self.groups = deque(group for group in self.groups if group.fills)

    def _without(self, group: Group, gone: Sequence[Generation]) -> Group:
        places = [place for place, fill in enumerate(group.fills) if fill.generation not in gone]
        if len(places) == len(group.fills):
            return group
        state = group.state
        if state is not None and places:
            state = take_rows(state, torch.tensor(places, device=self.device))
        return Group([group.fills[place] for place in places], state)

    def _admit(self) -> None:
        """Takes requests from the queue into groups, in order, as long as there are rows and memory."""
        chosen: list[Generation] = []
        rows = sum(max(1, len(one.samples)) for one in self.running)
        longest = max((one.longest for one in self.running), default=0)
        with self.changed:
            while self.waiting:
                first = self.waiting[0]
                more, reach = rows + max(1, len(first.samples)), max(longest, first.longest)
                # every row of a batch has room for the longest
                if more > self.limits.rows or more * self.footprint.bytes(reach) > self.limits.state_bytes:
                    break
                rows, longest = more, reach
                chosen.append(self.waiting.popleft())
        self.running |= dict.fromkeys(chosen)
        for generation in chosen:
            digests = [] if generation.scores_prompt else self.prefixes.digests(generation.ids)
            at, state, keep_at = self.prefixes.find(digests)
            if state is not None:
                row = take_rows(state, torch.zeros(1, dtype=torch.long, device=self.device))
                state = with_capacity(row, generation.longest)
            self.groups.append(Group([Fill(generation, digests, at, keep_at)], state))

    def _read_prompts(self) -> None:
        """Reads the next piece of every prompt, in order, until the tokens between two steps are spent."""
        waiting, self.groups, left = self.groups, deque[Group](), self.prompt_tokens
        while waiting and (group := self._take_group(waiting, left)).fills:
            left -= len(group.fills) * self._width(group)
            self._read_pieces(*group)
        # those that were read wait behind the others
        self.groups.extendleft(reversed(waiting))

    def _take_group(self, waiting: deque[Group], tokens: int) -> Group:
        """Takes the first groups that can be read together within a number of tokens. The first group of a round is
        always taken, however long it is."""
        # a state that has read nothing cannot be merged with one that has
        alike = [group for group in waiting if (group.state is None) == (waiting[0].state is None)]
        taken, fills, width = [], 0, 0
        for group in alike:
            fills, width = fills + len(group.fills), max(width, self._width(group))
            if fills * width > tokens and (taken or tokens < self.prompt_tokens):
                break
            taken.append(group)
        for group in taken:
            waiting.remove(group)
        states = [group.state for group in taken if group.state is not None]
        return Group([fill for group in taken for fill in group.fills], merge_all(states) if states else None)

    def _width(self, group: Group) -> int:
        """Tokens of the longest of the next pieces."""
        return max(self._end(fill) - fill.at for fill in group.fills)

    def _read_pieces(self, fills: list[Fill], state: Any) -> None:
        """Reads the next piece of prompts; those that end there go on to the batch."""
        pieces = [fill.generation.ids[fill.at : self._end(fill)] for fill in fills]
        width = max(map(len, pieces))
        ids = torch.tensor([piece + [0] * (width - len(piece)) for piece in pieces], device=self.device)
        keep = None
        if any(len(piece) < width for piece in pieces):
            lengths = torch.tensor([len(piece) for piece in pieces], device=self.device)
            keep = torch.arange(width, device=self.device) < lengths[:, None]
        if state is None:
            state = self.model.start(len(fills), capacity=max(fill.generation.longest for fill in fills))
        if any(fill.generation.scores_prompt for fill in fills):
            logits, state = self.model.extend(ids, state, keep=keep)
            self._score_prompts(fills, pieces, logits)
            last = torch.stack([row[len(piece) - 1] for row, piece in zip(logits, pieces, strict=True)])
        else:
            last, state = read_prompt(self.model, ids, state, keep)
        self.counts.prompt_tokens += sum(map(len, pieces))
        for fill, piece in zip(fills, pieces, strict=True):
            fill.at += len(piece)
        state = trim(state, max(fill.at for fill in fills))
        self._keep_prefixes(fills, state)
        self._begin(fills, last, state)

    def _end(self, fill: Fill) -> int:
        """Up to which token of a prompt the next piece goes: where its state is worth keeping, a piece ends."""
        if not self.splits:
            return len(fill.generation.ids)
        end = min(fill.at + self.piece, len(fill.generation.ids))
        return min(end, fill.keep_at) if fill.at < fill.keep_at else end

    def _score_prompts(self, fills: list[Fill], pieces: list[list[int]], logits: Tensor) -> None:
        for fill, piece, row in zip(fills, pieces, logits, strict=True):
            one = fill.generation
            if one.scores_prompt:
                one.prompt_scores += self.chooser.score_prompt(one.ids, fill.at, row[: len(piece)], one.top or 0)

    def _keep_prefixes(self, fills: list[Fill], state: Any) -> None:
        for place, fill in enumerate(fills):
            if fill.at == fill.keep_at:
                row = take_rows(state, torch.tensor([place], device=self.device))
                row = with_capacity(trim(row, fill.at), fill.at)
                self.prefixes.keep(fill.digests[fill.at // self.piece - 1], row, state_bytes(row))

    def _begin(self, fills: list[Fill], last: Tensor, state: Any) -> None:
        """The prompts that are read become rows of the batch; the others wait for their next piece."""
        read = [fill.at == len(fill.generation.ids) for fill in fills]
        if not all(read):
            unread = [fill for fill, done in zip(fills, read, strict=True) if not done]
            places = [place for place, done in enumerate(read) if not done]
            rest = state if len(places) == len(fills) else take_rows(state, torch.tensor(places, device=self.device))
            self.groups.append(Group(unread, rest))
        pairs = [(place, row) for place, fill in enumerate(fills) if read[place] for row in fill.generation.samples]
        for fill, done in zip(fills, read, strict=True):
            if done and not fill.generation.samples:
                self._finish(fill.generation)
        if not pairs:
            return
        rows = [row for _, row in pairs]
        going = self._choose(rows, last[torch.tensor([place for place, _ in pairs], device=self.device)])
        stay = set(going)
        places = [place for place, row in pairs if row in stay]
        if going:
            whole = places == list(range(len(fills)))
            self.batch.join(going, state if whole else take_rows(state, torch.tensor(places, device=self.device)))

    def _step(self) -> None:
        if not self.batch.active:
            return
        rows, logits = self.batch.step()
        self.counts.steps += 1
        self.counts.rows_idle += len(self.batch.rows) - len(rows)
        self.counts.rows_stepped += len(rows)
        going = set(self._choose(rows, logits))
        self.batch.leave([row for row in rows if row not in going])

    def _choose(self, rows: list[Row], logits: Tensor) -> list[Row]:
        """Gives every row its next token, and returns those that continue."""
        broken: list[Generation] = []
        for row, (token, value, scored) in zip(rows, self.chooser.choose(rows, logits), strict=True):
            generation = row.generation
            if math.isnan(value):
                if generation not in broken:
                    broken.append(generation)
                    why = "the logits of the model are not numbers (NaN): its weights are broken"
                    self._fail(generation, Refused(500, why))
                continue
            generation.first_token = generation.first_token or time.monotonic()
            self.counts.generated_tokens += 1
            update = row.add(token, scored)
            if update is not None and generation.streams:
                self.outbox.append((generation, update))
            if row.ended and all(other.ended for other in generation.samples):
                self._finish(generation)
        return [row for row in rows if row.ended is None and row.generation not in broken]

    def _finish(self, generation: Generation) -> None:
        self.counts.finished += 1
        self.running.pop(generation, None)
        self.seconds_each += 0.1 * (time.monotonic() - generation.created - self.seconds_each)
        self.outbox.append((generation, Finished()))

    def _fail(self, generation: Generation, why: Refused) -> None:
        self.counts.failed += 1
        self.running.pop(generation, None)
        self.outbox.append((generation, Failed(why)))

    def _fail_all(self, why: Refused) -> None:
        for generation in list(self.running):
            self._fail(generation, why)
        self.groups.clear()
        self.batch = self.makes_batch()
