"""The map: it gives the output, and no weight falls on padding or the future."""

import torch
from torch import Tensor
from torch.testing import assert_close

from regard.core.rows import Memory, Rows
from regard.layers.attention.base import Attention
from regard.layers.attention.projected import Projected
from regard.testing.cases import HEADS, LONG, Case, holes, inputs


def check_weights(case: Case) -> None:
    layer = case.build()
    given = inputs(case, B=6)
    keep = holes(LONG)
    masks = {"keep": keep}
    if case.role == "cross":
        masks["memory_keep"] = holes(21, seed=4)
    elif layer.facts.padding == "none":
        masks = {"keep": torch.ones_like(keep)}
        keep = masks["keep"]
    maps = layer.weights(**given, **masks)
    columns = masks.get("memory_keep", keep)
    assert maps.shape == (6, HEADS, LONG, columns.shape[1]) or layer.facts.columns == "slots"
    sums = maps.sum(-1).transpose(1, 2)
    assert not sums[~keep].any(), "a padded query has weights"
    if layer.facts.columns == "tokens":
        assert not maps.transpose(1, 3).transpose(2, 3)[~columns].any(), "weight on padding"
    seeing = keep & columns.any(1)[:, None]
    if layer.facts.signed:
        assert (sums[seeing] - 1).abs().max() > 1e-9 or (maps < 0).any(), "declared as signed, but it is not"
    else:
        assert (maps >= -1e-12).all()
        assert_close(sums[seeing], torch.ones_like(sums[seeing]))
    if layer.facts.columns == "slots":
        slots_hold(layer, given, masks, maps)
    x, rows, memory = given["x"], Rows.full(given["x"]), None
    if case.role == "cross":
        memory = Memory(given["memory"], None)
    # apply_map(V) = weights @ V for any V, of each head its own and wider than a head
    maps = layer.weights(**given)
    values = torch.randn(6, HEADS, maps.shape[3], layer.shape.head_width + 3, dtype=x.dtype)
    assert_close(layer.apply_map(values, x, rows, memory=memory), maps @ values)
    if not isinstance(layer, Projected) or layer.facts.columns == "slots":
        return
    # attend(V) = weights @ V for any V put in the place of every value
    query, source = layer.project_inputs(x, rows, memory)
    values = {n: torch.randn_like(source[layer.input_names("value")[0]]) for n in layer.input_names("value")[:1]}
    swapped = source | dict.fromkeys(layer.input_names("value"), next(iter(values.values())))
    nothing = source | {n: torch.zeros_like(source[n]) for n in layer.input_names("value")}
    o = (
        layer.attend_projected(rows, query, swapped, None, memory)[0]
        - layer.attend_projected(rows, query, nothing, None, memory)[0]
    )
    v = next(iter(values.values())).repeat_interleave(HEADS // layer.shape.kv_heads, 1)
    if not layer.facts.linear:
        assert (maps @ v - o).abs().max() > 1e-9, "declared as more than its map, but it is the map times the values"
        return
    assert_close(maps @ v, o)
    if case.role == "causal" and hasattr(layer, "probe_self_state"):
        _, state = layer.extend(x[:, :20], layer.start(6))
        late = layer.weights(x[:, 20:], state=state)
        assert_close(late, maps[:, :, 20:])
        y, _ = layer.extend(x[:, 20:], state)
        assert_close(y, layer(x)[:, 20:])
        # after prompts of different length, each row as if alone
        prompt = torch.arange(20) < torch.tensor([20, 3, 11, 1, 7, 16])[:, None]
        _, state = layer.extend(x[:, :20], layer.start(6), keep=prompt)
        late = layer.weights(x[:, 20:], state=state)
        for row in range(6):
            own = torch.cat([x[row : row + 1, :20][:, prompt[row]], x[row : row + 1, 20:]], 1)
            n = own.shape[1]
            assert_close(late[row : row + 1, :, :, :n], layer.weights(own)[:, :, n - LONG + 20 :])
    if case.role == "cross" and hasattr(layer, "attend"):
        state = layer.start(6, memory=given["memory"])
        assert_close(layer.weights(x, state=state), maps)


def slots_hold(layer: Attention, given: dict[str, Tensor], masks: dict[str, Tensor], maps: Tensor) -> None:
    """A map over slots: each row as if alone, nothing on slots of padding only, and the output is map times slots."""
    for row in range(len(maps)):
        own = {"x": given["x"][row : row + 1, masks["keep"][row]]}
        if "memory" in given:
            own["memory"] = given["memory"][row : row + 1, masks["memory_keep"][row]]
        got = maps[row, :, masks["keep"][row]]
        slots = 0
        if all(tensor.shape[1] for tensor in own.values()):
            alone = layer.weights(**own)[0]
            slots = alone.shape[2]
            assert_close(got[..., :slots], alone)
        assert not got[..., slots:].any(), "weight on slots of padding"
    x, memory = given["x"], Memory(given["memory"], None) if "memory" in given else None
    if isinstance(layer, Projected):
        o = layer.attend_projected(Rows.full(x), *layer.project_inputs(x, Rows.full(x), memory), None, memory)[0]
        assert_close(layer.weights(**given) @ layer.slots(x, memory=memory), o)
    if layer.shape.role == "causal":
        _, state = layer.extend(x[:, :20], layer.start(len(x)))
        late, whole = layer.weights(x[:, 20:], state=state), layer.weights(x)[:, :, 20:]
        # a state may have room for a slot that is not finished yet
        slots = min(late.shape[3], whole.shape[3])
        assert_close(late[..., :slots], whole[..., :slots])
        assert not late[..., slots:].any()
