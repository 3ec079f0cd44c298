"""Mechanisms with projections and heads: queries, keys, values and gates, made of the tokens or of a memory."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.numeric import masked_softmax
from regard.core.reference import Row
from regard.core.rows import Mask, Memory, Rows
from regard.core.sequence import Split, current_split
from regard.core.shape import Shape
from regard.core.state import Initial, Out, check_rows, merge_fields
from regard.kernels.dropout import dropped
from regard.layers.attention.base import Attention
from regard.layers.position.base import Position
from regard.spec import POSITIONS

InputKind = Literal["query", "key", "value", "gate"]


class CrossState(NamedTuple):
    """The memory as projected once; it never grows."""

    parts: tuple[Tensor, ...]
    count: Tensor  # [B] real tokens of the memory  # pyright: ignore[reportIncompatibleMethodOverride]
    full: bool
    S: int
    allowed: Tensor | None = None  # of a whole sequence with an explicit mask; decoding has none
    mechanism: str = ""  # whose state it is: several mechanisms keep the same things

    def select(self, rows: Tensor) -> "CrossState":
        check_rows(rows, self)
        return self._replace(parts=tuple(part[rows] for part in self.parts), count=self.count[rows])

    def merge(self, other: "CrossState", rows: Tensor | None) -> "CrossState":
        merged = merge_fields(self, other, rows)
        return merged._replace(full=merged.full and self.S == other.S)


def one_product_is_faster(x: Tensor) -> bool:
    """Whether queries, keys and values are best projected by one product: where a GPU trains, because the gradients of
    their weights, small matrices that are sums over many tokens, leave most of it idle one by one."""
    return x.is_cuda and torch.is_grad_enabled()


def joint_outputs(x: Tensor, linears: list[nn.Linear]) -> list[Tensor]:
    """The outputs of several linear maps of x, parts of one product."""
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    product = F.linear(x, torch.cat([linear.weight for linear in linears]), bias)
    return list(product.split([linear.out_features for linear in linears], 2))


class Projected(Attention):
    """Projections, heads and positions. `inputs` names what a mechanism reads and its kind: "query" (H heads of the
    tokens), "key" and "value" (G heads of the tokens or the memory), "gate" (a number for each head and source token).
    The probe for the map replaces every "value"."""

    inputs: dict[str, InputKind] = {"q": "query", "k": "key", "v": "value"}
    grouped = False  # True: takes keys and values of G heads; otherwise they are repeated to H

    def __init__(self, shape: Shape):
        super().__init__(shape)
        sizes = {"query": shape.heads * shape.head_width, "gate": shape.heads}
        self.project = nn.ModuleDict()
        for name, kind in self.inputs.items():
            width = shape.width if kind == "query" or shape.role != "cross" else shape.memory_width
            out = sizes.get(kind, shape.kv_heads * shape.head_width)
            self.project[name] = nn.Linear(width, out, bias=shape.input_bias or kind == "gate")
        self.output = nn.Linear(shape.heads * shape.head_width, shape.out_width, bias=shape.output_bias)
        for linear in (*map(self.linear_of, self.inputs), self.output):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        self.position = None if shape.position is None else self._build_position(shape.position)
        self._plain_sources = type(self).project_sources is Projected.project_sources

    def _build_position(self, spec: str) -> Position:
        position = POSITIONS.build(spec, self.shape)
        kinds = ("input", *self.facts.positions)
        if position.facts.kind not in kinds:
            takes = [name for name, scheme in POSITIONS.classes.items() if scheme.facts.kind in kinds]
            rotates = position.facts.kind == "rotation"
            raise ValueError(
                f"attention {self.facts.name!r} cannot take position {position.facts.name!r}: it has no "
                f"{'plain query-key product to rotate' if rotates else 'table of logits to add to'}; "
                f"it takes {', '.join(takes)}"
            )
        return position

    @final
    def scheme(self, kind: Literal["input", "rotation", "bias", "content"]) -> Position | None:
        """The position scheme, where it is of this kind."""
        return self.position if self.position is not None and self.position.facts.kind == kind else None

    @final
    def linear_of(self, name: str) -> nn.Linear:
        """The linear map that makes an input."""
        return cast(nn.Linear, self.project[name])  # a ModuleDict does not say what it holds

    def projections(self) -> dict[str, Tensor]:
        if not Projected.inputs.items() <= self.inputs.items():
            return {}
        linears = {name: self.linear_of(name) for name in Projected.inputs} | {"output": self.output}
        biases = {f"{name}.bias": linear.bias for name, linear in linears.items() if linear.bias is not None}
        return {f"{name}.weight": linear.weight for name, linear in linears.items()} | biases

    def take_projections(self, given: Mapping[str, Tensor]) -> set[str]:
        own = self.projections()
        if not own:
            return super().take_projections(given)
        if own.keys() != given.keys():
            raise ValueError(f"attention {self.facts.name!r} takes {', '.join(own)}, got {', '.join(given) or 'none'}")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(given[name])
        return {name if name.startswith("output.") else f"project.{name}" for name in own}

    @property
    def scale(self) -> float:
        """The factor of q . k, 1 / sqrt(D)."""
        return self.shape.head_width**-0.5

    # what the kinds of mechanism write

    @abstractmethod
    def attend_self(
        self, rows: Rows, query: dict[str, Tensor], source: dict[str, Tensor], state: Any
    ) -> tuple[Tensor, Any]:
        """Roles "self" and "causal": [B, H, T, D] and the new state (None without one)."""

    @property
    def can_split_rows(self) -> bool:
        """Whether processes can share the tokens of each row: a mechanism or its base writes `attend_split`."""
        return type(self).attend_split is not Projected.attend_split

    def attend_split(self, split: Split, rows: Rows, query: dict[str, Tensor], source: dict[str, Tensor]) -> Tensor:
        """[B, H, T, D] where processes share the tokens of each row, and this one has T of them, which `rows` places.
        Default: the mechanism cannot."""
        raise ValueError(
            f"attention {self.facts.name!r} of role {self.shape.role!r} cannot read rows whose tokens are spread over "
            "processes: use training.shares rows, or a causal mechanism that keeps tokens or sums while decoding"
        )

    def project_memory(self, source: dict[str, Tensor], memory: Memory) -> Any:
        """Role "cross": the state that is kept of the memory. Default: the mechanism does not take that role."""
        self.not_written("project_memory")

    def attend_memory(self, query: dict[str, Tensor], state: Any) -> Tensor:
        """Role "cross": [B, H, T, D] of the queries over it. Default: the mechanism does not take that role."""
        self.not_written("attend_memory")

    def learn(
        self, rows: Rows, query: dict[str, Tensor], source: dict[str, Tensor], memory: Memory | None, state: Any
    ) -> Tensor | None:
        """Called in training, after the output of a call that began with this state: updates what is learned without
        gradients, and returns the auxiliary loss. Default: nothing."""

    def attend_values(
        self, rows: Rows, query: dict[str, Tensor], source: dict[str, Tensor], memory: Memory | None
    ) -> Tensor:
        """[B, H, T, D] where the values of the source stand for columns of the map, not for tokens. Default: they are
        read as any others."""
        return self.attend_projected(rows, query, source, None, memory)[0]

    def probe_state(self, state: Any, first: int) -> Any:
        """A copy of the state whose values are the unit vectors of the positions from `first` on."""
        raise ValueError(
            f"attention {self.facts.name!r} keeps sums, not tokens, so a state has no map: call weights(x) without a "
            "state, on the whole sequence"
        )

    @final
    def forward_packed(
        self,
        x: Tensor,
        rows: Rows | None = None,
        *,
        state: Any = None,
        memory: Memory | None = None,
        stream: Tensor | None = None,
    ) -> Out:
        rows = rows or Rows.full(x)
        query, source = self.project_inputs(x, rows, memory)
        split = current_split()
        if split is not None and self.shape.role != "cross":
            return Out(self.output(self.attend_split(split, rows, query, source).transpose(1, 2).flatten(2)))
        o, after = self.attend_projected(rows, query, source, state, memory)
        y = self.output(o.transpose(1, 2).flatten(2))
        if self.shape.role == "cross" and self.output.bias is not None:
            y = torch.where(after.count[:, None, None] > 0, y, 0)
        return Out(y, after, auxiliary_loss=self.learn(rows, query, source, memory, state) if self.training else None)

    @final
    def initial_state(
        self,
        batch: int,
        *,
        memory: Memory | None = None,
        stream: Tensor | None = None,
        capacity: int | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Initial:
        if memory is None:
            return Initial(self.empty_state(batch, capacity, dtype, device))
        if self.position is not None and self.position.facts.kind != "input":
            raise ValueError("queries that stand among their keys are read as a whole: call the layer, not start")
        # every step reads them: the tokens of a head are made contiguous once
        source = {name: projected.contiguous() for name, projected in self.project_sources(memory.x).items()}
        return Initial(self.project_memory(source, memory))

    def empty_state(self, batch: int, capacity: int | None, dtype: torch.dtype, device: torch.device) -> Any:
        """The state of role "causal" before the first token. Default: the mechanism does not take that role."""
        self.not_written("empty_state")

    @final
    def attend_projected(
        self,
        rows: Rows,
        query: dict[str, Tensor],
        source: dict[str, Tensor],
        state: Any = None,
        memory: Memory | None = None,
    ) -> tuple[Tensor, Any]:
        """From projected inputs to [B, H, T, D]: all that `regard.attend` needs of a mechanism."""
        if self.shape.role != "cross":
            return self.attend_self(rows, query, source, state)
        if state is None:
            assert memory is not None, "role 'cross' reads a memory or a state"
            state = self.project_memory(source, memory)
        return self.attend_memory(query, state), state

    def map(
        self,
        x: Tensor,
        rows: Rows | None = None,
        *,
        state: Any = None,
        memory: Memory | None = None,
        stream: Tensor | None = None,
    ) -> Tensor:
        if state is None:
            return super().map(x, rows, memory=memory, stream=stream)
        rows = rows or Rows.full(x)
        query, source = self.project_inputs(x, rows, None)
        S = state.S if self.shape.role == "cross" else rows.T + state.progress.longest

        def probe(first: int) -> Tensor:
            positions = rows.positions()
            units = {
                name: self.unit_vectors(positions, first, len(x), source[name].dtype)
                for name in (self.input_names("value") if source else ())
            }
            return self.attend_projected(rows, query, source | units, self.probe_state(state, first))[0]

        maps = torch.cat([probe(first) for first in range(0, S, self.shape.head_width)], -1)[..., :S]
        if self._adds_to_values:
            without_values = probe(S + self.shape.head_width)
            maps = maps - without_values.repeat(1, 1, 1, -(-S // without_values.shape[-1]))[..., :S]
        return maps

    @final
    def apply_map(
        self,
        values: Tensor,
        x: Tensor,
        rows: Rows | None = None,
        *,
        memory: Memory | None = None,
        stream: Tensor | None = None,
    ) -> Tensor:
        rows = rows or Rows.full(x)
        query, source = self.project_inputs(x, rows, memory)
        return self.read_values(rows, query, source, values, memory)

    def read_values(
        self,
        rows: Rows,
        query: dict[str, Tensor],
        source: dict[str, Tensor],
        values: Tensor,
        memory: Memory | None,
    ) -> Tensor:
        """`apply_map` behind the projections. Default: the values take the place of the projected ones."""
        names = self.input_names("value")
        return self.in_widths(
            values, lambda v: self.attend_values(rows, query, source | dict.fromkeys(names, v), memory)
        )

    @final
    def in_widths(self, values: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
        """`read` of values [B, 1 or H, S, n], where it takes [B, G, S, D] and gives [B, H, T, D]."""
        G, D = self.shape.kv_heads, self.shape.head_width
        times, outs = self.shape.heads // G, []
        without_values = read(values.new_zeros(len(values), G, values.shape[2], D)) if self._adds_to_values else None
        for columns in values.split(D, 3):
            padded = F.pad(columns, (0, D - columns.shape[3]))
            if len(padded[0]) == 1:
                o = read(padded.expand(-1, G, -1, -1).contiguous())
            else:
                # heads that share values are told apart by reading for one of each group at a time
                by_member = [read(padded[:, member::times])[:, member::times] for member in range(times)]
                o = torch.stack(by_member, 2).flatten(1, 2)
            outs.append((o if without_values is None else o - without_values)[..., : columns.shape[3]])
        return torch.cat(outs, 3)

    @property
    def _adds_to_values(self) -> bool:
        """A scheme that adds to the values makes the output affine in them: the output without any is subtracted."""
        return self.scheme("content") is not None

    @final
    def unit_vectors(self, at: Tensor, first: int, batch: int, dtype: torch.dtype) -> Tensor:
        """[B, G, n, D]: 1 where the position [1 or B, n] is first + d."""
        columns = torch.arange(first, first + self.shape.head_width, device=at.device)
        hits = (at[..., None] == columns).to(dtype)
        return hits[:, None].expand(batch, self.shape.kv_heads, -1, -1).contiguous()

    @final
    def input_names(self, *kinds: str) -> list[str]:
        """The names of the inputs of these kinds, in order."""
        return [name for name, kind in self.inputs.items() if kind in kinds]

    @final
    def project_inputs(
        self, x: Tensor, rows: Rows, memory: Memory | None, outputs: list[Tensor] | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The projected queries, and the projected sources (none where a cross state holds them already). `outputs` are
        those of the `joint_linears`, where they are there already."""
        added, rotation = self.scheme("input"), self.scheme("rotation")
        if added is not None:
            x = added.add(x, rows)
        if outputs is None and one_product_is_faster(x) and (linears := self.joint_linears()):
            outputs = joint_outputs(x, linears)
        read = x
        if outputs is not None:
            source = {name: self._heads(output) for name, output in zip(self.inputs, outputs, strict=True)}
            query = {name: source.pop(name) for name in self.input_names("query")}
        else:
            query = {name: self.project_heads(name, x) for name in self.input_names("query")}
            if self.shape.role == "cross":
                if memory is None:
                    return query, {}
                read = memory.x
            source = self.project_sources(read)
        if rotation is not None:
            slots = rows.positions()
            query_places = key_places = rotation.places(slots)
            if self.shape.role == "cross":
                query_places = rotation.places(slots, rotation.pace)
                key_places = rotation.places(torch.arange(read.shape[1], device=x.device)[None])
            query = {name: rotation.rotate(projected, query_places) for name, projected in query.items()}
            source |= {name: rotation.rotate(source[name], key_places) for name in self.input_names("key")}
        return query, source

    def project_sources(self, x: Tensor) -> dict[str, Tensor]:
        """The projected keys, values and gates of the tokens or of the memory."""
        return {name: self.project_heads(name, x) for name in self.input_names("key", "value", "gate")}

    @final
    def joint_linears(self) -> list[nn.Linear] | None:
        """The linear maps of all inputs, where these may be parts of one product of the tokens."""
        linears = [self.linear_of(name) for name in self.inputs]
        apart = self.shape.role == "cross" or not self._plain_sources or "gate" in self.inputs.values()
        return None if apart or not all([type(linear) is nn.Linear for linear in linears]) else linears

    @final
    def project_heads(self, name: str, x: Tensor) -> Tensor:
        """[B, n, E] -> [B, H or G, n, D], a gate [B, H, n]"""
        projected = self.project[name](x)
        return projected.transpose(1, 2) if self.inputs[name] == "gate" else self._heads(projected)

    @final
    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(2, (-1, self.shape.head_width)).transpose(1, 2)

    @final
    def repeat_heads(self, source: dict[str, Tensor]) -> dict[str, Tensor]:
        """Keys and values of G heads as H, for mechanisms that do not group."""
        times = self.shape.heads // self.shape.kv_heads
        if self.grouped or times == 1:
            return source
        return {n: part.repeat_interleave(times, 1) if part.dim() == 4 else part for n, part in source.items()}

    @final
    def softmax_average(self, mask: Mask, logits: Tensor, v: Tensor) -> Tensor:
        """Softmax of logits [B, H, T, S] over what is visible, times v, with the position scheme."""
        bias, content = self.scheme("bias"), self.scheme("content")
        if bias is not None:
            logits = logits + bias.biases(mask)
        weights = self.drop_weights(masked_softmax(logits, mask.dense()))
        o = weights.to(v.dtype) @ v
        added = None if content is None else content.values(weights, mask)
        return o if added is None else o + added.to(v.dtype)

    @property
    def has_dropout(self) -> bool:
        """Whether attention dropout acts: in training, where it is not 0."""
        return self.training and self.shape.dropout > 0

    @final
    def drop_weights(self, weights: Tensor) -> Tensor:
        """Attention dropout, in training."""
        return dropped(weights, self.shape.dropout) if self.has_dropout else weights

    def reference(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        outs = [self.plain(self.plain_row(head, x, memory)) for head in range(self.shape.heads)]
        y = torch.cat(outs, -1) @ self.output.weight.T
        return y if self.output.bias is None else y + self.output.bias

    @final
    def plain_row(self, head: int, x: Tensor, memory: Tensor | None = None) -> Row:
        """What a head reads of one unpadded sequence."""
        placed = x if self.position is None else self.position.plain_add(x)
        source = placed if memory is None else memory
        values = {name: self.plain_input(name, head, placed, source) for name in self.inputs}
        return Row(head, self.shape.role == "causal", len(x), len(source), values, self.position)

    def plain(self, row: Row) -> Tensor:
        """One head of one unpadded sequence in loops: [T, D]. A mechanism writes this, or `reference`."""
        self.not_written("plain")

    def plain_input(self, name: str, head: int, x: Tensor, source: Tensor) -> Tensor:
        """An input of one head, [T, D] or [S, D], a gate [S]. Default: projected, and turned by a rotation."""
        D, kind, linear = self.shape.head_width, self.inputs[name], self.linear_of(name)
        if kind == "gate":
            return source @ linear.weight[head] + linear.bias[head]
        slot = head if kind == "query" else head * self.shape.kv_heads // self.shape.heads
        projected = (x if kind == "query" else source) @ linear.weight[slot * D : slot * D + D].T
        if linear.bias is not None:
            projected = projected + linear.bias[slot * D : slot * D + D]
        if self.position is not None and kind in ("query", "key"):
            projected = torch.stack([self.position.plain_rotate(vector, i) for i, vector in enumerate(projected)])
        return projected
