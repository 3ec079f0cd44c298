"""Texts with some tokens hidden, for models that predict them from both sides.

Devlin et al. 2019 (BERT, arXiv 1810.04805): of the tokens of a text a share is chosen, and of those 80 % are replaced
by the mask, 10 % by a token drawn at random, and 10 % stay as they are; the model must predict all of the chosen. What
is chosen is drawn anew each time a text comes (Liu et al. 2019, RoBERTa, arXiv 1907.11692), by seed, epoch and batch.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from regard.data.batches import Planned, Ragged, drawing, to_device
from regard.data.documents import IGNORED
from regard.data.tokenizer import CONTINUES, Tokenizer

PIECE = "##"  # before a token that continues a word, in the vocabularies of BERT
HIDDEN, RANDOM = 0.8, 0.1  # of the chosen tokens; the others stay


class Hidden(NamedTuple):
    """Texts with hidden tokens, padded on the right; `keep` is None where nothing is. Places are padded with 0, their
    targets with IGNORED: their number depends on the shape of the batch alone, as a CUDA graph needs it."""

    tokens: Tensor  # [B, T]
    keep: Tensor | None
    places: Tensor  # [B, P], of the chosen tokens
    targets: Tensor  # [B, P], what stood there
    indices: Tensor  # [B], which rows

    def to(self, device: torch.device | str) -> "Hidden":
        return to_device(self, device)


class Masking:
    """Which tokens are chosen, and what stands in their place."""

    def __init__(self, tokenizer: Tokenizer, share: float = 0.15, *, whole_words: bool = False) -> None:
        if not 0 < share < 1:
            raise ValueError(f"the share of masked tokens must be above 0 and below 1, got {share}")
        if tokenizer.mask is None:
            raise ValueError("this tokenizer has no mask")
        self.mask, self.share = tokenizer.mask, share
        self.special = np.isin(np.arange(tokenizer.size), tokenizer.special)
        self.others = np.flatnonzero(~self.special)
        self.edges = word_edges(tokenizer) if whole_words else None

    def __call__(self, ids: np.ndarray, real: np.ndarray, draw: np.random.Generator) -> tuple[np.ndarray, ...]:
        """ids [B, T], real [B, T] -> (ids with some replaced, places [B, P], targets [B, P])."""
        B, T = ids.shape
        free = real & ~self.special[ids]
        # on average the share of each row, so that a row of few tokens has its turn too
        budget = np.floor(self.share * free.sum(1) + draw.random(B)).astype(np.int64)
        P = int(np.floor(self.share * T + 1))
        scores = draw.random((B, T))
        if self.edges is not None:
            # all tokens of a word have the score of its first
            begins = self.edges.opens[ids]
            begins[:, 1:] |= self.edges.closes[ids[:, :-1]]
            begins[:, 0] = True
            scores = np.take_along_axis(scores, np.maximum.accumulate(np.where(begins, np.arange(T), 0), 1), 1)
        order = np.argsort(np.where(free, scores, 2.0), 1, kind="stable")
        taken = np.arange(T) < budget[:, None]
        if self.edges is not None:
            taken = whole_words(np.take_along_axis(scores, order, 1), free.sum(1), budget)
            first = np.argsort(~taken, 1, kind="stable")
            order, taken = np.take_along_axis(order, first, 1), np.take_along_axis(taken, first, 1)
        return self._replace(ids, order[:, :P], taken[:, :P], draw)

    def _replace(
        self, ids: np.ndarray, order: np.ndarray, taken: np.ndarray, draw: np.random.Generator
    ) -> tuple[np.ndarray, ...]:
        before = np.take_along_axis(ids, order, 1)
        fate, others = draw.random(order.shape), draw.random(order.shape)
        drawn = self.others[(others * len(self.others)).astype(np.int64)]
        after = np.where(fate < HIDDEN, self.mask, np.where(fate < HIDDEN + RANDOM, drawn, before))
        changed = ids.copy()
        np.put_along_axis(changed, order, np.where(taken, after, before), 1)
        return changed, np.where(taken, order, 0), np.where(taken, before, IGNORED)


def whole_words(scores: np.ndarray, free: np.ndarray, budget: np.ndarray) -> np.ndarray:
    """Which of sorted tokens are taken, where tokens of one word have equal scores: word by word, but no word that
    exceeds the rest of the budget of its row."""
    places = np.arange(scores.shape[1] + 1)
    taken = places[:-1] < budget[:, None]
    # a word that begins just behind the budget, or nothing at all: then what comes before are whole words
    begins = np.diff(scores, prepend=-1.0, append=2.0) != 0
    begins |= places >= free[:, None]
    cut = ~np.take_along_axis(begins, budget[:, None], 1)[:, 0]
    for row in np.flatnonzero(cut).tolist():
        count, left = int(free[row]), int(budget[row])
        taken[row] = False
        starts = np.flatnonzero(np.diff(scores[row, :count], prepend=-1.0))
        for start, size in zip(starts.tolist(), np.diff(starts, append=count).tolist(), strict=True):
            if left == 0:
                break
            if size <= left:
                taken[row, start : start + size] = True
                left -= size
    return taken


class Edges(NamedTuple):
    """Of each id, whether a word begins with it and whether one begins behind it."""

    opens: np.ndarray
    closes: np.ndarray


def word_edges(tokenizer: Tokenizer) -> Edges:
    """Words are what white space separates; special tokens are words of their own."""
    names, kind = tokenizer.tokens(range(tokenizer.size)), tokenizer.kind
    opens, closes = np.ones(tokenizer.size, bool), np.ones(tokenizer.size, bool)
    pieces = any(name.startswith(PIECE) for name in names)
    for id, name in enumerate(names):
        if kind in ("words", "stems") or id in tokenizer.special:
            continue
        blank = name in ("▁", "\\n", "\\t")
        opens[id], closes[id] = blank or name.startswith("▁"), False
        if kind in ("characters", "bytes"):
            closes[id] = blank
        elif kind == "units":
            closes[id] = not name.endswith(CONTINUES)
        elif kind == "published" and pieces:
            opens[id] = not name.startswith(PIECE)
    return Edges(opens, closes)


class TokenRows(Protocol):
    """Rows of tokens, padded on the right."""

    @property
    def tokens(self) -> Tensor: ...

    @property
    def keep(self) -> Tensor | None: ...

    @property
    def indices(self) -> Tensor: ...


class Rows(Protocol):
    """Batches of rows of tokens, each a function of seed, epoch and index."""

    seed: int

    def __len__(self) -> int: ...

    def count(self, epoch: int) -> int: ...

    def get(self, epoch: int, i: int) -> TokenRows: ...


class Texts(Planned):
    """Every text once per epoch, alone in its row; one that is longer than `length` continues in further rows."""

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        *,
        length: int,
        tokens: int,
        seed: int = 0,
        shuffle: bool = True,
        multiple: int = 1,
    ) -> None:
        self.ids = Ragged([text[at : at + length] for text in texts for at in range(0, len(text), length)])
        self.multiple = multiple
        lengths = -(-self.ids.lengths // multiple) * multiple
        if (worst := lengths.max()) > tokens:
            raise ValueError(f"a row of {worst} tokens does not fit into a batch of {tokens}: raise training.tokens")
        super().__init__(lengths, tokens=tokens, seed=seed, shuffle=shuffle)

    def get(self, epoch: int, i: int) -> Hidden:
        """Nothing is hidden yet."""
        index = self.rows(epoch, i)
        tokens, keep = self.ids.padded(index, multiple=self.multiple)
        none = torch.zeros(len(index), 0, dtype=torch.long)
        return Hidden(tokens, keep, none, none, torch.from_numpy(index))


class MaskedBatches:
    """Batches of rows, masked. Without `anew`, each epoch hides the same tokens, so that models can be compared."""

    def __init__(self, rows: Rows, masking: Masking, *, anew: bool = True) -> None:
        self.rows, self.masking, self.anew = rows, masking, anew

    def __len__(self) -> int:
        return len(self.rows)

    def count(self, epoch: int) -> int:
        return self.rows.count(epoch)

    def get(self, epoch: int, i: int) -> Hidden:
        found = self.rows.get(epoch, i)
        ids = found.tokens.numpy()
        real = np.ones(ids.shape, bool) if found.keep is None else found.keep.numpy()
        parts = self.masking(ids, real, drawing(self.rows.seed, epoch if self.anew else 0, i))
        tokens, places, targets = map(torch.from_numpy, parts)
        return Hidden(tokens, found.keep, places, targets, found.indices)
