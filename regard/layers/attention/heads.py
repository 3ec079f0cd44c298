"""Different mechanisms on different heads of one layer."""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.reference import add_up
from regard.core.rows import Memory, Rows
from regard.core.shape import Order, Shape
from regard.core.state import Initial, Out, Progress
from regard.layers.attention.base import Attention, Facts
from regard.layers.attention.projected import Projected, joint_outputs, one_product_is_faster
from regard.spec import ATTENTION, Spec


class PartStates(NamedTuple):
    """One state per part."""

    parts: tuple[Any, ...]
    progress: Progress


class CrossPartStates(NamedTuple):
    """One cross state per part."""

    parts: tuple[Any, ...]
    count: Tensor  # [B]  # pyright: ignore[reportIncompatibleMethodOverride]
    S: int


class MixedHeads(Attention):
    """The heads split evenly, in order, among the specs in parentheses. Since concat(o) W_O = sum_p o_p W_O,p, a layer
    of mixed heads is the sum of layers with fewer heads of the same width. Costs as much as its most expensive part."""

    facts = Facts(
        name="heads",
        paper="Child et al. 2019, Generating Long Sequences with Sparse Transformers (section 4.3)",
        link="arXiv 1904.10509",
        family="patterns",
        formula="y = sum_p part_p(x), part p holding H / P of the H heads",
        time=Order("most expensive part", 2),
        memory=Order("most expensive part", 1),
        state=Order("most expensive part", 1),
        positions=("rotation", "bias", "content"),
    )
    examples = (
        "heads(local(window=3), softmax)",
        "heads(softmax, additive)",
        "heads(local(window=4), rfa(features=2), globals(tokens=2), linear)",
        "heads(linformer(rank=4, longest=2048), bigbird(block=2, random=1))",
    )
    reduces_to = (("heads(softmax, softmax)", "softmax"),)
    nests = True

    def __init__(self, shape: Shape, parts: tuple[Spec, ...]):
        super().__init__(shape)
        if not parts:
            raise ValueError("heads(...) needs the specs to mix, such as heads(local(window=64), softmax)")
        if shape.heads % len(parts):
            raise ValueError(
                f"{shape.heads} heads do not divide evenly among the {len(parts)} parts of heads(...): "
                f"use a multiple of {len(parts)} heads"
            )
        if shape.kv_heads % len(parts):
            raise ValueError(
                f"{shape.kv_heads} key/value heads do not divide evenly among the {len(parts)} parts of heads(...): "
                f"use a multiple of {len(parts)} kv_heads"
            )
        share = shape.heads // len(parts)
        fewer = replace(shape, heads=share, kv_heads=shape.kv_heads // len(parts))
        self.parts = torch.nn.ModuleList()
        for index, part in enumerate(parts):
            self.parts.append(ATTENTION.build(part, replace(fewer, first_head=shape.first_head + index * share)))
        facts = [part.facts for part in self.layers()]
        states = [fact.state for fact in facts if fact.state is not None]
        self.facts = replace(
            self.facts,
            time=max((fact.time for fact in facts), key=lambda order: order.exponent),
            memory=max((fact.memory for fact in facts), key=lambda order: order.exponent),
            state=None if len(states) < len(facts) else max(states, key=lambda order: order.exponent),
            roles=tuple(role for role in self.facts.roles if all(role in fact.roles for fact in facts)),
            positions=tuple(kind for kind in self.facts.positions if all(kind in fact.positions for fact in facts)),
            **{
                name: all(getattr(fact, name) for fact in facts)
                for name in ("prefix_invariant", "split_invariant", "exact", "independent_heads", "linear")
            },
            **{name: any(getattr(fact, name) for fact in facts) for name in ("signed", "auxiliary_loss")},
            padding="none" if any(fact.padding == "none" for fact in facts) else "any",
            columns="slots" if any(fact.columns == "slots" for fact in facts) else "tokens",
        )

    def layers(self) -> list[Attention]:
        """The parts; a ModuleList does not say what it holds."""
        return cast(list[Attention], list(self.parts))

    def projections(self) -> dict[str, Tensor]:
        shares = [part.projections() for part in self.layers()]
        if not all(shares):
            return {}
        whole = {name: torch.cat([share[name] for share in shares], int(name == "output.weight")) for name in shares[0]}
        if "output.bias" in whole:
            # the parts are added up, and so are their biases
            whole["output.bias"] = torch.stack([share["output.bias"] for share in shares]).sum(0)
        return whole

    def take_projections(self, given: Mapping[str, Tensor]) -> set[str]:
        count, names = len(self.parts), set()
        shares = {
            name: part.chunk(count, int(name == "output.weight"))
            for name, part in given.items()
            if name != "output.bias"
        }
        if "output.bias" in given:
            bias = given["output.bias"]
            shares["output.bias"] = (bias, *[torch.zeros_like(bias)] * (count - 1))
        for index, part in enumerate(self.layers()):
            taken = part.take_projections({name: share[index] for name, share in shares.items()})
            names |= {f"parts.{index}.{name}" for name in taken}
        return names

    def forward_packed(self, x, rows=None, *, state=None, memory=None, stream=None) -> Out:
        rows = rows or Rows.full(x)
        if state is None and memory is None and (linears := self._joint_linears(x)):
            return self._forward_jointly(x, rows, linears)
        states = [None] * len(self.parts) if state is None else state.parts
        outs = [
            part.forward_packed(x, rows, state=old, memory=memory)
            for part, old in zip(self.layers(), states, strict=True)
        ]
        losses = [out.auxiliary_loss for out in outs if out.auxiliary_loss is not None]
        if state is not None and self.shape.role == "causal":
            state = PartStates(tuple(out.state for out in outs), state.progress.advance(rows))
        y = functools.reduce(torch.add, [out.y for out in outs])
        return Out(y, state, auxiliary_loss=functools.reduce(torch.add, losses) if losses else None)

    def _joint_linears(self, x: Tensor) -> list[list[nn.Linear]] | None:
        """Those of each part, where the parts are best projected by one product."""
        if not one_product_is_faster(x) or not all([isinstance(part, Projected) for part in self.parts]):
            return None
        parts = cast(list[Projected], self.layers())
        found = [part.joint_linears() for part in parts if part.scheme("input") is None]
        linears = [each for each in found if each is not None]
        return linears if len(linears) == len(parts) else None

    def _forward_jointly(self, x: Tensor, rows: Rows, linears: list[list[nn.Linear]]) -> Out:
        """All parts from one product, and into one: concat(o) W_O."""
        outputs = iter(joint_outputs(x, [linear for each in linears for linear in each]))
        outs: list[Tensor] = []
        losses: list[Tensor] = []
        parts = cast(list[Projected], self.layers())
        for part, each in zip(parts, linears, strict=True):
            query, source = part.project_inputs(x, rows, None, list(itertools.islice(outputs, len(each))))
            outs.append(part.attend_projected(rows, query, source)[0].transpose(1, 2))
            loss = part.learn(rows, query, source, None, None) if self.training else None
            losses += [] if loss is None else [loss]
        weight = torch.cat([part.output.weight for part in parts], 1)
        biases = [part.output.bias for part in parts if part.output.bias is not None]
        bias = functools.reduce(torch.add, biases) if biases else None
        y = F.linear(torch.cat(outs, 2).flatten(2), weight, bias)
        return Out(y, None, auxiliary_loss=functools.reduce(torch.add, losses) if losses else None)

    def initial_state(self, batch, *, memory=None, stream=None, capacity=None, dtype, device) -> Initial:
        parts = tuple(
            part.initial_state(batch, memory=memory, capacity=capacity, dtype=dtype, device=device).state
            for part in self.layers()
        )
        if self.shape.role == "cross":
            return Initial(CrossPartStates(parts, parts[0].count, parts[0].S))
        return Initial(PartStates(parts, Progress.initial(batch, device)))

    def fixed_state(self, state: PartStates, capacity: int) -> PartStates:
        pairs = zip(self.layers(), state.parts, strict=True)
        parts = tuple(part.fixed_state(part_state, capacity) for part, part_state in pairs)
        return PartStates(parts, state.progress.bounded(capacity))

    def map(self, x, rows=None, *, state=None, memory=None, stream=None) -> Tensor:
        states = [None] * len(self.parts) if state is None else state.parts
        maps = [part.map(x, rows, state=old, memory=memory) for part, old in zip(self.layers(), states, strict=True)]
        self._check_common([each.shape[3] for each in maps])
        return torch.cat(maps, 1)

    def slots(self, x, rows=None, *, memory=None) -> Tensor:
        tokens = (x if memory is None else memory.x)[:, None]
        values = [
            tokens if part.facts.columns == "tokens" else part.slots(x, rows, memory=memory) for part in self.layers()
        ]
        self._check_common([each.shape[2] for each in values])
        return torch.cat(values, 1)

    def _check_common(self, counts: list[int]) -> None:
        columns = {(part.facts.columns, count) for part, count in zip(self.layers(), counts, strict=True)}
        if len(columns) > 1:
            each = ", ".join(f"{count} {name}" for name, count in sorted(columns))
            raise ValueError(
                f"the parts of heads(...) attend to different things ({each}), so they have no map in common: "
                f"ask each part for its own, layer.parts[0].weights(x)"
            )

    def apply_map(self, values, x, rows=None, *, memory=None, stream=None) -> Tensor:
        shares = values.chunk(len(self.parts), 1) if len(values[0]) > 1 else [values] * len(self.parts)
        pairs = zip(self.layers(), shares, strict=True)
        outs = [part.apply_map(share, x, rows, memory=memory) for part, share in pairs]
        return torch.cat(outs, 1)

    def link_layers(self, first: Attention | None, fed: bool, read: bool, pre: bool = False) -> None:
        others: list[Attention | None] = [None] * len(self.parts)
        if isinstance(first, MixedHeads) and len(first.parts) == len(self.parts):
            others = [*first.layers()]
        for part, other in zip(self.layers(), others, strict=True):
            # the sum of the parts gives no stream and takes none
            part.link_layers(other, False, False, pre)

    def grid_order(self, rows: int) -> Tensor | None:
        with torch.device("cpu"):
            orders = [part.grid_order(rows) for part in self.layers()]
        if len({None if order is None else tuple(order.tolist()) for order in orders}) > 1:
            raise ValueError(
                "the parts of heads(...) read the cells of a grid in different orders, and a layer has one order: give "
                "all parts the same blocks, or take the mechanisms in different layers"
            )
        return self.layers()[0].grid_order(rows)

    def attend_projected(
        self,
        rows: Rows,
        query: dict[str, Tensor],
        source: dict[str, Tensor],
        state: None = None,
        memory: Memory | None = None,
    ) -> tuple[Tensor, None]:
        """From projected inputs to [B, H, T, D], for `regard.attend`."""
        shared = [dict[str, Tensor]() for _ in self.parts]
        for name, whole in (query | source).items():
            for inputs, share in zip(shared, whole.chunk(len(self.parts), 1), strict=True):
                inputs[name] = share
        outs = [
            part.attend_projected(rows, {"q": inputs["q"]}, {"k": inputs["k"], "v": inputs["v"]}, None, memory)[0]
            for part, inputs in zip(cast(list[Projected | MixedHeads], self.layers()), shared, strict=True)
        ]
        return torch.cat(outs, 1), None

    def reference(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        return add_up(part.reference(x, memory) for part in self.layers())
