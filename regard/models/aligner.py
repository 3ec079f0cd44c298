"""Word alignment, learned beside a translation."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core.parallel import batch_sum
from regard.core.rows import Memory, Rows


class Aligner(nn.Module):
    """Which source token a target token comes from, as a latent variable:

        p(y_t | y_<t, x) = sum over s of  p(s | y_<t, x) p(y_t | x_s).

    The first factor is an attention from the decoder, before it has seen y_t, to the encoder: where the translation
    continues. The second is a dictionary that knows the source token s alone, without its context, so only a token that
    means y_t can explain it. The last source token, which ends the sentence, is no choice: it would come to explain
    every frequent word. Trained for the sum, the two find the links by themselves, as the IBM models do (Brown et al.
    1993) and neural hidden Markov models (Wang et al. 2018, aclanthology.org/P18-2060); the link is the posterior
    p(s | y_<=t, x). Gradients stop at this layer: the translator is trained as it would be without it.
    """

    def __init__(self, width: int, vocabulary: int):
        super().__init__()
        self.norm, self.memory_norm, self.token_norm = (nn.LayerNorm(width) for _ in range(3))
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(
        self, x: Tensor, rows: Rows, memory: Memory, source: Tensor, target: Tensor, embedding: Tensor, output: Tensor
    ) -> Tensor:
        """The mean of -log p(y_t | y_<t, x) over the target tokens that follow another, of which x [B, T, E] is the
        state of the decoder; ids are real from the left, `embedding` and `output` [V, E] those of the translator."""
        with torch.autocast(x.device.type, enabled=False):
            prior, lexical = self._factors(x, memory, source, target, embedding, output)
            missed = -(prior + lexical).logsumexp(-1)  # [B, T]
            follows = _follows(target, rows)
            return batch_sum(torch.where(follows, missed, 0).sum()) / batch_sum(follows.sum()).clamp(min=1)

    def map(
        self, x: Tensor, rows: Rows, memory: Memory, source: Tensor, target: Tensor, embedding: Tensor, output: Tensor
    ) -> Tensor:
        """[B, 1, T, S]: row t holds the posterior of the token behind it, or the prior where there is none."""
        with torch.autocast(x.device.type, enabled=False):
            prior, lexical = self._factors(x, memory, source, target, embedding, output)
            weights = (prior + torch.where(_follows(target, rows)[..., None], lexical, 0)).softmax(-1)
        return torch.where(_words(memory)[:, None], weights, 0)[:, None]

    def _factors(
        self, x: Tensor, memory: Memory, source: Tensor, target: Tensor, embedding: Tensor, output: Tensor
    ) -> tuple[Tensor, Tensor]:
        """log p(s | y_<t, x) and log p(y_t | x_s), both [B, T, S]; y_t is the token behind row t."""
        dtype, E = self.bias.dtype, x.shape[2]
        x, keys, output = x.detach().to(dtype), memory.x.detach().to(dtype), output.detach().to(dtype)
        scores = self.query(self.norm(x)) @ self.key(self.memory_norm(keys)).mT / math.sqrt(E)
        scores = torch.where(_words(memory)[:, None], scores, torch.finfo(dtype).min)
        # on the CPU one dictionary entry per distinct token; counting them would synchronise with a GPU
        tokens, where = source.unique(return_inverse=True) if source.device.type == "cpu" else (source, None)
        tokens = F.embedding(tokens, embedding.detach().to(dtype)) * math.sqrt(E)
        tokens = self.token_norm(tokens + self.outer(torch.relu(self.inner(tokens))))
        total = F.linear(tokens, output, self.bias).logsumexp(-1)
        if where is not None:
            tokens, total = tokens[where], total[where]  # [B, S, E], [B, S]
        behind = F.pad(target[:, 1:], (0, 1))
        named = F.embedding(behind, output) @ tokens.mT + self.bias[behind][..., None]  # [B, T, S]
        return scores.log_softmax(-1), named - total[:, None]


def _follows(target: Tensor, rows: Rows) -> Tensor:
    """[B, T]: whether a real token stands behind."""
    return torch.arange(1, target.shape[1] + 1, device=target.device) < rows.count[:, None]


def _words(memory: Memory) -> Tensor:
    """[B, S] or [1, S]: the source tokens but the last."""
    at = torch.arange(1, memory.x.shape[1] + 1, device=memory.x.device)[None]
    return at < (memory.x.shape[1] if memory.count is None else memory.count[:, None])
