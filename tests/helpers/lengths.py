"""What the tests of the models that change the length share: the parts of a layer written out for one vector."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from regard.models.block import Block

VOCABULARY = 50
KEEP = torch.tensor(
    [[0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0], [1] * 11, [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]]
).bool()
FILLS = (0, 7, VOCABULARY - 1)


def ids(B: int = 4, T: int = 11, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (B, T), generator=torch.Generator().manual_seed(seed))


def shaken(module: nn.Module) -> nn.Module:
    """In float64, with no parameter at one or zero, where it would hide what it does."""
    torch.manual_seed(1)
    module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module


def norm(vector: Tensor, layer: nn.LayerNorm) -> Tensor:
    away = vector - vector.sum() / len(vector)
    return away / torch.sqrt((away * away).sum() / len(vector) + layer.eps) * layer.weight + layer.bias


def linear(vector: Tensor, layer: nn.Linear) -> Tensor:
    out = layer.weight @ vector
    return out if layer.bias is None else out + layer.bias


def gelu(vector: Tensor) -> Tensor:
    return torch.stack([u * (1 + torch.erf(u / math.sqrt(2))) / 2 for u in vector])


def relu(vector: Tensor) -> Tensor:
    return torch.stack([u if u > 0 else 0 * u for u in vector])


def block(layer: Block, x: Tensor, activation: Callable[[Tensor], Tensor], memory: Tensor | None = None) -> Tensor:
    """One row [T, E] through a layer that has one attention, row by row."""
    attention = layer.attention if memory is None else layer.cross
    first, second = layer.norms

    def feed(vector: Tensor) -> Tensor:
        return linear(activation(linear(vector, layer.feedforward.inner)), layer.feedforward.outer)

    read = torch.stack([norm(vector, first) for vector in x]) if layer.pre else x
    read = attention.reference(read) if memory is None else attention.reference(read, memory)
    outs = []
    for vector, seen in zip(x, read, strict=True):
        if layer.pre:
            vector = vector + seen
            outs.append(vector + feed(norm(vector, second)))
        else:
            vector = norm(vector + seen, first)
            outs.append(norm(vector + feed(vector), second))
    return torch.stack(outs)


def embedded(embedding: nn.Embedding, position: nn.Module | None, row: Tensor) -> Tensor:
    x = torch.stack([embedding.weight[token] * math.sqrt(embedding.embedding_dim) for token in row])
    return x if position is None else position.plain_add(x)


def check_padding(model: nn.Module) -> None:
    """Each row is what it is alone, whatever stands in the padding; at the padding there are zeros."""
    tokens = ids()
    whole = model(tokens, keep=KEEP).logits
    each = whole.dim() == 3
    for fill in FILLS:
        other = model(torch.where(KEEP, tokens, fill), keep=KEEP).logits
        assert torch.equal(other, whole)
    assert not each or not whole[~KEEP].any()
    for row in range(len(tokens)):
        alone = model(tokens[row : row + 1, KEEP[row]]).logits
        assert_close(whole[row : row + 1, KEEP[row]] if each else whole[row : row + 1], alone)
    assert_close(model(tokens, keep=torch.ones_like(KEEP)).logits, model(tokens).logits)


def check_gradients(model: nn.Module) -> None:
    """Every parameter learns."""
    model(ids(), keep=KEEP).logits.square().sum().backward()
    assert not [name for name, part in model.named_parameters() if part.grad is None or not part.grad.any()]
    assert all(part.grad.isfinite().all() for part in model.parameters())
