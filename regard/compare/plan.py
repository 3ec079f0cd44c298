"""What a comparison asks: mechanisms, lengths and sizes, as questions. What cannot be asked has its reason here."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

import regard
from regard.compare.measure import DECODING_STEPS
from regard.compare.question import MEASURE, MEMORY, TIMED, Kind, Question, code_of, machine_of, short
from regard.config import from_json
from regard.layers.attention.base import Facts
from regard.spec import ATTENTION, parse

BASELINE = "softmax"
# Options that are usual at lengths of thousands of tokens. Others have their defaults, and `longest` is the length,
# and the tokens that are decoded behind it.
FAIR = {
    "axial": ("axial(width=128)",),
    "bigbird": ("bigbird(block=64, random=3)",),
    "compressive": ("compressive(segment=256, memory=256, compressed=256)",),
    "globals": ("globals(tokens=16)",),
    "heads": ("heads(local(window=256), strided(stride=128))",),
    "linformer": ("linformer(rank=256, longest={longest})",),
    "local": ("local(window=256)",),
    "longformer": ("longformer(window=256, globals=16)",),
    "performer": ("performer(features=256)",),
    "reformer": ("reformer(chunk=64, buckets=256, rounds=2)",),
    "routing": ("routing(clusters=128)",),
    "sinkhorn": ("sinkhorn(block=128, longest={longest})",),
    "sparse": ("sparse(pattern='fixed', stride=128, summary=8)", "sparse(pattern='strided', stride=128)"),
    "strided": ("strided(stride=128)",),
    "xl": ("xl(segment=256, memory=256)",),
}

# The same for about a hundred tokens: windows reach half of them, as nothing is learned about tokens that none sees.
SHORT = {
    "axial": ("axial(width=12)",),
    "bigbird": ("bigbird(block=8, window=3, globals=2, random=3)",),
    "clustered": ("clustered(clusters=32, topk=32)",),
    "clusterformer": ("clusterformer(clusters=8, chunk=32, bank=1024, every=50)",),
    "compressive": ("compressive(segment=32, memory=32, compressed=32, rate=2)",),
    "entmax": ("entmax(alpha=1.5)",),
    "etc": ("etc(globals=16, radius=32)",),
    "gmlp": ("gmlp(longest={longest})",),
    "globals": ("globals(tokens=16)",),
    "heads": ("heads(local(window=16), softmax)",),
    "image": ("image(block=32, memory=64)",),
    "linformer": ("linformer(rank=64, longest={longest})",),
    "local": ("local(window=64)",),
    "location": ("location(longest={longest})",),
    "longformer": ("longformer(window=64, globals=2)",),
    "longshort": ("longshort(window=32, rank=16, chunk=16)",),
    "luna": ("luna(length=32)",),
    "mixer": ("mixer(longest={longest}, inner=128)",),
    "nystrom": ("nystrom(landmarks=32)",),
    "performer": ("performer(features=128)",),
    "poolingformer": ("poolingformer(window=32, wide=96)",),
    "predictive": ("predictive(window=10)",),
    "reformer": ("reformer(chunk=32, buckets=8, rounds=4)",),
    "rfa": ("rfa(features=64)",),
    # as in the paper, half of the heads are local; a query that is also the key attends to its own token first
    "routing": ("heads(local(window=32), routing(clusters=2))", "routing(clusters=4, shared=False)"),
    "sinkhorn": ("sinkhorn(block=16, longest={longest})",),
    "sparse": ("sparse(pattern='strided', stride=9)",),
    "strided": ("strided(stride=9)",),
    "synthesizer": ("synthesizer(kinds=('dense', 'random'), longest={longest})",),
    "xl": ("xl(segment=32, memory=64)",),
}
MAX_THREADS = 1024
USUAL = ("linear", "local", "longformer", "performer", "sparse", "xl")  # what people ask for first
SHORTER_THAN = 512  # tokens, for tasks of fewer of which the options of SHORT are taken


@dataclass(frozen=True)
class CostPlan:
    """A table of costs."""

    specs: tuple[str, ...] = ()  # empty: every mechanism
    lengths: tuple[int, ...] = (2048,)
    role: Literal["self", "causal", "cross"] = "causal"
    batch: int = 1
    width: int = 512
    heads: int = 8
    part: Literal["layer", "mixing"] = "layer"
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 0
    minutes: float = 10.0

    def __post_init__(self) -> None:
        for name in ("lengths", "batch", "width", "heads"):
            values = getattr(self, name)
            for value in values if isinstance(values, tuple) else (values,):
                if value < 1:
                    raise ValueError(f"{name} must be at least 1, got {value}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}: choose heads that divide it")
        if not 0 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads must be 1 to {MAX_THREADS:,}, or 0 to let PyTorch choose, got {self.threads}")
        check_minutes(self.minutes)
        if not hasattr(torch, self.dtype) or not isinstance(getattr(torch, self.dtype), torch.dtype):
            raise ValueError(f"dtype must be float32, bfloat16 or float16, got {self.dtype!r}")
        for spec in self.specs:
            ATTENTION.find(parse(spec).name)  # raises for an unknown name, and lists the known

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values."""
        return dataclasses.asdict(self)

    def question(self, kind: Kind, spec: str, length: int) -> Question:
        """The question of one cell."""
        timed = kind in TIMED
        return Question(
            kind=kind,
            spec=short(spec),
            role=self.role,
            length=length,
            batch=self.batch,
            model={"width": self.width, "heads": self.heads},
            part=self.part,
            device=self.device,
            threads=self.threads if timed else 0,
            dtype=self.dtype,
            measure=MEMORY if kind == "memory" else MEASURE,
            code=code_of(spec),
            machine=machine_of(self.device) if timed else "",
        )

    def kinds(self, row: "Row") -> tuple[Kind, ...]:
        """What is asked of a row."""
        decodes = self.role != "self" and self.part == "layer" and row.decodes
        return ("count", "memory", "speed", *(("decode",) if decodes else ()))  # pyright: ignore[reportReturnType]

    def rows(self) -> list["Row"]:
        """The rows of the table: the baseline first, then by how their time grows, and the usual ones before others."""
        found = []
        for length in self.lengths:
            rows = [self._row(spec, length) for spec in self._at(length)]
            found += sorted(rows, key=_place)
        return found

    def only(self, rows: Sequence[str]) -> "CostPlan":
        """The plan with the mechanisms of these rows, whatever their options; without rows, the whole plan."""
        names = {parse(row).name for row in rows}
        kept = tuple(spec for spec in self.specs if parse(spec).name in names)
        return dataclasses.replace(self, specs=kept or (BASELINE,)) if rows else self

    def _at(self, length: int) -> list[str]:
        """The specs at a length, each once; the baseline is among them."""
        asked = self.specs or [name for name in regard.names() if name != "heads"]
        # some tokens are decoded behind the length
        longest = length + DECODING_STEPS if self.role == "causal" and self.part == "layer" else length
        specs = [spec for item in (BASELINE, *asked) for spec in fair(item, longest)]
        return list(dict.fromkeys(map(short, specs)))

    def _row(self, spec: str, length: int) -> "Row":
        try:
            facts = _facts(spec)
        except ValueError as error:
            return Row(spec, length, str(error))
        if self.role not in facts.roles:
            why = dict(facts.refusals).get(self.role, "the mechanism is not defined for it")
            return Row(spec, length, f"no role {self.role!r}: {why}")
        return Row(spec, length, "", facts.time.exponent, facts.state is not None)


@functools.cache
def _facts(spec: str) -> Facts:
    return regard.facts(spec)


@dataclass(frozen=True)
class Row:
    """A mechanism at a length, with why it cannot be asked, if it cannot."""

    spec: str
    length: int
    refusal: str = ""
    exponent: float = 0.0
    decodes: bool = False


def _place(row: Row) -> tuple[bool, bool, float, int]:
    """Which rows are measured first, should the time end."""
    return short(row.spec) != BASELINE, bool(row.refusal), row.exponent, usual_place(row.spec)


def usual_place(spec: str) -> int:
    """The place of a spec among those that people ask for first."""
    name = parse(spec).name
    return USUAL.index(name) if name in USUAL else len(USUAL)


def fair_for_task(item: str, length: int) -> list[str]:
    """The specs that stand for a name in a task of a length."""
    return fair(item, length, SHORT if length < SHORTER_THAN else FAIR)


def fair(item: str, length: int, known: dict[str, tuple[str, ...]] | None = None) -> list[str]:
    """The specs that stand for a name at a length; a spec with options is left as it is."""
    spec = parse(item)
    name = ATTENTION.canonical(spec).name
    if spec.options or spec.parts or short(item) != name:
        return [item]
    options = [option.name for option in ATTENTION.options(name)]
    usual = (f"{name}(longest={length})" if "longest" in options else name,)
    return [text.format(longest=length) for text in (FAIR if known is None else known).get(name, usual)]


def cost_plan(values: dict[str, Any]) -> CostPlan:
    """A plan from plain values."""
    return from_json(CostPlan, values)


def check_minutes(minutes: float) -> None:
    """Refuses a time limit that is none."""
    if not 0 < minutes < math.inf:
        raise ValueError(f"minutes must be above 0 and finite, such as 10, got {minutes:g}")


def whole_numbers(flag: str, text: str) -> tuple[int, ...]:
    """The numbers of a flag as they are written on a command line: 1024,8192."""
    try:
        numbers = tuple(dict.fromkeys(int(number.replace("_", "")) for number in text.split(",") if number.strip()))
    except ValueError:
        numbers = ()
    if not numbers:
        raise ValueError(f"{flag} takes whole numbers such as 1024,8192, got {text!r}")
    return numbers


def groups(rows: Sequence[Row], size: int) -> Iterable[list[Row]]:
    """Rows in groups, in their order."""
    for first in range(0, len(rows), size):
        yield list(rows[first : first + size])
