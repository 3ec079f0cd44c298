"""Decoding over states of fixed size: the same tokens as without, few looks, and kernels that match float64."""

import os
import warnings

import pytest
import torch
from compiled_kernels import check_compiles
from torch import Tensor, nn
from torch.testing import assert_close

import regard
from regard.core.state import RingState, select
from regard.decoding import DecodingConfig, captured, generate, searching
from regard.kernels import choose, ring
from regard.layers.attention.base import Attention
from regard.spec import ATTENTION

ON_GPU = os.environ.get("REGARD_GPU") == "1"
DEVICE = "cuda" if ON_GPU else "cpu"
ROOM = 40

SPECS = [(name, spec) for name, kind in ATTENTION.classes.items() for spec in kind.examples]
FIRST = {spec for _, spec in reversed(list({name: (name, spec) for name, spec in reversed(SPECS)}.values()))}


def causal(spec: str) -> Attention | None:
    torch.manual_seed(0)
    try:
        layer = regard.attention(spec, width=16, heads=4, role="causal")
    except ValueError:
        return None
    return None if layer.facts.state is None else layer.eval().double()


def sizes(state: object) -> list[torch.Size]:
    if isinstance(state, Tensor):
        return [state.shape]
    return [size for part in state for size in sizes(part)] if isinstance(state, tuple) else []


@pytest.mark.parametrize(
    "spec",
    [pytest.param(spec, marks=() if spec in FIRST else pytest.mark.exhaustive) for _, spec in SPECS if causal(spec)],
)
@pytest.mark.parametrize("prompt", [2, 9])
@torch.no_grad()
def test_a_fixed_state_keeps_its_sizes_and_gives_the_same(spec, prompt):
    layer = causal(spec)
    x = torch.randn(3, ROOM, 16, dtype=torch.float64)
    lengths = torch.tensor([9, 4, 7]).clamp(max=prompt)
    keep = torch.arange(prompt) < lengths[:, None]
    _, state = layer.extend(x[:, :prompt], layer.start(3, capacity=ROOM), keep=keep)
    # slots that no token has filled are whatever was there before
    fixed = layer.fixed_state(select(state, torch.arange(3)), ROOM)
    for t in range(prompt, prompt + 12):
        expected, state = layer.extend(x[:, t : t + 1], state)
        got, after = layer.extend(x[:, t : t + 1], fixed)
        assert_close(got, expected)
        assert sizes(after) == sizes(fixed)
        captured.put(fixed, after)


def model(attention: str = "softmax", position: str = "sinusoidal") -> nn.Module:
    torch.manual_seed(1)
    sizes = {"vocabulary": 23, "width": 16, "heads": 4, "inner": 32, "layers": 2}
    config = regard.ModelConfig(kind="decoder", attention=attention, position=position, norm="pre", **sizes)
    made = regard.Transformer(config).eval().double().to(DEVICE)
    for part in made.parameters():
        part.data.mul_(3)  # outputs of different lengths, some of which end
    return made


PROMPT = torch.randint(4, 23, (5, 7), generator=torch.Generator().manual_seed(2)).to(DEVICE)
KEEP = torch.tensor([[1] * 7, [0, 0, 0, 1, 1, 1, 1], [1] * 7, [1, 1, 0, 1, 1, 1, 1], [1] * 7], dtype=torch.bool).to(
    DEVICE
)
CONFIGS = {
    "greedy": DecodingConfig(beam=1, maximum=40, maximum_extra=40),
    "least": DecodingConfig(beam=1, maximum=30, maximum_extra=40, minimum=12, repetition=1.3),
    "sampled": DecodingConfig(sample=True, nbest=3, maximum=20, maximum_extra=30, top_p=0.9, seed=3),
}


@pytest.fixture
def fixed_walks(monkeypatch) -> list[int]:
    """Searches go over states of fixed size; on the CPU, what would be captured is run."""
    calls, plain = [], captured.search_greedily

    def search_greedily(*given):
        calls.append(1)
        return plain(*given, capture=None if ON_GPU else lambda work: work)

    monkeypatch.setattr(searching.captured, "refusal", lambda *_: None)
    monkeypatch.setattr(searching.captured, "search_greedily", search_greedily)
    return calls


def check_same_tokens(made: nn.Module, keep: Tensor | None, config: DecodingConfig, calls: list[int]) -> None:
    reported = {True: [], False: []}
    for watches in (False, True):
        found = {}
        for graphs in (False, True):

            def watch(*token: int, graphs: bool = graphs) -> bool:
                reported[graphs].append(token)
                return token[2] == 5

            asked = DecodingConfig(**{**vars(config), "graphs": graphs})
            found[graphs] = generate(made, PROMPT, keep, asked, watch=watch if watches else None)
        for ours, plain in zip(found[True], found[False], strict=True):
            assert [(one.ids, one.finished) for one in ours] == [(one.ids, one.finished) for one in plain]
            assert_close(torch.tensor([one.score for one in ours]), torch.tensor([one.score for one in plain]))
    assert reported[True] == reported[False] != []
    assert len(calls) == 2


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("attention", ["softmax", "heads(local(window=3), linear)"])
def test_the_same_tokens(attention, config, fixed_walks):
    check_same_tokens(model(attention), KEEP if config == "greedy" else None, CONFIGS[config], fixed_walks)


@pytest.mark.parametrize("attention", ["longshort(window=3, rank=1, chunk=1)", "poolingformer(window=3, wide=6)"])
def test_what_has_room_for_the_tokens_asked_for_needs_no_more(attention, fixed_walks):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_same_tokens(model(attention), None, CONFIGS["greedy"], fixed_walks)


@pytest.mark.parametrize("position", ["rotary", "alibi"])
def test_the_same_tokens_by_position(position, fixed_walks):
    check_same_tokens(model("softmax", position), KEEP, CONFIGS["greedy"], fixed_walks)


def test_an_encoder_decoder_too(fixed_walks):
    torch.manual_seed(1)
    made = regard.Transformer(regard.ModelConfig(vocabulary=23, width=16, heads=4, inner=32, layers=2)).eval().double()
    found = [
        regard.decoding.decode(made, PROMPT.cpu(), KEEP.cpu(), DecodingConfig(beam=1, maximum_extra=30, graphs=graphs))
        for graphs in (False, True)
    ]
    assert [[one.ids for one in row] for row in found[0]] == [[one.ids for one in row] for row in found[1]]
    assert fixed_walks == [1]


def test_the_host_looks_every_few_tokens(fixed_walks, monkeypatch):
    made, steps = model(), []
    monkeypatch.setattr(
        made, "extend", lambda *given, **options: (steps.append(1), type(made).extend(made, *given, **options))[1]
    )
    with torch.no_grad():
        # whatever comes, the end does
        made.decoder.norm.bias.copy_(100 * made.output.weight[3] / made.output.weight[3].norm())
    config = DecodingConfig(beam=1, maximum=500, maximum_extra=500, minimum=5)
    found = generate(made, PROMPT, None, config)
    assert all(one.finished and len(one.ids) == 5 for (one,) in found)
    # after the prompt, steps until the first look behind the end
    assert len(steps) == captured.EVERY - 1


def test_without_graphs_or_for_few_tokens_nothing_is_captured(fixed_walks):
    generate(model(), PROMPT, None, DecodingConfig(beam=1, maximum=40, maximum_extra=40, graphs=False))
    generate(model(), PROMPT, None, DecodingConfig(beam=1, maximum=captured.EVERY, maximum_extra=40))
    assert fixed_walks == []


def test_reasons_in_words():
    assert "the model is on cpu" in captured.refusal(model().cpu(), torch.zeros(1, 2))
    changed = captured.sizes_changed((torch.zeros(2, 3),), (torch.zeros(2, 4),))
    assert changed == "a step changed the size of a state from [2, 3] to [2, 4]"


def test_a_state_that_grows_is_not_captured(fixed_walks):
    made = model("local(window=20)")
    for block in made.decoder.blocks:
        block.attention.fixed_state = lambda state, capacity: state
    config = CONFIGS["greedy"]
    with pytest.warns(UserWarning, match="not captured as a CUDA graph: a step changed the size"):
        found = generate(made, PROMPT, None, config)
    plain = generate(made, PROMPT, None, DecodingConfig(**{**vars(config), "graphs": False}))
    assert [[one.ids for one in row] for row in found] == [[one.ids for one in row] for row in plain]


def test_logits_that_are_no_numbers_end_the_search(fixed_walks):
    made = model()
    with torch.no_grad():
        made.decoder.norm.bias.fill_(torch.nan)
    with pytest.raises(ValueError, match="are not numbers"):
        generate(made, PROMPT, None, CONFIGS["greedy"])


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("B", "H", "G", "R", "D"), [(3, 4, 4, 40, 16), (2, 6, 2, 300, 24), (1, 2, 2, 700, 64), (5, 3, 3, 7, 8)]
)
@torch.no_grad()
def test_ring_in_triton(B, H, G, R, D, dtype):
    torch.manual_seed(R)
    for seen in (torch.randint(0, R, (B,)), torch.randint(0, 4 * R, (B,)), torch.zeros(B, dtype=torch.long)):
        seen = seen.to(DEVICE)
        rings = [torch.randn(B, G, R, D, device=DEVICE, dtype=dtype) for _ in range(2)]
        q, k, v = (torch.randn(B, 1, n, D, device=DEVICE, dtype=dtype).transpose(1, 2) for n in (H, G, G))
        wide = [x.double() for x in (q, k, v, *rings)]
        with choose.use("torch"):
            exact = ring.attend_next(*wide, seen, 0.3)
            rounded = ring.attend_next(q, k, v, *(x.clone() for x in rings), seen, 0.3)
        with choose.use("triton"), choose.record() as answers:
            got = ring.attend_next(q, k, v, *rings, seen, 0.3)
        assert answers == [("ring", "triton")]
        assert (got - exact).norm() <= 2 * (rounded - exact).norm() + torch.finfo(dtype).eps * exact.norm()
        for ours, plain in zip(rings, wide[3:], strict=True):
            assert_close(ours.double(), plain, rtol=0, atol=0)


@pytest.mark.parametrize("which", ["one", pytest.param("all", marks=pytest.mark.exhaustive)])
def test_kernels_compile(which, tmp_path):
    check_compiles(tmp_path, "gathers_compile.py", "ring", which)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "spec"), [pair for pair in SPECS if causal(pair[1])])
def test_captured_on_a_gpu(name, spec, recwarn):
    """Every mechanism is captured, and gives the tokens that it gives without."""
    torch.manual_seed(1)
    sizes = {"vocabulary": 23, "width": 16, "heads": 4, "inner": 32, "layers": 2}
    made = regard.Transformer(regard.ModelConfig(kind="decoder", attention=spec, norm="pre", **sizes)).eval().cuda()
    for part in made.parameters():
        part.data.mul_(3)
    found = [
        generate(made, PROMPT, KEEP, DecodingConfig(**{**vars(CONFIGS["greedy"]), "graphs": graphs}))
        for graphs in (False, True)
    ]
    assert [[one.ids for one in row] for row in found[0]] == [[one.ids for one in row] for row in found[1]]
    assert not [str(warning.message) for warning in recwarn if "not captured" in str(warning.message)]


def test_a_window_becomes_a_ring():
    layer = causal("local(window=3)")
    _, state = layer.extend(torch.randn(3, 9, 16, dtype=torch.float64), layer.start(3))
    assert isinstance(layer.fixed_state(state, ROOM), RingState)
