"""The role and the sizes that attention layers and position schemes are built with, and how costs are written."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Role = Literal["self", "causal", "cross"]
Bias = bool | Literal["inputs", "output"]  # which projections have one: all, none, or those of one side


class Order(NamedTuple):
    """A cost: in words, and the exponent of the length that the suite counts."""

    text: str
    exponent: float


class RoleFacts(Protocol):
    """What a layer declares about roles."""

    @property
    def name(self) -> str: ...

    @property
    def roles(self) -> tuple[str, ...]: ...

    @property
    def refusals(self) -> tuple[tuple[str, str], ...]: ...  # (role, why not)


def check_role(kind: str, facts: RoleFacts, role: str, why: str) -> None:
    """Refuses a role that a layer does not take, for the reason that it declares, or for `why`."""
    if role not in facts.roles:
        raise ValueError(
            f"{kind} {facts.name!r} cannot take role {role!r}: {dict(facts.refusals).get(role, why)}; "
            f"it takes {' and '.join(map(repr, facts.roles))}"
        )


@dataclass(frozen=True)
class Shape:
    """The sizes and the role every mechanism is built with; `of` fills in what is left open and checks the rest."""

    width: int
    heads: int
    role: Role
    kv_heads: int
    head_width: int
    memory_width: int
    out_width: int
    bias: Bias = False
    position: str | None = None
    dropout: float = 0.0  # attention dropout, in training
    first_head: int = 0  # where these heads stand among `all_heads`, inside heads(...)
    all_heads: int = 0
    pace: int | None = None  # role "cross": the queries stand among the keys, this many apart; None: two sequences

    @classmethod
    def of(
        cls,
        *,
        width: int,
        heads: int,
        role: Role = "self",
        kv_heads: int | None = None,
        head_width: int | None = None,
        memory_width: int | None = None,
        out_width: int | None = None,
        bias: Bias = False,
        position: str | None = None,
        dropout: float = 0.0,
        pace: int | None = None,
    ) -> "Shape":
        sizes = {"width": width, "heads": heads, "kv_heads": kv_heads, "head_width": head_width}
        sizes |= {"memory_width": memory_width, "out_width": out_width}
        for name, size in sizes.items():
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}")
        if role not in ("self", "causal", "cross"):
            raise ValueError(f"role must be 'self', 'causal' or 'cross', got {role!r}")
        if head_width is None and width % heads:
            raise ValueError(
                f"width {width} is not divisible by heads {heads}: choose heads that divide it, or give head_width"
            )
        if kv_heads is not None and heads % kv_heads:
            raise ValueError(
                f"heads {heads} is not divisible by kv_heads {kv_heads}: each must serve equally many heads"
            )
        if not isinstance(bias, bool) and bias not in ("inputs", "output"):
            raise ValueError(
                f"bias must be True, False, 'inputs' (all but the output projection) or 'output' (that one alone), got "
                f"{bias!r}"
            )
        if not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {dropout!r}")
        if memory_width is not None and role != "cross":
            raise ValueError(f"memory_width is for role 'cross'; role {role!r} has no memory")
        return cls(
            width=width,
            heads=heads,
            role=role,
            kv_heads=kv_heads or heads,
            head_width=head_width or width // heads,
            memory_width=memory_width or width,
            out_width=out_width or width,
            bias=bias,
            position=position,
            dropout=float(dropout),
            all_heads=heads,
            pace=pace,
        )

    @property
    def input_bias(self) -> bool:
        return self.bias in (True, "inputs")

    @property
    def output_bias(self) -> bool:
        return self.bias in (True, "output")
