"""The six tasks of MAD (Poli et al. 2024, Mechanistic Design and Scaling of Hybrid Architectures, arXiv 2403.17844), as
we read their definitions. Recall in context is trained on all next tokens, and tested where a key comes again."""

import functools

import torch

from regard.data.tasks.base import IGNORED, Examples, Task, blank_answers, check_options

MOTIF = 3  # tokens of the longest keys and values of fuzzy recall
COPIED = 16  # symbols of selective copying


def mad_recall(*, vocabulary: int = 16) -> Task:
    """Pairs drawn with replacement, with a map from keys to values that is fixed in a row."""
    return _recall("mad-recall", vocabulary, 0, 0.0)


def mad_noisy(*, vocabulary: int = 16, noise: int = 16, share: float = 0.2) -> Task:
    """The same, where a pair's slot has noise instead with probability `share`."""
    return _recall("mad-noisy", vocabulary, noise, share)


def _recall(name: str, vocabulary: int, noise: int, share: float) -> Task:
    check_options(vocabulary >= 4, f"the vocabulary must have 4 tokens or more, got {vocabulary}")
    draw = functools.partial(_draw_recall, vocabulary // 2, noise, share)
    options = {"vocabulary": vocabulary} | ({"noise": noise, "share": share} if noise else {})
    chance = 1 / (vocabulary // 2)
    return Task(
        draw, "causal", vocabulary + noise, chance, name, length=128, next_token=True, options=options, version=1
    )


def _draw_recall(half: int, noise: int, share: float, batch: int, length: int, generator: torch.Generator) -> Examples:
    pairs = length // 2
    keys = torch.randint(half, (batch, pairs), generator=generator)
    values = half + torch.randint(half, (batch, half), generator=generator).gather(1, keys)
    known = (keys[:, :, None] == keys[:, None, :]).tril(-1)
    if noise:
        hidden = torch.rand(batch, pairs, generator=generator) < share
        known = known & ~hidden[:, None, :] & ~hidden[:, :, None]
        random = 2 * half + torch.randint(noise, (batch, pairs, 2), generator=generator)
        keys = torch.where(hidden, random[..., 0], keys)
        values = torch.where(hidden, random[..., 1], values)
    tokens = torch.stack([keys, values], 2).flatten(1)
    answers = blank_answers(tokens)
    answers[:, ::2] = torch.where(known.any(2), values, IGNORED)
    return Examples(tokens, answers)


def mad_fuzzy(*, vocabulary: int = 16, motifs: int = 4) -> Task:
    """Keys and values are motifs of 1 to 3 tokens, `motifs` keys of each size in a row. Tested are the values behind
    keys of 3 tokens that came before; padded on the left with a token of its own."""
    half = vocabulary // 2
    check_options(1 <= motifs <= half, f"motifs must be from 1 to half of the vocabulary, {half}; got {motifs}")
    draw = functools.partial(_draw_fuzzy, half, motifs)
    options = {"vocabulary": vocabulary, "motifs": motifs}
    return Task(draw, "causal", 2 * half + 1, 1 / half, "mad-fuzzy", length=128, next_token=True, options=options)


def _draw_fuzzy(half: int, motifs: int, batch: int, length: int, generator: torch.Generator) -> Examples:
    tokens = torch.full((batch, length), 2 * half)
    answers = blank_answers(tokens)

    def draw(top: int) -> int:
        return int(torch.randint(top, (1,), generator=generator))

    for row in range(batch):
        known = {}
        for size in range(1, MOTIF + 1):
            firsts = torch.randperm(half, generator=generator)[:motifs].tolist()
            for first in firsts:
                key = (first, *(draw(half) for _ in range(size - 1)))
                known[size, first] = key, [half + draw(half) for _ in range(1 + draw(MOTIF))]
        words: list[int] = []
        asked: list[int] = []
        seen: set[tuple[int, ...]] = set()
        while True:
            key, value = list(known.values())[draw(len(known))]
            if len(words) + len(key) + len(value) > length:
                break
            is_asked = key in seen and len(key) == MOTIF
            seen.add(key)
            words += [*key, *value]
            # the token before each token of the value predicts it
            asked += [IGNORED] * (len(key) - 1) + (value if is_asked else [IGNORED] * len(value)) + [IGNORED]
        start = length - len(words)
        tokens[row, start:], answers[row, start:] = torch.tensor(words), torch.tensor(asked)
    return Examples(tokens, answers)


def mad_selective(*, vocabulary: int = 16, copied: int = COPIED) -> Task:
    """`copied` symbols with blanks between them, a copy token, then as many blanks: answered in order."""
    check_options(vocabulary >= 4, f"the vocabulary must have 4 tokens or more, got {vocabulary}")
    draw = functools.partial(_draw_selective, vocabulary - 2, copied)
    options = {"vocabulary": vocabulary, "copied": copied}
    return Task(draw, "causal", vocabulary, 1 / (vocabulary - 2), "mad-selective", length=256, options=options)


def _draw_selective(symbols: int, copied: int, batch: int, length: int, generator: torch.Generator) -> Examples:
    room = length - copied - 1
    check_options(room >= copied, f"{copied} symbols need {2 * copied + 1} tokens or more, got {length}")
    blank, copy = symbols, symbols + 1
    x = torch.randint(symbols, (batch, copied), generator=generator)
    places = torch.rand(batch, room, generator=generator).argsort(1)[:, :copied].sort(1).values
    tokens = torch.full((batch, length), blank)
    tokens.scatter_(1, places, x)
    tokens[:, room] = copy
    answers = blank_answers(tokens)
    answers[:, room + 1 :] = x
    return Examples(tokens, answers)


def mad_memorize(*, vocabulary: int = 256) -> Task:
    """A map from half of the vocabulary to the other half that never changes: key, ask token, key, ask token ... It
    tests parameters, not attention."""
    half = vocabulary // 2
    fixed = half + torch.randint(half, (half,), generator=torch.Generator().manual_seed(vocabulary))

    def draw(batch: int, length: int, generator: torch.Generator) -> Examples:
        keys = torch.randint(half, (batch, length // 2), generator=generator)
        tokens = torch.stack([keys, torch.full_like(keys, 2 * half)], 2).flatten(1)
        answers = blank_answers(tokens)
        answers[:, 1::2] = fixed[keys]
        return Examples(tokens, answers)

    options = {"vocabulary": vocabulary}
    return Task(draw, "causal", 2 * half + 1, 1 / half, "mad-memorize", length=32, attention=False, options=options)


def mad_compress(*, vocabulary: int = 16) -> Task:
    """Symbols and a last token, behind which all of them are given back in order: everything must pass through what
    that token has read. (The paper decodes the vector of the token by an MLP; here the model itself does.)"""
    symbols = vocabulary - 2

    def draw(batch: int, length: int, generator: torch.Generator) -> Examples:
        n = (length - 1) // 2
        x = torch.randint(symbols, (batch, n), generator=generator)
        end = torch.full((batch, 1), symbols)
        asks = torch.full((batch, n), symbols + 1)
        tokens = torch.cat([x, end, asks], 1)
        answers = blank_answers(tokens)
        answers[:, n + 1 :] = x
        return Examples(tokens, answers)

    options = {"vocabulary": vocabulary}
    return Task(draw, "causal", vocabulary, 1 / symbols, "mad-compress", length=63, options=options)
