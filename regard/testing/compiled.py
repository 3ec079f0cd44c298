"""torch.compile in few graphs, and torch.export."""

import torch
from torch import Tensor
from torch.testing import assert_close

from regard.core.rows import Memory, Rows
from regard.layers.attention.base import Attention
from regard.testing.cases import LONG, Case, holes, inputs, refused


def check_compile(case: Case) -> None:
    graphs = []

    def counter(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    layer = case.build()
    run = torch.compile(layer.forward_packed, backend=counter, fullgraph=True)
    given = inputs(case)
    memory = Memory(given["memory"], torch.tensor([21, 5, 9])) if case.role == "cross" else None
    rows = Rows(torch.zeros(3, dtype=torch.long), torch.tensor([LONG, 9, 17]), LONG, None)
    x = given["x"].requires_grad_()
    got, y = run(x, rows, memory=memory).y, layer.forward_packed(x, rows, memory=memory).y
    assert_close(got, y)
    assert_close(torch.autograd.grad(got.square().sum(), x), torch.autograd.grad(y.square().sum(), x))
    assert len(graphs) == 1
    if case.role == "causal":
        graphs.clear()
        torch._dynamo.reset()
        with torch.no_grad():
            _, state = layer.extend(given["x"][:, :7], layer.start(3, capacity=LONG))
            for t in range(7, 14):
                x = given["x"][:, t : t + 1]
                rows = Rows(state.progress.length, torch.ones(3, dtype=torch.long), 1, state.progress.longest)
                y, state, *_ = run(x, rows, state=state)
                assert_close(y, layer(given["x"][:, : t + 1])[:, t:])
        assert len(graphs) <= 2, f"{len(graphs)} graphs for the steps of one decoding"


def check_export(case: Case) -> None:
    """One exported program for all lengths, with and without padding, of PyTorch's own operators; or, declared, only
    one of a fixed length."""
    layer = case.build()
    dynamic = layer.facts.dynamic_length
    if not dynamic:
        with refused("dynamic length"):
            exported(layer, case, False)
    for padded in (False, True)[: 1 + (dynamic and layer.facts.padding == "any")]:
        program = exported(layer, case, padded, dynamic)
        kinds = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        assert not [kind for kind in kinds if "regard" in kind], "it cannot be loaded without Regard"
        run = program.module()
        for T in (37, 64, 129) if dynamic else (EXPORTED,):
            given = exported_inputs(case, T, padded)
            with torch.no_grad():
                assert_close(run(**given), layer(**given))


EXPORTED = 48  # tokens of the example that a program is recorded from


def exported(layer: Attention, case: Case, padded: bool, dynamic: bool = True) -> torch.export.ExportedProgram:
    """The program of a layer; the range of its lengths ends below the tables of those that have a longest input."""
    T, S = (torch.export.Dim(name, min=32, max=200) for name in "TS")
    given = exported_inputs(case, EXPORTED, padded)
    shapes = {name: {1: S if name.startswith("memory") else T} for name in given} if dynamic else None
    with torch.no_grad():
        return torch.export.export(layer, (), given, dynamic_shapes=shapes)


def exported_inputs(case: Case, T: int, padded: bool) -> dict[str, Tensor]:
    given = inputs(case, T, B=6, S=T + 3, seed=T)
    if padded:
        given["keep"] = holes(T)
        if case.role == "cross":
            given["memory_keep"] = holes(T + 3, seed=4)
    return given
