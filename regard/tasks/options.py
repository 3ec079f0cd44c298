"""The model section of a config: a preset, and what to change in it."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from regard.core.limits import check_sizes
from regard.spec import use_canonical_names


@dataclass(frozen=True)
class StackOptions:
    """A preset, and what to change in it: whatever is left out is as the preset says."""

    preset: str = "tiny"
    """the sizes to begin with"""
    attention: str | list[str] | None = None
    """spec of the attention, or a list repeated over the layers"""
    position: str | None = None
    """spec of the positions, such as sinusoidal, rotary, alibi"""
    width: int | None = None
    """of the vectors between layers"""
    heads: int | None = None
    """of each attention"""
    kv_heads: int | None = None
    """key and value heads, fewer than heads to share them"""
    inner: int | None = None
    """width inside the feed-forward layers"""
    layers: int | None = None
    """how many"""
    norm: Literal["post", "pre"] | None = None
    """where the norm stands: after the residual as in the paper, or before the sublayer"""
    norm_epsilon: float | None = None
    """added to the variance in each norm: what is much smaller than its root stays small"""
    final_norm: bool | None = None
    """one more norm after the last layer (default: where norm is pre)"""
    feedforward: str | list[str] | None = None
    """spec of the feed-forward layers, or a list repeated over them, such as "dense(activation='gelu')" """
    reversible: bool | None = None
    """layers that are undone in the backward pass, so that their number costs no memory; with norm pre"""
    bias: bool | Literal["inputs"] | None = None
    """of the projections of attention; inputs: of queries, keys and values only"""
    scaled_embedding: bool | None = None
    """token vectors times the root of their width, as in the paper"""
    dropout: float | None = None
    """of the embeddings and of what each sublayer adds"""

    def __post_init__(self) -> None:
        check_sizes(self, "model.")
        use_canonical_names(self)

    def changes(self) -> dict[str, Any]:
        """What is given beside the preset."""
        given = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {name: value for name, value in given.items() if value is not None and name != "preset"}

    def changes_of_trained(self, *free: str) -> dict[str, Any]:
        """What is changed in a model that is trained already: nothing but what is free."""
        changes = self.changes()
        fixed = [name for name in changes if name not in free]
        fixed += ["preset"] if self.preset not in (type(self).preset, StackOptions.preset) else []
        if fixed:
            given = ", ".join(f"model.{name}" for name in fixed)
            raise ValueError(f"{given}: with --init only {', '.join(free)} can change, the rest is as it was trained")
        return changes

    def resized(self, presets: dict[str, dict[str, Any]], cls: type, **sizes: Any) -> Any:
        """The config of a model: the preset, what is changed in it, and sizes that come from elsewhere."""
        if self.preset not in presets:
            raise ValueError(f"model.preset must be one of {', '.join(presets)}, got {self.preset!r}")
        changes = self.changes()
        fields = {item.name for item in dataclasses.fields(cls)}
        foreign = [name for name in changes if name not in fields]
        if foreign:
            raise ValueError(f"preset {self.preset!r} has no model.{', model.'.join(foreign)}")
        return cls(**presets[self.preset] | changes | sizes)


@dataclass(frozen=True)
class TokenOptions(StackOptions):
    """A preset, and what to change in it: whatever is left out is as the preset says. For models that answer with
    tokens."""

    head_width: int | None = None
    """of each head (default: width / heads)"""
    norm_kind: Literal["layer", "rms"] | None = None
    """layer norm, or the root mean square alone (RMSNorm)"""
    normed_embedding: bool | None = None
    """a norm over the sum of token vectors and positions, as in BERT"""
    tied: bool | None = None
    """the output layer is the embedding of the tokens"""
    head: Literal["linear", "transform"] | None = None
    """transform: a dense layer, GELU and a norm before the output layer, as in BERT"""
    head_bias: bool | None = None
    """a number for each token, added to its logit"""


def check_out(config: Any) -> None:
    if not config.out.strip():
        raise ValueError("out must name a folder for the run")
