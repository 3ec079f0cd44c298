"""CoCa: against the formulas in loops, what may see what, decoding step by step, and sizes."""

import pytest
import torch
from lengths import KEEP, VOCABULARY, embedded, gelu, ids, linear, norm, shaken
from torch.testing import assert_close

from regard.core.state import select
from regard.decoding import DecodingConfig, caption, captured, greedy
from regard.models.registry import presets
from regard.models.vision.coca import Coca, CocaConfig
from regard.spec import ATTENTION
from regard.training.loss import caption_loss, contrastive_loss

FORMS = [{}, {"pooling": "parallel", "queries": 1}, {"norm": "post", "position": "rotary"}]
ROLES = {"attention": "self", "decoder_attention": "causal", "cross_attention": "cross", "pooling_attention": "cross"}


def build(**options) -> Coca:
    sizes = {"width": 16, "heads": 4, "inner": 24, "layers": 2, "text_layers": 2, "decoder_layers": 2, "dropout": 0.0}
    torch.manual_seed(0)
    image = {"image": (8, 12), "patch": 4, "queries": 5, "vocabulary": VOCABULARY}
    return shaken(Coca(CocaConfig(**(sizes | image | options))))


def pictures(B: int = 4, seed: int = 2, sides: tuple[int, int] = (8, 12)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, 3, *sides, generator=generator, dtype=torch.float64)


def everywhere(name: str) -> dict[str, str]:
    """The options that name a mechanism, wherever it takes the role."""
    cls = ATTENTION.find(name)
    # a window, which the first example of heads(...) has, has no meaning between two sequences
    spec, cross = cls.examples[0], "heads(linear, softmax)" if name == "heads" else cls.examples[0]
    specs = {option: cross if role == "cross" else spec for option, role in ROLES.items()}
    return {option: spec for option, spec in specs.items() if ROLES[option] in cls.facts.roles}


class Batch:
    def __init__(self, images, tokens, keep=None):
        self.images, self.tokens, self.keep = images, tokens, keep
        self.target = tokens.roll(-1, 1)


class Loops:
    """One picture and one caption, layer by layer and vector by vector."""

    def __init__(self, model: Coca):
        self.model = model

    def layer(self, block, x, memory=None):
        parts = [block.attention.reference]
        parts += [] if memory is None else [lambda read: block.cross.reference(read, memory)]
        feed = block.feedforward
        parts.append(lambda read: torch.stack([linear(gelu(linear(v, feed.inner)), feed.outer) for v in read]))
        for part, layer_norm in zip(parts, block.norms, strict=True):
            if block.pre:
                x = x + part(torch.stack([norm(v, layer_norm) for v in x]))
            else:
                x = torch.stack([norm(v, layer_norm) for v in x + part(x)])
        return x

    def pool(self, pooler, x):
        keys = torch.stack([norm(vector, pooler.memory_norm) for vector in x])
        queries = torch.stack([norm(vector, pooler.query_norm) for vector in pooler.queries])
        return torch.stack([norm(vector, pooler.norm) for vector in pooler.attention.reference(queries, keys)])

    def __call__(self, image, row):
        """Logits, and the vectors of picture and caption."""
        model, cls = self.model, torch.tensor([VOCABULARY])
        final = norm if model.config.norm == "pre" else lambda vector, layer: vector
        patches = model.encoder.encode(image[None]).x[0]
        pooled = self.pool(model.pooler, patches)
        vector = self.pool(model.vector_pooler, pooled if model.config.pooling == "cascade" else patches)[0]
        x = embedded(model.text.embedding, model.text.position, torch.cat([row, cls]))
        for block in model.text.blocks:
            x = self.layer(block, x)
        text, x = final(x[-1], model.text_norm), x[:-1]
        for block in model.decoder:
            x = self.layer(block, x, pooled)
        logits = torch.stack([linear(final(vector, model.norm), model.output) for vector in x])
        return logits, vector / vector.norm(), text / text.norm()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_formula(form):
    model, images, tokens = build(**form), pictures(), ids()
    found = model.read(images, tokens, keep=KEEP)
    logits = model(images, tokens, keep=KEEP).logits
    for row in range(len(tokens)):
        expected, picture, text = Loops(model)(images[row], tokens[row, KEEP[row]])
        assert_close(logits[row, KEEP[row]], expected)
        assert_close(model.output(found.words.x)[row, : len(expected)], expected)
        assert_close(found.pictures[row], picture)
        assert_close(found.captions[row], text)
    assert not logits[~KEEP].any()
    assert_close(model.picture_vectors(images), found.pictures)
    assert_close(model.caption_vectors(tokens, keep=KEEP), found.captions)


def test_padding_changes_nothing():
    model, images, tokens = build(), pictures(), ids()
    whole, read = model(images, tokens, keep=KEEP).logits, model.read(images, tokens, keep=KEEP)
    for fill in (0, 7, VOCABULARY - 1):
        other = torch.where(KEEP, tokens, fill)
        assert torch.equal(model(images, other, keep=KEEP).logits, whole)
        assert torch.equal(model.read(images, other, keep=KEEP).captions, read.captions)


def test_the_picture_changes_no_vector_of_a_caption():
    model, tokens = build(), ids()
    one, other = (model.read(pictures(seed=seed), tokens, keep=KEEP) for seed in (2, 3))
    assert torch.equal(one.captions, other.captions)
    assert not torch.allclose(one.pictures, other.pictures)
    assert not torch.allclose(one.words.x, other.words.x)


def test_a_caption_changes_no_vector_of_a_picture():
    model, images = build(), pictures()
    assert torch.equal(model.read(images, ids(seed=1)).pictures, model.read(images, ids(seed=2)).pictures)


@pytest.mark.parametrize("place", range(11))
def test_words_see_what_is_before_them_and_cls_sees_all(place):
    model, images, tokens = build(), pictures(), ids()
    other = tokens.clone()
    other[:, place] = (tokens[:, place] + 1) % VOCABULARY
    one, two = (model.read(images, part) for part in (tokens, other))
    assert torch.equal(one.words.x[:, :place], two.words.x[:, :place])
    assert (one.words.x[:, place:] != two.words.x[:, place:]).any(2).all()
    assert (one.captions != two.captions).any(1).all()


def test_cls_is_seen_by_no_word():
    model, images, tokens = build(), pictures(), ids()
    before = model.read(images, tokens, keep=KEEP)
    with torch.no_grad():
        model.text.embedding.weight[VOCABULARY] += torch.linspace(-1, 1, 16) ** 2
    after = model.read(images, tokens, keep=KEEP)
    real = torch.arange(11) < KEEP.sum(1, keepdim=True)
    assert torch.equal(before.words.x[real], after.words.x[real])
    assert not torch.allclose(before.captions, after.captions)


@pytest.mark.parametrize("cuts", [[1] * 11, [4, 1, 1, 5], [11]])
def test_steps_are_the_whole(cuts):
    model, images, tokens = build(), pictures(), ids()
    state = model.start(4, memory=model.encode(images), capacity=11)
    parts = []
    for part in tokens.split(cuts, 1):
        logits, state = model.extend(part, state)
        parts.append(logits)
    assert_close(torch.cat(parts, 1), model(images, tokens).logits)


def test_beams_share_a_picture_and_rows_can_be_selected():
    model, images, tokens = build(), pictures(2), ids()
    memory, order = model.encode(images), torch.tensor([3, 3, 0])
    state = model.start(4, memory=memory)
    logits, state = model.extend(tokens[:, :5], state, keep=KEEP[:, :5])
    doubled = images.repeat_interleave(2, 0)
    for row in range(4):
        real = KEEP[row, :5]
        assert_close(logits[row, real], model(doubled[row : row + 1], tokens[row : row + 1, :5][:, real]).logits[0])
    alone = model.start(4, memory=model.encode(doubled))
    _, alone = model.extend(tokens[:, :5], alone)
    picked, _ = model.extend(tokens[order, 5:6], select(alone, order))
    assert_close(picked, model(doubled[order], tokens[order, :6]).logits[:, 5:])


@torch.inference_mode()
def test_captions_are_decoded_from_the_picture():
    model, images = build(), pictures()
    for row, [best] in enumerate(caption(model, images, DecodingConfig(beam=1, maximum=6))):
        ids = [2]
        while len(ids) < 7:
            logits = model(images[row : row + 1], torch.tensor([ids])).logits[0, -1]
            logits[[0, 2, *([3] if len(ids) == 1 else [])]] = -torch.inf
            if (token := int(logits.argmax())) == 3:
                break
            ids.append(token)
        assert best.ids == ids[1:]
    for row, hypotheses in enumerate(caption(model, images, DecodingConfig(beam=4, nbest=4, maximum=6))):
        for part in hypotheses:
            # the probability of a caption is that of the whole model
            logp = model(images[row : row + 1], torch.tensor([[2, *part.ids]])).logits[0].log_softmax(-1)
            targets = [*part.ids, 3] if part.finished else part.ids
            assert sum(float(logp[t, token]) for t, token in enumerate(targets)) == pytest.approx(part.logprob)


def test_a_drawn_caption_depends_on_the_seed_and_the_picture():
    model, images = build(), pictures()
    config = DecodingConfig(sample=True, nbest=2, maximum=6)
    drawn, alone = caption(model, images, config), caption(model, images[1:2], config)
    assert [part.ids for part in alone[0]] == [part.ids for part in drawn[1]]
    other = caption(model, images[1:2], DecodingConfig(sample=True, nbest=2, maximum=6, seed=1))
    assert [part.ids for part in other[0]] != [part.ids for part in drawn[1]]


@torch.inference_mode()
def test_a_step_over_a_state_of_fixed_size_writes_the_same():
    """As on a GPU, where a step is captured as a CUDA graph and replayed."""
    model, images = build(), pictures()
    limits, config = [20] * 4, DecodingConfig(beam=1, maximum=20)
    found = []
    for search in (greedy.search_greedily, captured.search_greedily):
        state = model.start(4, memory=model.encode(images), capacity=21)
        logits, state = model.extend(torch.full((4, 1), 2), state)
        more = {"capture": lambda work: work} if search is captured.search_greedily else {}
        found.append(search(model, logits[:, -1], state, limits, config, 3, (0, 2), None, **more).lists())
    assert [[part.ids for part in row] for row in found[0]] == [[part.ids for part in row] for row in found[1]]


@pytest.mark.parametrize("name", ATTENTION.names())
def test_any_attention(name):
    """It is built, learns, and where its past does not depend on what comes, its steps are the whole."""
    # a grid of 4 x 6, the width that an example names
    model, images, tokens = build(**everywhere(name), image=(16, 24)), pictures(sides=(16, 24)), ids()
    logits = model(images, tokens).logits
    if ATTENTION.find(name).facts.prefix_invariant:
        state = model.start(4, memory=model.encode(images))
        first, state = model.extend(tokens[:, :6], state)
        assert_close(torch.cat([first, model.extend(tokens[:, 6:], state)[0]], 1), logits)
    model.train()
    loss = caption_loss(model, Batch(images, tokens, KEEP))
    (loss.total if loss.auxiliary_loss is None else loss.total + loss.auxiliary_loss).backward()
    assert not [name for name, part in model.named_parameters() if part.grad is None]
    assert all(part.grad.isfinite().all() for part in model.parameters())


class TestLoss:
    def test_contrastive_by_hand(self):
        """Two pictures and captions at angles whose cosines are known."""
        one, other = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.6, 0.8], [0.8, 0.6]])
        rows = [-0.6 * 5 + torch.logsumexp(torch.tensor([3.0, 4.0]), 0)] * 2
        assert_close(contrastive_loss(one, other, 5.0), sum(rows) / 2)

    def test_contrastive_formula(self):
        model, images, tokens = build(), pictures(), ids()
        found, scale = model.read(images, tokens, keep=KEEP), model.scale()
        total = 0.0
        for row in range(4):
            scores = [scale * found.pictures[row] @ found.captions[other] for other in range(4)]
            total = total - torch.log(torch.exp(scores[row]) / sum(map(torch.exp, scores)))
            scores = [scale * found.captions[row] @ found.pictures[other] for other in range(4)]
            total = total - torch.log(torch.exp(scores[row]) / sum(map(torch.exp, scores)))
        assert_close(contrastive_loss(found.pictures, found.captions, scale), total / 8)

    @pytest.mark.parametrize("keep", [None, KEEP])
    def test_is_a_weighted_sum(self, keep):
        """Per word: twice the cross entropy of the words plus the contrastive loss."""
        model, batch = build(), Batch(pictures(), ids(), keep)
        found, read = caption_loss(model, batch), model.read(batch.images, batch.tokens, keep=keep)
        logp = model(batch.images, batch.tokens, keep=keep).logits.log_softmax(-1)
        missed = -logp.gather(2, batch.target[..., None])[..., 0]
        words = missed.mean() if keep is None else missed[keep].mean()
        contrast = contrastive_loss(read.pictures, read.captions, model.scale())
        count = 44 if keep is None else int(keep.sum())
        assert int(found.tokens) == count
        assert_close(found.plain / count, words)
        assert_close(found.total / count, 2 * words + contrast)
        assert_close(found.statistics["contrastive.loss"], contrast)
        other = caption_loss(model, batch, captioning=0.5, contrastive=3.0)
        assert_close(other.total / count, 0.5 * words + 3 * contrast)

    def test_every_parameter_learns(self):
        model = build()
        caption_loss(model, Batch(pictures(), ids(), KEEP)).total.backward()
        assert not [name for name, part in model.named_parameters() if part.grad is None or not part.grad.any()]

    def test_scale_begins_at_a_temperature_and_is_bounded(self):
        model = Coca(build().config)  # as it begins
        assert_close(model.scale(), torch.tensor(1 / 0.07))
        with torch.no_grad():
            model.log_scale.fill_(9.0)
        model.scale().backward()
        assert_close(model.scale(), torch.tensor(100.0))
        assert_close(model.log_scale.grad, torch.tensor([100.0]))  # so that training can lead back


class TestMaps:
    def test_words_look_at_patches_through_the_queries(self):
        model, images, tokens = build(), pictures(), ids()
        cross, [pooler] = (model.maps(images, tokens, keep=KEEP, place=place) for place in ("cross", "pooler"))
        assert [part.shape for part in cross] == [(4, 4, 11, 5)] * 2
        assert pooler.shape == (4, 4, 5, 6)
        for part, made in zip(cross, model.maps(images, tokens, keep=KEEP), strict=True):
            expected = torch.zeros(4, 4, 11, 6, dtype=torch.float64)
            for query in range(5):
                for head in range(4):
                    expected += part[..., query, None] * pooler[:, head, query][:, None, None] / 4
            assert_close(made, expected)
            assert_close(made.sum(-1), KEEP[:, None].expand(-1, 4, -1).double())

    def test_places(self):
        model, images, tokens = build(), pictures(), ids()
        text = model.maps(images, tokens, keep=KEEP, place="text")
        assert [part.shape for part in text] == [(4, 4, 12, 12)] * 2
        for row, count in enumerate(KEEP.sum(1).tolist()):
            # [CLS] is behind the last word; it sees every word and itself, and nothing behind
            assert (text[0][row, :, count, : count + 1] > 0).all()
            assert not text[0][row, :, count, count + 1 :].any()
            assert not text[0][row, :, :count, count:].any()
        decoder = model.maps(images, tokens, keep=KEEP, place="decoder")
        assert [part.shape for part in decoder] == [(4, 4, 11, 11)] * 2
        assert not decoder[0][:, :, :, ~KEEP[0]][0].any()
        assert [part.shape for part in model.maps(images, place="encoder")] == [(4, 4, 6, 6)] * 2

    def test_refusals(self):
        with pytest.raises(ValueError, match="need the ids of captions"):
            build().maps(pictures(), place="cross")
        with pytest.raises(ValueError, match="compresses its keys to slots"):
            build(cross_attention="compressed(factor=3)").maps(pictures(), ids())
        with pytest.raises(ValueError, match="a recorder takes those of 'cross' and 'pooler'"):
            build().maps(pictures(), ids(), recorder=lambda layer, *arguments, **options: None)


@pytest.mark.parametrize(
    ("name", "image", "text", "poolers"),
    [
        # 24 blocks of 12 E^2 + 13 E, 12 attentions to the picture of 4 E^2 + 6 E, two matrices 64,000 E: as printed in
        # the paper, 86 + 297 = 383 and 303 + 484 = 787 million. [CLS] is one more row, two norms stand at the ends, and
        # the poolers are not counted there.
        ("coca-base", 85_999_872, 296_779_776 + 768, 4_931_328),
        ("coca-large", 303_569_920, 483_786_752 + 1024, 8_672_256),
    ],
)
def test_published_sizes(name, image, text, poolers):
    with torch.device("meta"):
        model = Coca(presets("caption")[name].form.config(**presets("caption")[name].values))
    parts = {
        image: (model.encoder,),
        text: (model.text, model.decoder, model.output),
        poolers: (model.pooler, model.vector_pooler),
        4 * model.config.width: (model.text_norm, model.norm),
        1: (),
    }
    for expected, modules in parts.items():
        assert not modules or expected == sum(part.numel() for module in modules for part in module.parameters())
    assert sum(parts) == sum(part.numel() for part in model.parameters())
    assert round((image + text) / 1e6) == {"coca-base": 383, "coca-large": 787}[name]


def test_stochastic_depth_is_that_of_the_image_encoder():
    model = build(layers=3, drop_path=0.4)
    assert_close(torch.tensor([block.drop_path.p for block in model.encoder.blocks]), torch.tensor([0.0, 0.2, 0.4]))
    assert not any(block.drop_path.p for block in [*model.text.blocks, *model.decoder])


def test_positions_of_words_may_be_bounded():
    """By the table of any layer that reads words, not by that of the patches."""
    assert build().max_words() is None
    model = build(position="learned(longest=7)")
    assert model.max_words() == 6
    assert model.read(pictures(), ids()[:, :6]).captions.shape == (4, 16)
    with pytest.raises(ValueError, match="7"):
        model.read(pictures(), ids()[:, :7])


class TestRefusals:
    def test_config(self):
        with pytest.raises(ValueError, match="kind must be 'coca'"):
            CocaConfig(kind="vit")
        with pytest.raises(ValueError, match=r"image must be height and width in pixels.*got 64"):
            CocaConfig(image=64)
        with pytest.raises(ValueError, match="not cut into patches of 5 x 5 without a rest"):
            build(patch=5)

    def test_inputs(self):
        model, images, tokens = build(), pictures(), ids()
        with pytest.raises(ValueError, match="images has 3 rows and tokens 4"):
            model(images[:3], tokens)
        with pytest.raises(ValueError, match="token id 50 is not in the vocabulary, which has the ids 0 to 49"):
            model(images, torch.full_like(tokens, VOCABULARY))
        with pytest.raises(ValueError, match="a captioner needs memory"):
            model.start(4)
        with pytest.raises(ValueError, match="serves a multiple of them, not a batch of 3"):
            model.start(3, memory=model.encode(images[:2]))
        with pytest.raises(ValueError, match="tokens have 4 rows and the state 2"):
            model.extend(tokens, model.start(2, memory=model.encode(images[:2])))
        with pytest.raises(ValueError, match="expected the state of this model"):
            model.extend(tokens, None)
        with pytest.raises(ValueError, match="images must be fractions"):
            caption(model, tokens)
        with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
            caption(model.train(), images)
