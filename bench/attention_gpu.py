"""Our attention kernels on a GPU and public ones, in one run: milliseconds forward / forward + backward, bf16.

    python bench/attention_gpu.py                      # every section
    python bench/attention_gpu.py patterns --lengths 65536
    python bench/attention_gpu.py layers --only performer efficient --seconds 60 --json layers.json

65,536 tokens in all and width 1,024, so 16 heads of 64. The floor reads q, k, v and writes o once at the measured
bandwidth; the backward pass moves about twice as much again. "ratio" is the best rival's time over ours, so above 1 we
are faster. A layer's forward pass is that of inference, in eval mode; the backward one is that of training.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard
from regard.kernels import runs, scan
from regard.kernels.runs import Bound, Far, Pass, Where

TOKENS, HEADS, WIDTH = 65536, 16, 64
Times = tuple[float, float]  # forward, forward + backward
RESULTS: dict[str, Times | None] = {}  # all that was timed, by section, row, length and column


def milliseconds(function: Callable[[], object], repeats: int = 10) -> float:
    """The median of several calls, after a few to warm up."""
    for _ in range(3):
        function()
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
    return [torch.randn(size, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)]


def timed(attend: Callable[[Tensor, Tensor, Tensor], Tensor], length: int, width: int = WIDTH) -> Times | None:
    q, k, v, grad = heads(length, width)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    try:
        with torch.no_grad():
            forward = milliseconds(lambda: attend(q, k, v))
        both = milliseconds(lambda: torch.autograd.grad(attend(q, k, v), leaves, grad))
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        print(f"  (omitted: {str(error).splitlines()[0][:100]})")
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
    head = runs.attend(q[:, :, :16], k, v, [Pass()])
    near = Pass(Bound(plus=-256), Bound(plus=257), Far(16))
    return runs.attend(q, k, v, [near], where=Where(first=16), head=head)


def patterns(lengths: list[int], asked: "Asked") -> None:
    """Windows, global tokens and the patterns of the Sparse Transformer, compared with FlexAttention."""
    rate = bandwidth()
    floor = 4 * TOKENS * HEADS * WIDTH * 2 / rate
    print(f"\npatterns: copy {rate / 1e9:.2f} TB/s, floor {floor:.3f} / {3 * floor:.3f} ms\n")
    print(f"{'pattern':28}{'N':>7}  {'ours':>15}  {'flex':>15}  {'cuDNN, all':>15}  {'flash, all':>15}  {'ratio':>11}")

    def over(*passes: Pass) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return lambda q, k, v: runs.attend(q, k, v, passes)

    for N in lengths:
        block = Bound(every=128, times=128)
        summaries = Far(N // 128 * 8, Bound(every=128, times=8), 120, 8, 128)
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
                over(Pass(block, Bound(plus=1), summaries)),
                lambda i, j: (j <= i) & ((i // 128 == j // 128) | (j % 128 >= 120)),
            ),
        }
        whole = [timed(sdpa(backend), N) for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)]
        for name, (ours, sees) in rows.items():
            if not asked.wants(name):
                continue
            mine, theirs = timed(ours, N), timed(flex(sees, N), N)
            RESULTS.update({f"patterns, {name}, {N}, {who}": t for who, t in (("ours", mine), ("flex", theirs))})
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
        "efficient",
        "reformer",
        "routing(clusters=128)",
        "sinkhorn(block=128, longest={length})",
        "luna",
        "compressed",
        "scaling",
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
    ),
}


def layers(lengths: list[int], asked: "Asked") -> None:
    """Whole layers with their projections, compared with the softmax layer of the same length ("ratio")."""
    ratios: dict[tuple[str, str], list[tuple[int, Times]]] = {}
    print(f"\n{'layer':56}{'role':>8}{'N':>7}  {'ours':>15}  {'ratio':>11}")
    for N, (role, specs) in itertools.product(lengths, LAYERS.items()):
        base = layer_times("softmax", role, N)
        for pattern in ("softmax", *specs):
            spec = pattern.format(length=N)
            if not asked.wants(spec):
                continue
            times = base if spec == "softmax" else layer_times(spec, role, N)
            RESULTS[f"layers, {role} {spec}, {N}, ours"] = times
            if times is None or base is None:
                continue
            ratio = base[0] / times[0], base[1] / times[1]
            ratios.setdefault((role, pattern), []).append((N, ratio))
            print(f"{spec:56}{role:>8}{N:>7}  {shown(times):>15}  {ratio[0]:>5.2f}/{ratio[1]:.2f}", flush=True)
    if len(lengths) > 1:
        crossovers(ratios)


def crossovers(ratios: dict[tuple[str, str], list[tuple[int, Times]]]) -> None:
    """The shortest length from which a layer is faster than softmax, forward and with backward, and stays so."""
    print(f"\n{'layer':56}{'role':>8}  crossover")
    for (role, spec), found in ratios.items():
        slower = [N for N, ratio in found if min(ratio) <= 1]
        faster = [N for N, _ in found if max(slower, default=0) < N]
        print(f"{spec:56}{role:>8}  {min(faster) if faster else '-'}")


def layer_times(spec: str, role: str, length: int) -> Times | None:
    try:
        return _layer_times(spec, role, length)
    except (RuntimeError, ValueError) as error:
        print(f"  ({spec} omitted: {str(error).splitlines()[0][:100]})")
        return None


def _layer_times(spec: str, role: str, length: int) -> Times:
    width = HEADS * WIDTH
    layer = regard.attention(spec, width=width, heads=HEADS, role=role).to("cuda", torch.bfloat16)
    x = torch.randn(TOKENS // length, length, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad, leaves = torch.randn_like(x), [x, *layer.parameters()]
    layer.eval()
    with torch.no_grad():
        forward = milliseconds(lambda: layer(x), 5)
    layer.train()
    return forward, milliseconds(lambda: torch.autograd.grad(layer(x), leaves, grad, allow_unused=True), 5)


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scan.attend_past(q, k, v, map="elu", final=False)[0]


def linear_both_ways(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scan.attend_sums(q, *scan.absorb(k, v, map="elu"), dtype=v.dtype, map="elu")


def einsum_both_ways(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return (q @ (k.mT @ v)) / (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True)


def fla(name: str, *, whole: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Flash linear attention, if it is installed; whole: with the feature map and the denominators, compiled."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from fla.ops import linear_attn

        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if not whole:
            return getattr(linear_attn, name)(q, k, v, scale=1.0, normalize=False)[0].transpose(1, 2)
        q, k = features(q), features(k)
        return divided(getattr(linear_attn, name)(q, k, v, scale=1.0, normalize=False)[0], q, k).transpose(1, 2)

    features = torch.compile(lambda x: F.elu(x) + 1)
    divided = torch.compile(lambda o, q, k: o / (q * k.float().cumsum(1)).sum(-1, keepdim=True).to(o.dtype))
    return attend


def scans(lengths: list[int], asked: "Asked") -> None:
    """Linear attention with elu + 1 and denominators, compared with fla with and without them, and cuDNN's softmax."""
    rate = bandwidth()
    floor = 4 * TOKENS * HEADS * WIDTH * 2 / rate
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
                [fla(kernel, whole=True) for kernel in kernels],
                [fla(kernel, whole=False) for kernel in kernels],
            ),
            (f"both ways, of {width}", linear_both_ways, [einsum_both_ways, torch.compile(einsum_both_ways)], []),
        ):
            if not asked.wants(name):
                continue
            mine = timed(ours, N, width)
            # the others compile and tune themselves for a while
            print(f"{name:22}{N:>7}{shown(mine):>17} ...", flush=True)
            RESULTS[f"scans, {name}, {N}, ours"] = mine
            best, least = (
                tuple(map(min, zip(*found, strict=True)))
                if (found := [times for rival in group if (times := timed(rival, N, width))])
                else None
                for group in (rivals, bare)
            )
            RESULTS.update({f"scans, {name}, {N}, {who}": t for who, t in (("rival", best), ("fla bare", least))})
            cells = "".join(f"{shown(times):>17}" for times in (mine, best, least, softmax))
            against = [x for x in (best, least) if x]
            ratio = [min(x[i] for x in against) / mine[i] for i in range(2)] if against and mine else (0, 0)
            above = f"{mine[0] / floor:>8.1f}" if mine else ""
            print(f"{name:22}{N:>7}{cells}{ratio[0]:>8.2f}/{ratio[1]:.2f}{above}", flush=True)


def shown(times: Times | None) -> str:
    return "-" if times is None else f"{times[0]:.3f} / {times[1]:.2f}"


class Asked:
    """Which rows to measure, and until when one may begin."""

    def __init__(self, only: list[str], seconds: float):
        self.only, self.end = only, time.monotonic() + seconds

    def wants(self, name: str) -> bool:
        return time.monotonic() < self.end and (not self.only or any(part in name for part in self.only))


SECTIONS = {"patterns": patterns, "scans": scans, "layers": layers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"sections of {', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536], help="tokens per row")
    parser.add_argument("--only", nargs="+", default=[], help="rows whose name contains one of these")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no row begins after this time")
    parser.add_argument("--json", help="file to write all times to")
    given = parser.parse_args()
    unknown = [name for name in given.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"unknown section {unknown[0]!r}: choose from {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        parser.exit(1, "no CUDA device: this benchmark compares GPU kernels\n")
    asked = Asked(given.only, given.seconds)
    for name in given.sections or SECTIONS:
        SECTIONS[name](given.lengths, asked)
        if given.json:
            with open(given.json, "w") as file:
                json.dump(RESULTS, file, indent=1)


if __name__ == "__main__":
    main()
