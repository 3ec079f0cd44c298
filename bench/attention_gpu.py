"""Our attention kernels on a GPU and public ones, in one run: milliseconds forward / forward + backward.

    python bench/attention_gpu.py                      # patterns, scans and layers
    python bench/attention_gpu.py patterns --lengths 65536
    python bench/attention_gpu.py layers --only performer efficient --seconds 60 --json layers.json
    python bench/attention_gpu.py layers --workers 12 --lengths 1024 2048 4096 8192 16384 65536 --json layers.json
    python bench/attention_gpu.py patterns scans --graphs       # replays of CUDA graphs: without the time of the host
    python bench/attention_gpu.py scans --dtype float32         # cuDNN and flash have no float32, and are omitted
    python bench/attention_gpu.py launches --lengths 16384      # other tiles, warps, stages and registers
    python bench/attention_gpu.py profile --lengths 65536       # microseconds of each kernel, by PyTorch's profiler
    ncu --profile-from-start off --clock-control none --section SpeedOfLight --section Occupancy --section \\
        WarpStateStats python bench/attention_gpu.py counters --lengths 4096 16384     # what bounds window and scan

65,536 tokens in all and width 1,024, so 16 heads of 64. The floor reads q, k, v and writes o once at the measured
bandwidth; the backward pass moves about twice as much again. "ratio" is the best rival's time over ours, so above 1 we
are faster. A layer's forward pass is that of inference, in eval mode; the backward one is that of training. Role
"cross" reads a memory as long as the queries. --workers compiles the kernels of all layers in several processes first,
each layer called once at every length; Triton keeps what they compile on disk, and the timing compiles nothing.
"""

import argparse
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard
from regard.kernels import parts_triton, runs, scan
from regard.kernels import scan_triton_cut as cuts
from regard.kernels.parts_triton import Tile
from regard.kernels.runs import Bound, Far, Pass, Where

TOKENS, HEADS, WIDTH = 65536, 16, 64
SMALL = 512  # tokens of --small
GRAPHS = False  # --graphs
DTYPE = torch.bfloat16  # --dtype
SLOW = 1000.0  # milliseconds: a layer that takes longer is not measured at greater lengths
Times = tuple[float, float]  # forward, forward + backward
RESULTS: dict[str, Times | None] = {}  # all that was timed, by section, row, length and column


def milliseconds(function: Callable[[], object], repeats: int = 10, warmup: int = 3) -> float:
    """The median of several calls, after a few to warm up."""
    for _ in range(warmup):
        function()
    if GRAPHS:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        function = graph.replay
        function()
    if not torch.cuda.is_available():
        clock = [time.perf_counter()]
        for _ in range(repeats):
            function()
            clock.append(time.perf_counter())
        return 1e3 * statistics.median(b - a for a, b in itertools.pairwise(clock))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        function()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def heads(length: int, width: int = WIDTH) -> list[Tensor]:
    """q, k, v and the gradient of the output, [B, H, N, D], in the memory layout of projections split into heads."""
    size = (TOKENS // length, length, HEADS * WIDTH // width, width)
    return [torch.randn(size, device=device(), dtype=DTYPE).transpose(1, 2) for _ in range(4)]


def timed(attend: Callable[[Tensor, Tensor, Tensor], Tensor], length: int, width: int = WIDTH) -> Times | None:
    q, k, v, grad = heads(length, width)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    try:
        with torch.no_grad():
            forward = milliseconds(lambda: attend(q, k, v))
        both = milliseconds(lambda: torch.autograd.grad(attend(q, k, v), leaves, grad))
    except Exception as error:  # a kernel that fails, whatever at, leaves the others their time
        print(f"  (omitted: {str(error)[:100]!r})")
        return None
    return forward, both


def bandwidth() -> float:
    """Bytes per millisecond of a large copy, read and written."""
    x = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    y = torch.empty_like(x)
    return 2 * x.numel() / milliseconds(lambda: y.copy_(x))


def flex(sees: Callable[[Tensor, Tensor], Tensor], length: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Compiled FlexAttention with a block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # each mask is compiled again with and without gradients
    torch._dynamo.config.recompile_limit = 1000
    # each pattern is a graph of its own, and dynamo gives up after a few
    torch._dynamo.reset()
    mask = create_block_mask(lambda b, h, i, j: sees(i, j), None, None, length, length, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def sdpa(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """All earlier keys: the cost that a pattern saves."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def global_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Longformer: a window of 256 to each side and 16 tokens that see all and are seen by all."""
    near = Pass(Bound(plus=-256), Bound(plus=257), Far(16))
    return runs.attend(q, k, v, [near], where=Where(first=16), unbounded=16)


def over(*passes: Pass) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: runs.attend(q, k, v, passes)


def fixed(length: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The Sparse Transformer's: blocks of 128, and the last 8 tokens of each earlier one."""
    block, summaries = Bound(every=128, times=128), Far(length // 128 * 8, Bound(every=128, times=8), 120, 8, 128)
    return over(Pass(block, Bound(plus=1), summaries))


def with_far_keys(length: int) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    return {"window 256 + 16 global": global_rows, "sparse fixed 128, 8, causal": fixed(length)}


def patterns(lengths: list[int], asked: "Asked") -> None:
    """Windows, global tokens and the patterns of the Sparse Transformer, compared with FlexAttention."""
    rate = bandwidth()
    floor = 4 * TOKENS * HEADS * WIDTH * DTYPE.itemsize / rate
    print(f"\npatterns: copy {rate / 1e9:.2f} TB/s, floor {floor:.3f} / {3 * floor:.3f} ms\n")
    print(f"{'pattern':28}{'N':>7}  {'ours':>15}  {'flex':>15}  {'cuDNN, all':>15}  {'flash, all':>15}  {'ratio':>11}")

    for N in lengths:
        rows = {
            "window 256, causal": (over(Pass(Bound(plus=-256), Bound(plus=1))), lambda i, j: (j <= i) & (i - j <= 256)),
            "window 256, both sides": (
                over(Pass(Bound(plus=-256), Bound(plus=257))),
                lambda i, j: (i - j <= 256) & (j - i <= 256),
            ),
            "window 256 + 16 global": (
                global_rows,
                lambda i, j: ((i - j <= 256) & (j - i <= 256)) | (i < 16) | (j < 16),
            ),
            "sparse strided 128, causal": (
                over(Pass(Bound(plus=-127), Bound()), Pass(high=Bound(plus=1), fold=128)),
                lambda i, j: (j <= i) & ((i - j <= 128) | ((i - j) % 128 == 0)),
            ),
            "sparse fixed 128, 8, causal": (
                fixed(N),
                lambda i, j: (j <= i) & ((i // 128 == j // 128) | (j % 128 >= 120)),
            ),
        }
        whole = [timed(sdpa(backend), N) for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)]
        for name, (ours, sees) in rows.items():
            if not asked.wants(name):
                continue
            mine, theirs = timed(ours, N), timed(flex(sees, N), N)
            for who, times in (("ours", mine), ("flex", theirs)):
                asked.record(f"patterns, {name}, {N}, {who}", times)
            rivals = [times for times in (theirs, *whole) if times is not None]
            ratio = [min(times[i] for times in rivals) / mine[i] for i in range(2)] if mine and rivals else (0, 0)
            cells = "".join(f"  {shown(times):>15}" for times in (mine, theirs, *whole))
            print(f"{name:28}{N:>7}{cells}  {ratio[0]:>5.2f}/{ratio[1]:.2f}", flush=True)


LAYERS = {
    "causal": (
        "local(window=256)",
        "longformer(window=256, globals=16)",
        "globals(tokens=16)",
        "strided(stride=128)",
        "sparse(stride=128)",
        "sparse(pattern='fixed', stride=128, summary=8)",
        "image",
        "poolingformer",
        "longshort",
        "axial(width=128)",
        "xl",
        "compressive",
        "linear",
        "performer",
        "rfa",
        "rfa(gate=True)",
        "efficient",
        "reformer",
        "routing(clusters=128)",
        "sinkhorn(block=128, longest={length})",
        "luna",
        "compressed",
        "scaling",
        "synthesizer(longest={length})",
        "entmax",
    ),
    "self": (
        "local(window=256)",
        "longformer(window=256, globals=16)",
        "globals(tokens=16)",
        "strided(stride=128)",
        "sparse(stride=128)",
        "sparse(pattern='fixed', stride=128, summary=8)",
        "bigbird",
        "etc",
        "image",
        "poolingformer",
        "longshort",
        "axial(width=128)",
        "linear",
        "performer",
        "rfa",
        "efficient",
        "reformer",
        "routing(clusters=128)",
        "routing(clusters=128, shared=False)",
        "clusterformer",
        "clustered",
        "sinkhorn(block=128, longest={length})",
        "nystrom",
        "luna",
        "set",
        "linformer(rank=256, longest={length})",
        "compressed",
        "scaling",
        "synthesizer(longest={length})",
        "entmax",
    ),
    "cross": (
        "linear",
        "performer",
        "rfa",
        "efficient",
        "routing(clusters=128)",
        "luna",
        "set",
        "linformer(rank=256, longest={length})",
        "compressed",
        "synthesizer(longest={length})",
        "entmax",
    ),
}
# that have no kernels of ours to be compiled first
UNCOMPILED = ("softmax", "scaling", "synthesizer")


class LayerRow(NamedTuple):
    """A layer of the table; "{length}" in the spec stands for the length of the rows."""

    role: str
    pattern: str


def layer_rows(asked: "Asked") -> list[LayerRow]:
    """All that are asked for, each role's softmax first."""
    return [
        LayerRow(role, pattern)
        for role, patterns in LAYERS.items()
        for pattern in ("softmax", *patterns)
        if pattern == "softmax" or asked.names(f"{role} {pattern}")
    ]


def layers(lengths: list[int], asked: "Asked") -> None:
    """Whole layers with their projections, compared with the softmax layer of the same length ("ratio")."""
    ratios: dict[LayerRow, list[tuple[int, Times]]] = {}
    base: dict[tuple[str, int], Times | None] = {}
    rows = layer_rows(asked)
    if asked.workers:
        compile_layers(rows, lengths, asked)
    print(f"\n{'layer':56}{'role':>8}{'N':>7}  {'ours':>15}  {'ratio':>11}")
    for row in rows:
        for N, times in measured(row, lengths, asked):
            spec = row.pattern.format(length=N)
            asked.record(f"layers, {row.role} {spec}, {N}, ours", times)
            if row.pattern == "softmax":
                base[row.role, N] = times
            softmax = base[row.role, N]
            if times is None or softmax is None:
                continue
            ratio = softmax[0] / times[0], softmax[1] / times[1]
            ratios.setdefault(row, []).append((N, ratio))
            print(f"{spec:56}{row.role:>8}{N:>7}  {shown(times):>15}  {ratio[0]:>5.2f}/{ratio[1]:.2f}", flush=True)
    if len(lengths) > 1:
        crossovers(ratios)


def crossovers(ratios: dict[LayerRow, list[tuple[int, Times]]]) -> None:
    """The shortest length from which a layer is faster than softmax, forward and with backward, and stays so."""
    print(f"\n{'layer':56}{'role':>8}  crossover")
    for (role, pattern), found in ratios.items():
        slower = [N for N, ratio in found if min(ratio) <= 1]
        faster = [N for N, _ in found if max(slower, default=0) < N]
        print(f"{pattern:56}{role:>8}  {min(faster) if faster else '-'}")


def compile_layers(rows: list[LayerRow], lengths: list[int], asked: "Asked") -> None:
    """Calls each layer once at every length, several layers at a time, for what Triton then finds on disk. It takes at
    most half of the time that is left; layers that are not ready by then are compiled when they are timed."""
    until, began = (time.monotonic() + asked.end) / 2, time.monotonic()
    jobs = [(row, tuple(lengths)) for row in rows if not row.pattern.startswith(UNCOMPILED)]
    processes = min(asked.workers, max(1, len(jobs)))
    pool = multiprocessing.get_context("spawn").Pool(processes, shrink if TOKENS == SMALL else None)
    done = pool.imap_unordered(call_once, jobs)
    for count in range(len(jobs)):
        try:
            print(f"compiled {next_within(done, until)}", flush=True)
        except multiprocessing.TimeoutError:
            print(f"compiled {count} of {len(jobs)} layers when the time for it was over", flush=True)
            break
    pool.terminate()
    pool.join()
    print(f"compiling took {time.monotonic() - began:.0f} s", flush=True)


def next_within(found: "multiprocessing.pool.IMapIterator[str]", until: float) -> str:
    return found.next(timeout=max(0.0, until - time.monotonic()))


def call_once(job: tuple[LayerRow, tuple[int, ...]]) -> str:
    row, lengths = job
    torch.set_num_threads(1)
    began = time.monotonic()
    for _ in measured(row, list(lengths), Asked([], 3600.0), once=True):
        if torch.cuda.is_available():
            # what it keeps, the other processes cannot have
            torch.cuda.empty_cache()
    return f"{row.role} {row.pattern}: {time.monotonic() - began:.0f} s"


def measured(
    row: LayerRow, lengths: list[int], asked: "Asked", once: bool = False
) -> Iterator[tuple[int, Times | None]]:
    """The times at each length, until the layer becomes too slow or the time is over; once: calls without timing."""
    layer = None
    for N in lengths:
        if not asked.has_time():
            return
        try:
            if layer is None or "{length}" in row.pattern:
                layer = None
                spec = row.pattern.format(length=N)
                layer = regard.attention(spec, width=HEADS * WIDTH, heads=HEADS, role=row.role)
                layer.to(device(), DTYPE)
            times = layer_times(layer, N, once)
        except Exception as error:  # a layer that fails, whatever at, leaves the others their time
            print(f"  ({row.role} {row.pattern} at {N} omitted: {str(error)[:100]!r})", flush=True)
            times = None
        yield N, times
        if times is not None and times[1] > SLOW and not once:
            return


def layer_times(layer: torch.nn.Module, length: int, once: bool) -> Times:
    size = (TOKENS // length, length, HEADS * WIDTH)
    x, memory = (torch.randn(size, device=device(), dtype=DTYPE, requires_grad=True) for _ in range(2))
    given = {"memory": memory} if layer.shape.role == "cross" else {}
    grad, leaves = torch.randn_like(x), [x, *given.values(), *layer.parameters()]
    many = {"repeats": 1, "warmup": 0} if once else {"repeats": 5, "warmup": 2}
    layer.eval()
    with torch.no_grad():
        forward = milliseconds(lambda: layer(x, **given), **many)
    if forward > SLOW and not once:
        many = {"repeats": 1, "warmup": 0}
    layer.train()
    both = milliseconds(lambda: torch.autograd.grad(layer(x, **given), leaves, grad, allow_unused=True), **many)
    return forward, both


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, of 256 tokens."""
    return runs.attend(q, k, v, [Pass(Bound(plus=-256), Bound(plus=1))])


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scan.attend_past(q, k, v, map="elu", final=False)[0]


def linear_both_ways(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scan.attend_sums(q, *scan.absorb(k, v, map="elu"), dtype=v.dtype, map="elu")


def einsum_both_ways(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return (q @ (k.mT @ v)) / (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True)


def fla(name: str, *, whole: bool, own: bool = False) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Flash linear attention, if it is installed; whole: with the feature map and the denominators, compiled, or with
    its own denominators."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from fla.ops import linear_attn

        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if not whole:
            return getattr(linear_attn, name)(q, k, v, scale=1.0, normalize=False)[0].transpose(1, 2)
        q, k = features(q), features(k)
        if own:
            return getattr(linear_attn, name)(q, k, v, scale=1.0, normalize=True)[0].transpose(1, 2)
        return divided(getattr(linear_attn, name)(q, k, v, scale=1.0, normalize=False)[0], q, k).transpose(1, 2)

    features = torch.compile(lambda x: F.elu(x) + 1)
    divided = torch.compile(lambda o, q, k: o / (q * k.float().cumsum(1)).sum(-1, keepdim=True).to(o.dtype))
    return attend


def scans(lengths: list[int], asked: "Asked") -> None:
    """Linear attention with elu + 1 and denominators, compared with fla with and without them, and cuDNN's softmax."""
    rate = bandwidth()
    floor = 4 * TOKENS * HEADS * WIDTH * DTYPE.itemsize / rate
    print(f"\nscans: copy {rate / 1e9:.2f} TB/s, floor {floor:.3f} / {3 * floor:.3f} ms\n")
    names = "".join(f"{name:>17}" for name in ("ours", "best rival", "fla bare", "softmax"))
    print(f"{'linear attention':22}{'N':>7}{names}{'ratio':>13}{'floors':>8}")
    for width, N in itertools.product((64, 128), lengths):
        softmax = timed(sdpa(SDPBackend.CUDNN_ATTENTION), N, width)
        kernels = ("chunk_linear_attn", "fused_chunk_linear_attn")
        for name, ours, rivals, bare in (
            (
                f"causal, heads of {width}",
                linear,
                [fla(kernel, whole=True, own=own) for kernel in kernels for own in (False, True)],
                [fla(kernel, whole=False) for kernel in kernels],
            ),
            (f"both ways, of {width}", linear_both_ways, [einsum_both_ways, torch.compile(einsum_both_ways)], []),
        ):
            if not asked.wants(name):
                continue
            mine = timed(ours, N, width)
            # the others compile and tune themselves for a while
            print(f"{name:22}{N:>7}{shown(mine):>17} ...", flush=True)
            asked.record(f"scans, {name}, {N}, ours", mine)
            best, least = (
                tuple(map(min, zip(*found, strict=True)))
                if (found := [times for rival in group if (times := timed(rival, N, width))])
                else None
                for group in (rivals, bare)
            )
            for who, times in (("rival", best), ("fla bare", least)):
                asked.record(f"scans, {name}, {N}, {who}", times)
            cells = "".join(f"{shown(times):>17}" for times in (mine, best, least, softmax))
            against = [x for x in (best, least) if x]
            ratio = [min(x[i] for x in against) / mine[i] for i in range(2)] if against and mine else (0, 0)
            above = f"{mine[0] / floor:>8.1f}" if mine else ""
            print(f"{name:22}{N:>7}{cells}{ratio[0]:>8.2f}/{ratio[1]:.2f}{above}", flush=True)


def counters(lengths: list[int], asked: "Asked") -> None:
    """One forward and one backward pass of the causal window and of the causal scan, for a profiler to look at."""
    for (name, attend), N in itertools.product((("window 256", window), ("linear", linear)), lengths):
        if not asked.wants(name):
            continue
        q, k, v, grad = heads(N, WIDTH)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        for seen in (False, True):
            wait(torch.cuda.profiler.start if seen else None)
            torch.autograd.grad(attend(q, k, v), leaves, grad)
            wait(torch.cuda.profiler.stop if seen else None)
        print(f"{name}, {N}: profiled", flush=True)


def profile(lengths: list[int], asked: "Asked") -> None:
    """Microseconds of each kernel in forward and backward passes."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for N in lengths:
        for name, attend in {"window 256": window, **with_far_keys(N), "linear": linear}.items():
            if not asked.wants(name):
                continue
            q, k, v, grad = heads(N, WIDTH)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            torch.autograd.grad(attend(q, k, v), leaves, grad)
            with torch.profiler.profile(activities=activities) as seen:
                for _ in range(5):
                    torch.autograd.grad(attend(q, k, v), leaves, grad)
                torch.cuda.synchronize()
            kernels: dict[str, list[float]] = {}
            for event in seen.events() or ():
                if str(event.device_type).endswith("CUDA"):
                    kernels.setdefault(event.name, []).append(event.time_range.elapsed_us())
            total = sum(map(sum, kernels.values())) / 5
            print(f"\n{name}, {N}: {total:.0f} us in kernels of a forward and a backward pass", flush=True)
            for kernel, times in sorted(kernels.items(), key=lambda pair: -sum(pair[1])):
                print(f"{sum(times) / 5:10.1f} us{len(times) / 5:6.0f} x  {kernel[:100]}", flush=True)


# launches to try, by pattern and kernel
TILES = {
    "window 256, causal": {
        "forward": [
            Tile(64, 64, 4, 3, 128),
            Tile(64, 64, 4, 2, 128, True),
            Tile(128, 64, 8, 2, 128),
            Tile(64, 32, 4, 3, 96),
        ],
        "queries": [Tile(64, 32, 4, 4, 96), Tile(64, 64, 4, 2, 128), Tile(128, 32, 8, 2, 96)],
        "keys": [Tile(32, 64, 4, 2, 128), Tile(64, 64, 8, 1, 128), Tile(64, 32, 4, 2, 128)],
    },
    "window 256 + 16 global": {
        "queries": [Tile(64, 32, 4, 3, 112), Tile(64, 32, 4, 3, 128)],
        "keys": [Tile(32, 64, 4, 1, 128), Tile(32, 64, 4, 1, 168)],
    },
    "sparse fixed 128, 8, causal": {
        "forward": [Tile(128, 64, 8, 3, 128), Tile(64, 64, 4, 3, 128), Tile(128, 128, 8, 2)],
        "queries": [Tile(128, 64, 8, 2, 128), Tile(128, 64, 8, 3, 128), Tile(128, 32, 8, 3, 128)],
        "far": [Tile(32, 128, 8, 3, 128), Tile(32, 128, 8, 2, 128), Tile(64, 128, 8, 2)],
    },
}
SCAN_LAUNCHES = {
    "forward": [cuts.Tuning(64, 8, 2, 128), cuts.Tuning(64, 8, 3, 128), cuts.Tuning(32, 8, 3, 128)],
    "queries": [cuts.Tuning(64, 8, 2, 128), cuts.Tuning(32, 8, 3, 128), cuts.Tuning(32, 8, 2, 128)],
    "keys": [cuts.Tuning(32, 8, 3, 128), cuts.Tuning(32, 8, 2, 128), cuts.Tuning(32, 4, 3, 168)],
}


def launches(lengths: list[int], asked: "Asked") -> None:
    """Patterns and the causal scan with other tiles, warps, stages and registers, one kernel at a time."""
    chosen_tile, chosen_launches = parts_triton.tile, dict(cuts.TUNED)
    for N in lengths:
        print(f"\nlaunches at {N}: as they are chosen, then with one kernel changed")
        for name, kernels in TILES.items():
            attend = {"window 256, causal": window, **with_far_keys(N)}[name]
            if asked.wants(name):
                print(f"{f'{name}, chosen':64}{shown(timed(attend, N, WIDTH)):>16}", flush=True)
            for kernel, tile in ((kernel, tile) for kernel, tiles in kernels.items() for tile in tiles):
                if not asked.wants(f"{name} {kernel}"):
                    continue
                parts_triton.tile = lambda kind, *given, tile=tile, kernel=kernel, **more: (
                    tile if kind == kernel else chosen_tile(kind, *given, **more)
                )
                times = timed(attend, N, WIDTH)
                asked.record(f"launches, {name} {kernel} {tuple(tile)}, {N}", times)
                print(f"{f'{name} {kernel} {tuple(tile)}':64}{shown(times):>16}", flush=True)
            parts_triton.tile = chosen_tile
        if asked.wants("linear"):
            print(f"{'linear, chosen':64}{shown(timed(linear, N, WIDTH)):>16}", flush=True)
        for kernel, tunings in SCAN_LAUNCHES.items():
            for tuning in tunings:
                if not asked.wants(f"linear {kernel}"):
                    continue
                cuts.TUNED[kernel] = tuning
                times = timed(linear, N, WIDTH)
                asked.record(f"launches, linear {kernel} {tuple(tuning)}, {N}", times)
                print(f"{f'linear {kernel} {tuple(tuning)}':64}{shown(times):>16}", flush=True)
            cuts.TUNED.update(chosen_launches)


def wait(then: Callable[[], object] | None) -> None:
    torch.cuda.synchronize()
    if then is not None:
        then()


def shown(times: Times | None) -> str:
    return "-" if times is None else f"{times[0]:.3f} / {times[1]:.2f}"


class Asked:
    """Which rows to measure, until when one may begin, and where times are written."""

    def __init__(self, only: list[str], seconds: float, workers: int = 0, json: str | None = None):
        self.only, self.end, self.workers, self.json = only, time.monotonic() + seconds, workers, json

    def names(self, name: str) -> bool:
        return not self.only or any(part in name for part in self.only)

    def has_time(self) -> bool:
        return time.monotonic() < self.end

    def wants(self, name: str) -> bool:
        return self.has_time() and self.names(name)

    def record(self, key: str, times: Times | None) -> None:
        """Kept at once: a run may be stopped."""
        RESULTS[key] = times
        if self.json:
            with open(self.json, "w") as file:
                json.dump(RESULTS, file, indent=1)


def shrink() -> None:
    """Sizes at which a CPU is fast enough."""
    global TOKENS, HEADS, WIDTH
    TOKENS, HEADS, WIDTH = SMALL, 2, 16


SECTIONS = {
    "patterns": patterns,
    "scans": scans,
    "layers": layers,
    "counters": counters,
    "launches": launches,
    "profile": profile,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"sections of {', '.join(SECTIONS)} (default: the first three)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536], help="tokens per row")
    parser.add_argument("--only", nargs="+", default=[], help="rows whose name contains one of these")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no row begins after this time")
    parser.add_argument("--workers", type=int, default=0, help="layers: processes that compile the kernels first")
    parser.add_argument("--json", help="file to write all times to")
    parser.add_argument("--graphs", action="store_true", help="time replays of CUDA graphs")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="dtype (default: bfloat16, as in --workers)",
    )
    parser.add_argument(
        "--small", action="store_true", help="few tokens and heads, to try layers and launches, on a CPU too"
    )
    given = parser.parse_args()
    unknown = [name for name in given.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"unknown section {unknown[0]!r}: choose from {', '.join(SECTIONS)}")
    global GRAPHS, DTYPE
    DTYPE = getattr(torch, given.dtype)
    GRAPHS = given.graphs and torch.cuda.is_available()
    if given.small:
        shrink()
    elif not torch.cuda.is_available():
        parser.exit(1, "no CUDA device: this benchmark compares GPU kernels (layers --small tries it on a CPU)\n")
    asked = Asked(given.only, given.seconds, given.workers, given.json)
    for name in given.sections or list(SECTIONS)[:3]:
        SECTIONS[name](given.lengths, asked)


if __name__ == "__main__":
    main()
