"""What every translator must do: decode in pieces as in a whole, and leave padding out."""

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from regard.decoding import DecodingConfig, decode

VOCABULARY = 23
KEEP = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0, 1], [1] * 9, [1, 0, 0, 0, 0, 1, 0, 0, 0]]).bool()
TARGET_KEEP = torch.tensor([[1] * 7, [1, 1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 1, 1, 1]]).bool()


class Doubled(nn.Module):
    """In the place of dropout: where it stands, a loop can tell."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def ids(B: int = 3, T: int = 9, seed: int = 1) -> Tensor:
    return torch.randint(4, VOCABULARY, (B, T), generator=torch.Generator().manual_seed(seed))


def check_pieces(model: nn.Module) -> None:
    """Decoding in pieces equals the whole, and each row equals itself alone."""
    source, target = ids(), ids(T=7, seed=2)
    whole = model(source, target, keep=KEEP, target_keep=TARGET_KEEP).logits
    for cuts in ((3, 1, 3), (1,) * 7):
        state, pieces, first = model.start(3, memory=model.encode(source, keep=KEEP)), [], 0
        for n in cuts:
            part = slice(first, first + n)
            logits, state = model.extend(target[:, part], state, keep=TARGET_KEEP[:, part])
            pieces.append(logits)
            first += n
        assert_close(torch.cat(pieces, 1), whole)
    for row in range(3):
        alone = model(source[row : row + 1, KEEP[row]], target[row : row + 1, TARGET_KEEP[row]]).logits
        assert_close(whole[row : row + 1, TARGET_KEEP[row]], alone)
    assert not whole[~TARGET_KEEP].any()


def check_beams(model: nn.Module) -> None:
    """Beams over one memory, reordered and selected."""
    source, target = ids(), ids(B=6, T=3, seed=2)
    repeated, keep = source.repeat_interleave(2, 0), KEEP.repeat_interleave(2, 0)
    expected = model(repeated, target, keep=keep).logits
    state = model.start(6, memory=model.encode(source, keep=KEEP))
    first, state = model.extend(target[:, :2], state)
    assert_close(first, expected[:, :2])
    order = torch.tensor([1, 0, 2, 2, 5, 5])
    moved = torch.cat([target[order, :2], target[:, 2:]], 1)
    after = model.extend(target[:, 2:], state.reorder(order))[0]
    assert_close(after, model(repeated, moved, keep=keep).logits[:, 2:])
    state = model.extend(target[::2, :2], model.start(3, memory=model.encode(source, keep=KEEP)))[1]
    rows = torch.tensor([2, 0])
    chosen = torch.cat([target[::2][rows, :2], target[:2, 2:]], 1)
    after = model.extend(target[:2, 2:], state.select(rows))[0]
    assert_close(after, model(source[rows], chosen, keep=KEEP[rows]).logits[:, 2:])


def check_search(model: nn.Module) -> None:
    """A sentence gets the same output alone and in a batch, greedy and from a beam."""
    source = ids()
    for beam in (1, 3):
        config = DecodingConfig(beam=beam, maximum=6)
        found = decode(model, source, KEEP, config)
        for row in range(3):
            ((alone,),) = decode(model, source[row : row + 1, KEEP[row]], None, config)
            assert found[row][0].ids == alone.ids
            assert abs(found[row][0].score - alone.score) < 1e-9


def check_no_idle_parameter(model: nn.Module) -> None:
    model.train()
    model(ids(), ids(T=7, seed=2), keep=KEEP, target_keep=TARGET_KEEP).logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def check_future(model: nn.Module) -> None:
    """A later token of the target changes nothing before it."""
    source, target = ids(), ids(T=7, seed=2)
    before = model(source, target).logits
    for cut in (1, 4, 6):
        changed = torch.cat([target[:, :cut], (target[:, cut:] - 3) % 19 + 4], 1)
        assert_close(model(source, changed).logits[:, :cut], before[:, :cut], rtol=0, atol=0)
        assert (model(source, changed).logits[:, cut:] - before[:, cut:]).abs().max() > 1e-6


def check_translator(model: nn.Module) -> None:
    """All of it; the model ends in training mode, with gradients."""
    model = model.double().eval()
    with torch.no_grad():
        check_pieces(model)
        check_beams(model)
        check_search(model)
        check_future(model)
    check_no_idle_parameter(model)
