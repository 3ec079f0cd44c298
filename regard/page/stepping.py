"""One token through one head, number by number, and how far attention moves a word: the numbers of the view Steps."""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.core.rows import Rows
from regard.layers.attention.projected import Projected
from regard.layers.attention.softmax import Softmax
from regard.models.stack import Stack
from regard.page import maps
from regard.page.maps import LayerCall
from regard.page.subjects import Reading, Subject
from regard.page.wire import Reply, to_numpy

STEP_KEYS = 64  # keys shown; of a longer text, those with most weight
# a word with another meaning in each of two sentences, each with the word that tells which
PAIRS = (
    ("can", ("I can swim.", "swim"), ("He opened a can of beer.", "beer")),
    ("like", ("I like music.", "music"), ("You look like your father.", "look")),
    ("left", ("She left the house.", "house"), ("Turn left at the station.", "turn")),
    ("bank", ("We sat on the bank of the river.", "river"), ("He works in a bank in Berlin.", "works")),
)


def steps(reading: Reading, call: LayerCall, head: int, query: int) -> Reply:
    """One query of a head, with the numbers of the keys it sees, or of those with most weight."""
    call, head = maps.part_of_head(call, head)
    layer = call.layer
    slots = layer.facts.columns == "slots"
    if slots or not isinstance(layer, Projected) or set(layer.inputs) != {"q", "k", "v"}:
        raise ValueError(f"attention {call.name!r} has no single query, key and value: see its map under Heads")
    queries, sources = call.projected
    times = layer.shape.heads // layer.shape.kv_heads
    q, k, v = queries["q"][0, head, query], sources["k"][0, head // times], sources["v"][0, head // times]
    weights = maps.rows(call, [query])[head, 0]
    visible = _visible_keys(call, query, weights)
    # in the order of the text
    best = visible[weights[visible].abs().topk(min(STEP_KEYS, len(visible))).indices].sort().values
    meta = {
        "queries": reading.queries,
        "keys": [reading.keys[key] for key in best.tolist()],
        "places": best.tolist(),
        "query": query,
        "visible": len(visible),
        "hidden": call.columns - len(visible),
        "plain": isinstance(layer, Softmax),
        "formula": layer.facts.formula,
        "causal": layer.shape.role == "causal",
        "scale": layer.scale,
    }
    total = weights[visible] @ v[visible].to(weights)
    return Reply(meta, _six_steps(q, k[best], v[best], layer.scale, weights[best], total))


def worked_example() -> Reply:
    """Scores of 112 and 96 over width 64."""
    words, D = ["▁Thinking", "▁Machines"], 64
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(D, generator=generator, dtype=torch.float64)
    # any two keys with these products will do: random ones, moved along q until the score is right
    k = torch.randn(2, D, generator=generator, dtype=torch.float64)
    k = k + ((torch.tensor([112.0, 96.0], dtype=torch.float64) - k @ q) / (q @ q))[:, None] * q
    v = torch.randn(2, D, generator=generator, dtype=torch.float64)
    weights = (k @ q / math.sqrt(D)).softmax(0)
    meta = {"queries": words, "keys": words, "places": [0, 1], "query": 0, "visible": 2, "hidden": 0}
    meta |= {"plain": True, "formula": Softmax.facts.formula, "causal": False, "scale": D**-0.5}
    return Reply(meta, _six_steps(q, k, v, D**-0.5, weights, weights @ v))


def _six_steps(q: Tensor, k: Tensor, v: Tensor, scale: float, weights: Tensor, total: Tensor) -> dict[str, np.ndarray]:
    """Query, keys and values; scores; scaled scores; weights; weighted values; their sum over all keys."""
    scores = k @ q
    weighted = weights[:, None].to(v) * v
    parts = {"q": q, "k": k, "v": v, "scores": scores, "scaled": scores * scale, "weights": weights}
    parts |= {"weighted": weighted, "sum": total}
    return {name: to_numpy(part) for name, part in parts.items()}


def _visible_keys(call: LayerCall, query: int, weights: Tensor) -> Tensor:
    """The numbers of the keys that a query can see."""
    visible = weights != 0 if maps.zeros_are_hidden(call.layer) else torch.ones_like(weights, dtype=torch.bool)
    if call.layer.shape.role == "causal" and call.layer.facts.columns == "tokens":
        visible[query + 1 :] = False
    return visible.nonzero()[:, 0]


# how far attention moves a word


def contributions(call: LayerCall, at: int) -> tuple[Tensor, float]:
    """Each token's share [S] of the step by which attention moves one token, and the length of that step.

    The step is a sum over tokens, d = sum_j c_j with c_j = sum_h a_hj v_hj W_h; the share of j is c_j . d / |d|^2.
    """
    layer = call.layer
    if not isinstance(layer, Projected) or not layer.facts.linear or len(layer.input_names("value")) != 1:
        raise ValueError(f"attention {layer.facts.name!r} is not a sum over words: choose another run")
    weights = maps.rows(call, [at])[:, 0]  # [H, S]
    values = call.projected[1][layer.input_names("value")[0]][0]
    values = values.repeat_interleave(layer.shape.heads // layer.shape.kv_heads, 0)  # [H, S, D]
    out = layer.output.weight.detach().unflatten(1, (layer.shape.heads, -1))  # [E, H, D]
    parts = torch.einsum("hs,hsd,ehd->se", weights, values, out)
    step = parts.sum(0)
    return parts @ step / (step @ step), float(step.norm())


def encoder_of(subject: Subject) -> Stack | None:
    """The encoder whose vectors can be compared; None if the model has none."""
    encoder = getattr(subject.model, "encoder", None)
    return encoder if "encoder" in subject.places and isinstance(encoder, Stack) else None


@torch.no_grad()
def vectors(subject: Subject, stack: Stack, text: str, layer: int, at: int) -> tuple[Tensor, Tensor]:
    """The vector of a token before the first layer, and after a layer."""
    device = next(stack.parameters()).device
    ids = torch.tensor([[*subject.begins, *subject.encode(text), *subject.ends]], device=device)
    outputs: list[Tensor] = []
    rows = Rows.full(ids)
    stack(ids, rows, outputs=outputs)
    return stack.embed(ids, rows)[0, at], outputs[layer][0, at]


def sentence_pairs(subject: Subject) -> list[dict[str, Any]]:
    """The pairs of sentences in which the word and its clues are one token each, if the model has an encoder."""
    if encoder_of(subject) is None:
        return []
    pairs = []
    for word, *sides in PAIRS:
        with suppress(ValueError):
            for sentence, clue in sides:
                tokens = subject.names([*subject.begins, *subject.encode(sentence), *subject.ends])
                for one in (word, clue):
                    find_word(tokens, one)
            (text, first), (other, second) = sides
            pairs.append({"word": word, "text": text, "other": other, "clues": [first, second]})
    return pairs


def find_word(tokens: Sequence[str], word: str) -> int:
    """The number of the token that is a word."""
    plain = [token.replace("▁", "").lower() for token in tokens]
    if word.lower() not in plain:
        raise ValueError(f"{word!r} is not one token of {' '.join(plain)!r}: choose one of its tokens")
    return plain.index(word.lower())
