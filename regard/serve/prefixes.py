"""States of prompts that many requests begin with, kept so that the next one need not read them again."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

SEEN = 65_536  # beginnings of prompts that are remembered by their digest


class PrefixCache:
    """The states of beginnings of prompts, the least recently used leave first. Beginnings end at multiples of `piece`
    tokens. One is kept when it comes the second time: most prompts come once, and a copy of a state costs memory."""

    def __init__(self, most_bytes: int, piece: int):
        self.most_bytes, self.piece = most_bytes, piece
        self.states: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self.seen: OrderedDict[bytes, None] = OrderedDict()
        self.bytes = self.hits = self.misses = self.tokens_saved = 0

    def digests(self, ids: Sequence[int]) -> list[bytes]:
        """Of the beginnings of a prompt, the shortest first; at least the last token is left to be read."""
        if not self.most_bytes:
            return []
        found, digest = [], b""
        for end in range(self.piece, len(ids), self.piece):
            digest = hashlib.blake2b(
                digest + array("q", ids[end - self.piece : end]).tobytes(), digest_size=16
            ).digest()
            found.append(digest)
        return found

    def find(self, digests: Sequence[bytes]) -> tuple[int, Any, int]:
        """For the beginnings of a prompt: the number of tokens that a kept state has read, and that state, which the
        caller copies; and the length at which its own state is worth keeping (0: at none)."""
        known = [number for number, digest in enumerate(digests) if digest in self.seen]
        kept = [number for number in known if digests[number] in self.states]
        for digest in digests:
            self.seen[digest] = None
            self.seen.move_to_end(digest)
        while len(self.seen) > SEEN:
            self.seen.popitem(last=False)
        keep_at = self.piece * (known[-1] + 1) if known and known[-1] not in kept else 0
        if not digests:
            return 0, None, 0
        if not kept:
            self.misses += 1
            return 0, None, keep_at
        self.hits += 1
        digest, length = digests[kept[-1]], self.piece * (kept[-1] + 1)
        self.states.move_to_end(digest)
        self.tokens_saved += length
        return length, self.states[digest][0], keep_at

    def keep(self, digest: bytes, state: Any, size: int) -> None:
        """Keeps a state of `size` bytes, unless it alone is larger than the cache."""
        if digest in self.states or size > self.most_bytes:
            return
        self.states[digest] = (state, size)
        self.bytes += size
        while self.bytes > self.most_bytes:
            _, (_, freed) = self.states.popitem(last=False)
            self.bytes -= freed
