"""Which checks `make test` runs; `make test-all` runs every check on every case."""

from dataclasses import replace
from typing import Any

import pytest

from regard.spec import ATTENTION
from regard.testing.cases import Case, facts_of

# what differs in how it is exported: dense, in tiles, in classes, a scan, a sort, a low rank, slots, and none
QUICKLY_EXPORTED = {
    ("softmax", "cross"),
    ("longformer(window=3, globals=2)", "self"),
    ("strided(stride=3)", "causal"),
    ("linear", "causal"),
    ("reformer(chunk=4, buckets=4, rounds=1)", "self"),
    ("compressed(factor=3)", "cross"),
    ("compressive(segment=10, memory=10, compressed=3, rate=5, function='used')", "causal"),
}

# added to the input, to the logits, turned, and scored with the query: with parameters where a kind has some
POSITIONS_IN_STEPS = {"learned", "buckets", "rotary", "shaw"}


def is_quick(case: Case, check: str) -> bool:
    """Whether `make test` runs a check on a case; `make test-all` runs every check on every case.

    The first example of a mechanism goes through every check but `export`, in every role; so does every example that
    declares another cost or other limits than the first. The rest skip what is slow and depends on the code path of the
    whole mechanism. Every scheme of positions goes through every check on softmax; on the others through the reference,
    and one of each kind in steps and with its gradients."""
    name = case.spec.split("(")[0]
    if check == "export":
        return (case.spec, case.role) in QUICKLY_EXPORTED
    if case.position is not None:
        one_of_its_kind = case.position.split("(")[0] in POSITIONS_IN_STEPS
        return name == "softmax" or check == "reference" or (check in ("split", "gradient") and one_of_its_kind)
    first = ATTENTION.find(name).examples[0]
    if check not in ("compile", "cost", "low_precision", "autocast", "twice", "round_trip") or case.spec == first:
        return True
    same_facts = replace(facts_of(case.spec), formula="") == replace(facts_of(first), formula="")
    return check == "cost" and not same_facts


def one_of_each(specs: list[str]) -> list[Any]:
    """Specs as parameters of a test of a model that takes any attention: of those with one base class and one contract,
    which is all that a model knows of them, `make test` takes the first."""
    known, found = set(), []
    for spec in specs:
        facts = facts_of(spec)
        promises = facts.prefix_invariant, facts.split_invariant, facts.padding, facts.stream, facts.auxiliary_loss
        kind = ATTENTION.find(spec.split("(")[0]).__base__, *promises
        found.append(pytest.param(spec, marks=pytest.mark.exhaustive if kind in known else ()))
        known.add(kind)
    return found
