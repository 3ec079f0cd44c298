"""The Feedback Transformer: a loop reference, `feedback-transformer-pytorch`, labml, decoding and padding."""

import importlib
import math

import pytest
import torch
from feedback_transformer_pytorch import FeedbackTransformer
from torch import Tensor
from torch.testing import assert_close

import regard
from regard.core.reference import Row
from regard.decoding import DecodingConfig, generate
from regard.models.feedback import Feedback, FeedbackConfig

SMALL = {"vocabulary": 50, "width": 16, "heads": 4, "inner": 32, "layers": 3, "dropout": 0.0}
KEEP = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0, 1], [1] * 9, [1, 0, 0, 0, 0, 1, 0, 0, 0]]).bool()
VARIANTS = [
    {},
    {"shared": False, "norm": "pre", "feedforward": "dense(activation='gelu')"},
    {"norm": "pre", "span": 4},
    {"norm": "pre", "normed_memory": False, "shared_position": False},
    {"norm": "pre", "span": 6, "adaptive_span": True, "span_ramp": 2, "span_begin": 0.3},
    {"shared": False, "span": 5, "adaptive_span": True, "span_ramp": 3, "kv_heads": 2, "position": "rotary"},
    {"span": 5, "adaptive_span": True, "span_ramp": 3, "position": "alibi", "attention": "additive"},
    {"span": 3, "bias": True},
    {"span": 2, "shared": False, "kv_heads": 2, "position": "rotary", "tied": False},
    {"position": "sinusoidal", "attention": "additive"},
    {"position": "alibi", "attention": "dot", "bias": True},
    {"position": "xl", "span": 4, "bias": True},
    {"position": "shaw(distance=2)"},
    {"position": "none", "attention": "bilinear"},
]


def build(**options) -> Feedback:
    """In float64, with no parameter at zero, where it would hide what it does."""
    torch.manual_seed(0)
    model = Feedback(FeedbackConfig(**(SMALL | options))).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.std() == 0:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def ids(B: int = 3, T: int = 9, seed: int = 1) -> Tensor:
    return torch.randint(50, (B, T), generator=torch.Generator().manual_seed(seed))


def linear(layer: torch.nn.Linear, x: Tensor) -> Tensor:
    made = layer.weight @ x
    return made if layer.bias is None else made + layer.bias


def normed(x: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
    away = x - x.mean()
    return away / torch.sqrt((away * away).mean() + norm.eps) * norm.weight + norm.bias


def kept(block, distance: int, head: int, config: FeedbackConfig) -> Tensor | float:
    """How much of a memory so many steps back the adaptive span of a head lets through: 1 up to its span, then a
    ramp."""
    if not config.adaptive_span:
        return 1.0
    share = block.spans[head].clamp(0, 1)
    return ((share * config.span - (distance - 1)) / config.span_ramp + 1).clamp(0, 1)


def looked(block, x: Tensor, memories: list[Tensor], config: FeedbackConfig, reach: int | None) -> Tensor:
    """Attention of a vector at its place over the memories before it, head by head."""
    layer = block.attention
    t, D, scheme = len(memories), layer.shape.head_width, layer.position
    if not t:
        return torch.zeros_like(x)
    first, heads = 0 if reach is None else max(0, t - reach), []
    if config.norm == "pre" and config.normed_memory:
        memories = [normed(memory, block.norms[0]) for memory in memories]
    q, k, v = (
        [linear(layer.project[name], vector) for vector in vectors]
        for name, vectors in (("q", [x]), ("k", memories), ("v", memories))
    )
    for head in range(layer.shape.heads):
        group = head * layer.shape.kv_heads // layer.shape.heads
        own = slice(head * D, head * D + D)
        query, keys = q[0][own], [key[group * D : group * D + D] for key in k]
        if scheme is not None:
            query = scheme.plain_rotate(query, t)
            keys = [scheme.plain_rotate(key, j) for j, key in enumerate(keys)]
        values = torch.stack([value[group * D : group * D + D] for value in v])
        # the query at place t of as many, the others never read
        queries = torch.stack([torch.full_like(query, torch.nan)] * t + [query])
        row = Row(head, True, t + 1, t, {"q": queries, "k": torch.stack(keys), "v": values}, scheme)
        if not config.adaptive_span:
            heads.append(row.attend(t, range(first, t), layer.scale))
            continue
        powers = [torch.exp(layer.scale * row.product(t, j) + row.bias(t, j)) for j in range(first, t)]
        shares = [
            power / sum(powers) * kept(block, t - j, head, config)
            for j, power in zip(range(first, t), powers, strict=True)
        ]
        read = sum(share * row.value(t, j) for j, share in zip(range(first, t), shares, strict=True))
        heads.append(read / (sum(shares) + 1e-8))
    return linear(layer.output, torch.cat(heads))


def reference(model: Feedback, tokens: Tensor) -> Tensor:
    """One sequence [T] -> logits [T, V]: the formula, a token and a layer at a time."""
    config = model.config
    embedded = torch.stack([model.embedding.weight[token] * math.sqrt(config.width) for token in tokens])
    embedded = embedded if model.position is None else model.position.plain_add(embedded)
    activation = {"relu": torch.relu, "gelu": torch.nn.functional.gelu}[model.blocks[0].feedforward.activation]
    shares = torch.exp(model.mixing) / torch.exp(model.mixing).sum()
    memories, logits, reach = [], [], config.span
    if config.adaptive_span:
        # what no head of any layer lets through is not kept
        longest = max(block.spans.clamp(0, 1).max().item() for block in model.blocks)
        reach = max(1, min(config.span, math.ceil(longest * config.span + config.span_ramp)))
    for x in embedded:
        levels = [x]
        for block in model.blocks:
            (inner, outer), feed = block.norms, block.feedforward
            if config.norm == "pre":
                x = x + looked(block, normed(x, inner), memories, config, reach)
                x = x + linear(feed.outer, activation(linear(feed.inner, normed(x, outer))))
            else:
                x = normed(x + looked(block, x, memories, config, reach), inner)
                x = normed(x + linear(feed.outer, activation(linear(feed.inner, x))), outer)
            levels.append(x)
        memories.append(sum(share * level for share, level in zip(shares, levels, strict=True)))
        top = normed(x, model.norm) if config.norm == "pre" else x
        logits.append(linear(model.output, top))
    return torch.stack(logits)


@pytest.mark.parametrize("options", [o for o in VARIANTS if "attention" not in o], ids=str)
def test_reference(options):
    """Outputs and the gradients of every parameter."""
    model, tokens = build(**options), ids(B=2)
    slow = torch.stack([reference(model, row) for row in tokens])
    fast = model(tokens).logits
    assert_close(fast, slow)
    toward = torch.randn_like(fast)
    names, parameters = zip(*model.named_parameters(), strict=True)
    got = torch.autograd.grad((fast * toward).sum(), parameters)
    for name, mine, other in zip(names, got, torch.autograd.grad((slow * toward).sum(), parameters), strict=True):
        assert_close(mine, other, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_decoding_is_the_whole_however_it_is_cut(options):
    model, tokens = build(**options), ids()
    for keep in (None, KEEP):
        whole = model(tokens, keep=keep).logits
        for cuts in ([9], [1] * 9, [3, 1, 5]):
            state, pieces, first = model.start(3, capacity=9), [], 0
            for n in cuts:
                part = None if keep is None else keep[:, first : first + n]
                logits, state = model.extend(tokens[:, first : first + n], state, keep=part)
                pieces.append(logits)
                first += n
            assert_close(torch.cat(pieces, 1), whole)
    for row in range(3):
        alone = model(tokens[row : row + 1, KEEP[row]]).logits
        assert_close(whole[row : row + 1, KEEP[row]], alone)
    assert not whole[~KEEP].any()


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_prompts_of_different_length_go_on_together(options):
    """Then rows are chosen anew, as beams are."""
    model, prompt, more = build(**options), ids(), ids(B=4, T=5, seed=2)
    _, state = model.extend(prompt, model.start(3), keep=KEEP)
    order = torch.tensor([2, 0, 0, 1])
    branch = state.reorder(order)
    steps = []
    for token in more.split(1, 1):
        logits, branch = model.extend(token, branch)
        steps.append(logits)
    for row, origin in enumerate(order):
        own = torch.cat([prompt[origin, KEEP[origin]], more[row]])[None]
        assert_close(torch.cat(steps, 1)[row : row + 1], model(own).logits[:, -5:])


def test_the_future_is_not_read():
    model, tokens, other = build(), ids(), ids(seed=5)
    changed = torch.cat([tokens[:, :4], other[:, 4:]], 1)
    assert_close(model(changed).logits[:, :4], model(tokens).logits[:, :4], rtol=0, atol=0)


@pytest.mark.parametrize(("options", "sets"), [({}, 1), ({"shared": False}, 3), ({"span": 4}, 1)])
def test_the_state_is_the_memories_of_one_layer(options, sets):
    model = build(**options)
    _, state = model.extend(ids(T=9), model.start(3))
    sizes = [tuple(part.shape) for pair in state.parts for part in pair]
    assert sizes == [(3, 4, options.get("span", 9), 4)] * (2 * sets)
    # padding takes no room
    _, state = model.extend(ids(T=9), model.start(3), keep=KEEP & (torch.arange(9) < 5))
    assert state.parts[0][0].shape[2] == min(options.get("span", 5), 5)


def test_no_parameter_is_idle_and_segments_train():
    model, tokens = build(), ids()
    model(tokens).logits.square().sum().backward()
    assert not [name for name, parameter in model.named_parameters() if parameter.grad is None]
    whole = model(tokens).logits
    logits, state = model.extend(tokens[:, :4], model.start(3))
    late, _ = model.extend(tokens[:, 4:], regard.detach(state))
    assert_close(torch.cat([logits, late], 1), whole)
    model.zero_grad()
    late.sum().backward()
    cut = model.mixing.grad.clone()
    model.zero_grad()
    whole[:, 4:].sum().backward()
    assert (cut - model.mixing.grad).abs().max() > 1e-9, "the history was to be cut"


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_maps(options):
    """Each token reads the memories before it, as many as the span, and the first none; a row as if alone."""
    model, tokens = build(**options), ids()
    whole = model.maps(tokens)
    assert len(whole) == 3
    span = options.get("span", 9)
    for maps in whole:
        assert maps.shape == (3, 4, 9, 9)
        seen = torch.ones(9, 9).tril(-1).triu(-span).bool()
        if not options.get("adaptive_span"):
            assert (maps[..., seen] > 0).all()
        assert not maps[..., ~seen].any()
        # an adaptive span divides by a little more than what it lets through
        off = 1e-5 if options.get("adaptive_span") else 1e-7
        assert_close(maps.sum(-1)[..., 1:], torch.ones(3, 4, 8, dtype=torch.float64), rtol=off, atol=off)
    for row in range(3):
        alone = model.maps(tokens[row : row + 1, KEEP[row]])
        for mine, other in zip(model.maps(tokens, keep=KEEP), alone, strict=True):
            assert_close(mine[row : row + 1, :, KEEP[row]][..., KEEP[row]], other)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_layers_share_what_the_authors_share(norm):
    """One table of positions, and with the projections of pre-norm layers the norm before them."""
    first, *others = build(norm=norm).blocks
    for block in others:
        assert block.attention.position is first.attention.position
        assert (block.norms[0] is first.norms[0]) == (norm == "pre")
        assert block.norms[1] is not first.norms[1]
    one, two, _ = build(norm=norm, shared=False, shared_position=False).blocks
    assert one.norms[0] is not two.norms[0]
    assert one.attention.position is not two.attention.position


def test_an_adaptive_span_is_trained_and_shortens_the_state():
    """Its loss is the mean span of the heads times a weight, added up over the layers; a span never leaves 0 to 1."""
    options = {"span": 8, "adaptive_span": True, "span_ramp": 2, "span_begin": 0.25, "span_loss": 0.01}
    model = build(**options).train()
    with torch.no_grad():
        for value, block in zip((0.5, 1.5, -0.5), model.blocks, strict=True):
            block.spans.fill_(value)
    loss = model(ids()).auxiliary_loss
    assert_close(loss, torch.tensor(0.01 * 8 * (0.5 + 1.0 + 0.0), dtype=torch.float64))
    assert [block.spans[0].item() for block in model.blocks] == [0.5, 1.0, 0.0]
    for block in model.blocks:
        loss_gradient, *_ = torch.autograd.grad(model(ids()).auxiliary_loss, block.spans)
        assert_close(loss_gradient, torch.full((4,), 0.01 * 8 / 4, dtype=torch.float64))
    assert model.eval()(ids()).auxiliary_loss is None
    with torch.no_grad():
        for block in model.blocks:
            block.spans.fill_(0.25)
    _, state = model.extend(ids(), model.start(3))
    assert state.parts[0][0].shape[2] == 4, "a quarter of 8, and the ramp"


def test_a_full_span_is_a_fixed_one():
    fixed = build(span=4)
    full = build(span=4, adaptive_span=True, span_begin=1.0)
    full.load_state_dict(fixed.state_dict(), strict=False)
    with torch.no_grad():
        for block in full.blocks:
            block.spans.fill_(1.0)
    assert_close(full(ids()).logits, fixed(ids()).logits, rtol=1e-6, atol=1e-6)


def test_generating():
    """Greedy continuations of padded prompts, against whole forwards of each alone."""
    model, prompt = build(), ids().clamp(min=4)
    found = generate(model, prompt, KEEP, DecodingConfig(beam=1, maximum=5))
    for row in range(3):
        own, made = prompt[row : row + 1, KEEP[row]], []
        for _ in range(5):
            logits = model(own).logits[0, -1].clone()
            logits[[0, 2]] = -torch.inf
            token = logits.argmax()
            own = torch.cat([own, token[None, None]], 1)
            if token == 3:
                break
            made.append(token.item())
        assert found[row][0].ids == made


def test_refusals():
    with pytest.raises(ValueError, match="cannot take attention 'linear': it must compare a query with keys"):
        build(attention="linear", position="none")
    with pytest.raises(ValueError, match="cannot take attention 'location'"):
        build(attention="location", position="none")
    with pytest.raises(ValueError, match="span must be at least 1, got 0"):
        build(span=0)
    with pytest.raises(ValueError, match="adaptive_span needs span, the longest that it may become: set span"):
        build(adaptive_span=True)
    with pytest.raises(ValueError, match="span_begin must be at least 0 and at most 1, got 2"):
        build(span=4, adaptive_span=True, span_begin=2)
    with pytest.raises(ValueError, match="span_ramp must be at least 1, got 0"):
        build(span=4, adaptive_span=True, span_ramp=0)
    with pytest.raises(ValueError, match="adaptive_span cannot take a position scheme that adds to values"):
        build(span=4, adaptive_span=True, position="shaw(distance=2)")
    model = build()
    with pytest.raises(ValueError, match="tokens have 2 rows and the state 3"):
        model.extend(ids(B=2), model.start(3))
    with pytest.raises(ValueError, match="reads only its own memories"):
        model.start(3, memory=torch.zeros(3, 5, 16))


@pytest.mark.parametrize("span", [4, 20])
def test_peer(span):
    """feedback-transformer-pytorch a token at a time, with a plain feed-forward layer in the place of its gated one. It
    counts distances from the first memory, all of which then fall into one bucket: no positions."""
    torch.manual_seed(0)
    sizes = {"num_tokens": 50, "dim": 16, "depth": 3, "heads": 4, "dim_head": 4}
    theirs = FeedbackTransformer(**sizes, mem_len=span, seq_len=1)
    for _, forward in theirs.layers:
        forward.fn.fn = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    theirs = theirs.double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    ours = build(norm="pre", bias=True, position="none", span=span, normed_memory=False)
    # theirs has a norm for the queries of each layer
    for block in ours.blocks[1:]:
        assert block.norms[0] is not ours.blocks[0].norms[0]
    with torch.no_grad():
        ours.embedding.weight.copy_(theirs.token_emb.weight / math.sqrt(16))
        ours.mixing.copy_(theirs.layer_weight)
        ours.norm.load_state_dict(theirs.to_logits[0].state_dict())
        for block, (attend, forward) in zip(ours.blocks, theirs.layers, strict=True):
            other = attend.fn.fn.fn
            weights = (other.to_q.weight, *other.to_kv.weight.chunk(2))
            for name, weight in zip("qkv", weights, strict=True):
                block.attention.project[name].weight.copy_(weight)
                block.attention.project[name].bias.zero_()
            block.attention.output.load_state_dict(other.to_out.state_dict())
            for mine, its in zip(
                (block.feedforward.inner, block.feedforward.outer), (forward.fn.fn[0], forward.fn.fn[2]), strict=True
            ):
                mine.load_state_dict(its.state_dict())
            for mine, its in zip(block.norms, (attend.fn.fn.norm, forward.fn.norm), strict=True):
                mine.load_state_dict(its.state_dict())
    tokens, weight = ids(T=11), theirs.to_logits[1].weight
    x, z = ours.hidden(tokens).x @ weight.T, theirs(tokens) - theirs.to_logits[1].bias
    assert_close(x, z)
    toward = torch.randn_like(x)
    mine = torch.autograd.grad((x * toward).sum(), [ours.mixing, ours.blocks[0].feedforward.outer.weight])
    other = torch.autograd.grad((z * toward).sum(), [theirs.layer_weight, theirs.layers[0][1].fn.fn[2].weight])
    for a, b in zip(mine, other, strict=True):
        assert_close(a, b)


def test_layers_with_keys_of_their_own_are_labmls():
    """With positions: theirs has a vector for each head and distance, U^K, one for each head that joins the queries,
    U^Q, and a number for each head and distance in the place of U^Q . U^K, which it is here. Theirs makes keys and
    values of the memory without a norm, unlike the authors."""
    labml = importlib.import_module("labml_nn.transformers.feedback")
    feed = importlib.import_module("labml_nn.transformers.feed_forward").FeedForward
    torch.manual_seed(0)
    layer = labml.FeedbackTransformerLayer(
        d_model=16, attn=labml.FeedbackAttention(4, 16, 0.0), feed_forward=feed(16, 32, 0.0), dropout_prob=0.0
    )
    theirs = labml.FeedbackTransformer(layer, 3).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    options = {"shared": False, "normed_memory": False, "shared_position": False}
    ours = build(norm="pre", bias=True, position="shaw(distance=12, values=False, shared=False)", **options)
    with torch.no_grad():
        ours.mixing.copy_(theirs.weights)
        ours.norm.load_state_dict(theirs.norm.state_dict())
        for block, other in zip(ours.blocks, theirs.layers, strict=True):
            inside = other.attn
            joined = torch.einsum("hd,jhd->jh", inside.query_pos_bias, inside.key_pos_embeddings)
            inside.key_pos_bias.copy_(joined)
            # the last of theirs is one step back
            block.attention.position.key_table[:, :12] = inside.key_pos_embeddings[-12:].transpose(0, 1)
            for name, part in zip("qkv", (other.attn.query, other.attn.key, other.attn.value), strict=True):
                block.attention.project[name].weight.copy_(part.linear.weight)
                bias = inside.query_pos_bias.flatten() if name == "q" else part.linear.bias
                block.attention.project[name].bias.copy_(0 if bias is None else bias)
            pairs = (
                (block.attention.output, other.attn.output),
                (block.norms[0], other.norm_self_attn),
                (block.norms[1], other.norm_ff),
                (block.feedforward.inner, other.feed_forward.layer1),
                (block.feedforward.outer, other.feed_forward.layer2),
            )
            for mine, its in pairs:
                mine.load_state_dict(its.state_dict())
    tokens = ids(T=11)
    x = (ours.embedding(tokens) * math.sqrt(16)).transpose(0, 1)
    mine, other = ours.hidden(tokens).x, theirs(x).transpose(0, 1)
    assert_close(mine, other)
    toward = torch.randn_like(mine)
    got = torch.autograd.grad((mine * toward).sum(), [ours.mixing, ours.blocks[1].attention.project["k"].weight])
    expected = torch.autograd.grad((other * toward).sum(), [theirs.weights, theirs.layers[1].attn.key.linear.weight])
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b)
