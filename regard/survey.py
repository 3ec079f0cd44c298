"""The table of efficient Transformers (Tay et al., arXiv 2009.06732, version 3 of March 2022, table 1), with what is
counted here beside it.

Classes: FP fixed pattern, M memory, LP learned pattern, LR low rank, KR kernel, RC recurrence, DS downsampling, Sparse
sparse parameters or weights. N is the length. Our exponents are those that the tests count on a training step.
"""

from typing import NamedTuple

import torch

from regard.core.shape import Shape
from regard.models import registry
from regard.spec import ATTENTION


class System(NamedTuple):
    """A row as published, and what it is here; `exponent` is the published complexity in N."""

    name: str
    complexity: str
    exponent: float | None  # None: the survey's figure is not in N
    decodes: bool
    classes: str
    word: str | None = None  # the name of an attention
    model: str | None = None  # the name of a model
    feedforward: str | None = None  # the name of a feed-forward layer; the attention beside it is softmax
    note: str = ""  # where ours differs: why


class Here(NamedTuple):
    """What is counted in Regard: exponents of time and memory in a training step, and whether it decodes."""

    time: float
    memory: float
    decodes: bool


FIXED = "the published figure takes a {} near the root of N; with a fixed one, as counted here, the square term grows"
SYSTEMS = (
    System(
        "Memory Compressed",
        "O(Nc^2)",
        None,
        True,
        "FP+M",
        "compressed",
        note="Nc is N over the factor of compression: for a fixed factor it grows with the square of N",
    ),
    System("Image Transformer", "O(N m)", 1, True, "FP", "image"),
    System("Set Transformer", "O(k N)", 1, False, "M", "set"),
    System(
        "Transformer-XL",
        "O(N^2)",
        2,
        True,
        "RC",
        "xl",
        note="the survey's N is a segment; over a text cut into segments of one size the work grows with the length",
    ),
    System(
        "Sparse Transformer",
        "O(N sqrt N)",
        1.5,
        True,
        "FP",
        "sparse",
        note=FIXED.format("stride") + "; sparse(longest=N) chooses it so, and is counted as N sqrt N",
    ),
    System("Reformer", "O(N log N)", 1, True, "LP", "reformer"),
    System("Routing Transformer", "O(N sqrt N)", 1.5, True, "LP", "routing", note=FIXED.format("number of clusters")),
    System("Axial Transformer", "O(N sqrt N)", 1.5, True, "FP", "axial", note=FIXED.format("width of the grid")),
    System(
        "Compressive Transformer",
        "O(N^2)",
        2,
        True,
        "RC",
        "compressive",
        note="as Transformer-XL: segments and memories of one size make it grow with the length",
    ),
    System(
        "Sinkhorn Transformer",
        "O(B^2)",
        None,
        True,
        "LP",
        "sinkhorn",
        note="B is a block; putting whole blocks in a new order mixes each with each, N^2 over the block",
    ),
    System("Longformer", "O(n (k + m))", 1, True, "FP+M", "longformer"),
    System("ETC", "O(Ng^2 + N Ng)", 1, False, "FP+M", "etc"),
    System("Synthesizer", "O(N^2)", 2, True, "LR+LP", "synthesizer"),
    System("Performer", "O(N)", 1, True, "KR", "performer"),
    System(
        "Funnel Transformer",
        "O(N^2)",
        2,
        True,
        "FP+DS",
        model="funnel",
        note="a pooled vector knows the token behind, so what is generated is a whole sequence, not token by token",
    ),
    System("Linformer", "O(N)", 1, False, "LR", "linformer"),
    System("Linear Transformers", "O(N)", 1, True, "KR", "linear"),
    System("Big Bird", "O(N)", 1, False, "FP+M", "bigbird"),
    System("Random Feature Attention", "O(N)", 1, True, "KR", "rfa"),
    System(
        "Long Short Transformers",
        "O(k N)",
        1,
        True,
        "FP+LR",
        "longshort",
        note="what decodes is the causal form, where a query reads r summaries of every chunk before it; the form that "
        "reads both ways grows with the length",
    ),
    System(
        "Poolingformer",
        "O(N)",
        1,
        False,
        "FP+M",
        "poolingformer",
        note="decoding is ours: a query sees the pooled slots that have read their last token",
    ),
    System("Nyströmformer", "O(k N)", 1, False, "M+DS", "nystrom"),
    System("Perceiver", "O(k N)", 1, True, "M+DS", model="perceiver-ar"),
    System("Clusterformer", "O(N log N)", 1, False, "LP", "clusterformer"),
    System("Luna", "O(k N)", 1, True, "M", "luna"),
    System(
        "TokenLearner",
        "O(k^2)",
        None,
        False,
        "DS",
        model="tokenlearner",
        note="k learned tokens are what the layers behind the learner see; those before it see all N",
    ),
    System("Adaptive Sparse Transformer", "O(N^2)", 2, True, "Sparse", "entmax"),
    System("Product Key Memory", "O(N^2)", 2, True, "Sparse", feedforward="productkey"),
    System("Switch Transformer", "O(N^2)", 2, True, "Sparse", feedforward="switch"),
    System("ST-MoE", "O(N^2)", 2, True, "Sparse", feedforward="stmoe"),
    System("GShard", "O(N^2)", 2, True, "Sparse", feedforward="gshard"),
    System("Scaling Transformers", "O(N^2)", 2, True, "Sparse", feedforward="scaling"),
    System("GLaM", "O(N^2)", 2, True, "Sparse", feedforward="glam"),
)
CLOSE = 0.1  # as the tests count: exponents that differ by less are the same


def here(system: System) -> Here:
    """What a system is in Regard. A feed-forward layer adds nothing to the exponents of the attention beside it."""
    if system.model is not None:
        facts = registry.find(system.model).facts
        return Here(facts.time.exponent, facts.memory.exponent, facts.state is not None)
    word = system.word or "softmax"
    decodes = "causal" in ATTENTION.find(word).facts.roles
    # small enough to be built with its numbers: on the meta device PyTorch would import its compiler
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # the form that decodes, where there is one
        facts = ATTENTION.build(word, Shape.of(width=8, heads=1, role="causal" if decodes else "self")).facts
    return Here(facts.time.exponent, facts.memory.exponent, decodes)


def differs(system: System) -> bool:
    """Whether what is counted here is not what was published."""
    ours = here(system)
    off = system.exponent is None or abs(ours.time - system.exponent) > CLOSE
    return off or ours.decodes != system.decodes
