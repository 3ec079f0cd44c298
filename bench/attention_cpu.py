"""Time and memory of every registered mechanism against PyTorch's scaled_dot_product_attention (SDPA), on the CPU.

What is measured: one training step, forward and backward, of the attention alone: from q, k, v [1, H, N, D] in float32,
in the memory layout of a layer's projections, to the gradients of q, k, v and of the mechanism's own parameters. The
projections around it cost the same for all and are omitted (a mechanism that is not a function of projected inputs is
measured whole, and says so).

- time: SDPA and the mechanism take turns in one process after warming up; the minimum of --repeats steps counts (of
  fewer, at least one, where --budget ends), and the table gives the ratio mechanism / SDPA (below 1: faster). SDPA is
  causal where the mechanism is. `softmax` and `dot` are SDPA themselves: how far they are from 1 is the noise of a run.
- memory: how far the resident set of a fresh process rises above where it stood, inputs made, before the first step
  (the kernel's high-water mark): saved tensors, outputs, gradients and what the libraries take for themselves.
- crossover: the smallest measured length from which the mechanism is faster than SDPA and stays so.

A cell that would take longer than --budget or more than --memory, going by the shorter lengths, is not run; the table
gives the estimate instead.
"""

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard.core.rows import Memory, Rows
from regard.spec import ATTENTION, parse

EXAMPLES = """examples:
  python bench/attention_cpu.py                                     the whole table
  python bench/attention_cpu.py --only linformer linear softmax     some of it
  python bench/attention_cpu.py --only "local(window=64)" --lengths 1024 4096
  python bench/attention_cpu.py --role self --repeats 5 --markdown --json table.json
"""
LENGTHS = (1024, 2048, 4096, 8192, 16384)
WARM_UP = 64  # tokens of the step that starts threads and libraries
# Sizes that people use at these lengths. Other registered mechanisms run with their defaults, long enough.
FAIR = {
    "axial": ("axial(width=128)",),
    "bigbird": ("bigbird(block=64, random=3)",),
    "compressive": ("compressive(segment=256, memory=256, compressed=256)",),
    "globals": ("globals(tokens=16)",),
    "heads": ("heads(local(window=256), strided(stride=128))",),
    "linformer": ("linformer(rank=256, longest={longest})",),
    "local": ("local(window=256)",),
    "longformer": ("longformer(window=256, globals=16)",),
    "performer": ("performer(features=256)",),
    "reformer": ("reformer(chunk=64, buckets=256, rounds=2)",),
    "routing": ("routing(clusters=128)",),
    "sinkhorn": ("sinkhorn(block=128, longest={longest})",),
    "sparse": ("sparse(pattern='fixed', stride=128, summary=8)", "sparse(pattern='strided', stride=128)"),
    "strided": ("strided(stride=128)",),
    "xl": ("xl(segment=256, memory=256)",),
}
SDPA = "sdpa"
SAME = ("dot", "softmax")  # SDPA with a layer around it


# a cell, measured in a process of its own


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """One spec at one length: seconds of the steps, and the rise of the resident set in bytes."""
    if cell["threads"]:
        torch.set_num_threads(cell["threads"])
    torch.manual_seed(0)
    role, H, D, N = cell["role"], cell["heads"], cell["head_width"], cell["length"]
    layer = None
    if cell["spec"] != SDPA:
        layer = regard.attention(cell["spec"], width=H * D, heads=H, role=role)
    base = step = sdpa_step(role, H, D, N)
    sdpa_step(role, H, D, WARM_UP)()
    whole = False
    if layer is not None:
        try:
            projected_step(layer, WARM_UP)()
        except (AttributeError, TypeError, ValueError):
            # not a function of projected inputs alone
            whole = True
            whole_step(layer, WARM_UP)()
        step = whole_step(layer, N) if whole else projected_step(layer, N)
    cap_memory(cell["memory"])
    before = reset_peak()
    first = seconds(step)
    result = {"memory": max(0, peak() - before), "whole": whole}
    limit = time.perf_counter() + cell["budget"] - first
    result |= {"times": [], "sdpa_times": []}
    if layer is not None and first < cell["budget"] / 4:
        base()
    while len(result["times"]) < cell["repeats"]:
        if layer is not None:
            result["sdpa_times"].append(seconds(base))
        result["times"].append(seconds(step))
        if time.perf_counter() > limit:
            break
    return result


def sdpa_step(role: str, H: int, D: int, N: int) -> Callable[[], None]:
    q, k, v = leaves = tuple(leaf(1, H, N, D) for _ in range(3))
    grad = torch.randn_like(q)
    return lambda: train(F.scaled_dot_product_attention(q, k, v, is_causal=role == "causal"), leaves, grad)


def whole_step(layer: regard.Attention, N: int) -> Callable[[], None]:
    """A step of the layer with its projections."""
    x = torch.randn(1, N, layer.shape.width, requires_grad=True)
    memory = Memory(x, None) if layer.shape.role == "cross" else None
    grad, own = torch.randn(1, N, layer.shape.out_width), list(layer.parameters())
    return lambda: train(layer.forward_packed(x, memory=memory).y, (x, *own), grad)


def projected_step(layer: regard.Attention, N: int) -> Callable[[], None]:
    """A step of the mechanism on projected inputs of its own."""
    H, D, role, own = layer.shape.heads, layer.shape.head_width, layer.shape.role, list(layer.parameters())
    kinds = getattr(layer, "inputs", {"q": "query", "k": "key", "v": "value"})
    inputs = {name: leaf(1, H, N) if kind == "gate" else leaf(1, H, N, D) for name, kind in kinds.items()}
    query = {name: part for name, part in inputs.items() if kinds[name] == "query"}
    source = {name: part for name, part in inputs.items() if kinds[name] != "query"}
    tokens = torch.zeros(1, N, 1)
    rows, memory = Rows.full(tokens), Memory(tokens, None) if role == "cross" else None
    leaves, grad = (*inputs.values(), *own), torch.randn(1, N, H, D).transpose(1, 2)
    return lambda: train(layer.attend_projected(rows, query, source, None, memory)[0], leaves, grad)


def leaf(*size: int) -> Tensor:
    """Random [B, H, N, D] (or [B, H, N]) in the memory layout of a projection: tokens before heads."""
    B, H, N, *rest = size
    return torch.randn(B, N, H, *rest).transpose(1, 2).requires_grad_()


def train(y: Tensor, leaves: tuple[Tensor, ...], grad: Tensor) -> None:
    y.backward(grad)
    for tensor in leaves:
        tensor.grad = None


def seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def reset_peak() -> int:
    """Lowers the high-water mark to what is resident now, where the system can; what is resident, in bytes."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return peak()


def peak() -> int:
    """The high-water mark of the resident set in bytes."""
    try:
        # not getrusage, whose mark a child takes over from the process that started it
        return _status("VmHWM")
    except OSError:
        unit = 1 if platform.system() == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def cap_memory(room: float) -> None:
    """Turns a request for more than `room` bytes into an error of this process instead of trouble for the machine."""
    try:
        # address space, of which allocators and threads take more than they touch
        limit = _status("VmData") + int(room) + 2**28
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    except OSError:
        return


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


# the table, from the process that starts the others


def specs(only: list[str], longest: int) -> list[str]:
    """The specs to run: those of each registered name, or what --only asks for by name or by spec."""
    found = []
    for item in only or regard.names():
        name = parse(item).name
        options = [option.name for option in ATTENTION.options(name)]  # raises for an unknown name, and lists the known
        usual = (f"{name}(longest={longest})" if "longest" in options else name,)
        found += [item] if item != name else [spec.format(longest=longest) for spec in FAIR.get(name, usual)]
    return found


def plan(spec: str, role: str) -> dict[str, Any]:
    """A row of the table before it is measured: the role it runs in, or why it does not run."""
    row = {"spec": spec, "role": role, "cells": {}}
    try:
        facts = regard.facts(spec)
    except ValueError as error:
        return row | {"note": f"not built: {error}"}
    if role == "auto":
        row["role"] = next(choice for choice in ("causal", "self", "cross") if choice in facts.roles)
    elif role not in facts.roles:
        row["note"] = f"no role {role!r}"
    return row | {"growth": {"seconds": facts.time.exponent, "memory": facts.memory.exponent, "sdpa_seconds": 2}}


def fill(row: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Measures the cells of a row from the shortest length on; each says what the next will take."""
    for N in arguments.lengths:
        needed = {name: estimate(row, name, N) for name in ("seconds", "sdpa_seconds", "memory")}
        # a warm-up and one of each that counts
        whole = 2 * needed["seconds"] + needed["sdpa_seconds"]
        if whole > arguments.budget:
            cell = {"skipped": f"skipped: estimated {whole:.3g} s"}
        elif needed["memory"] > arguments.memory * 2**30:
            cell = {"skipped": f"skipped: estimated {needed['memory'] / 2**30:.3g} GiB"}
        else:
            cell = run(row, N, arguments)
        row["cells"][N] = cell
        print(f"  {row['spec']} {row['role']} {N}: {told(cell)}", file=sys.stderr, flush=True)


def estimate(row: dict[str, Any], name: str, N: int) -> float:
    """The expected seconds of a cell of length N: growth as measured, at least as declared. 0: unknown."""
    known = [(n, cell[name]) for n, cell in row["cells"].items() if cell.get(name)]
    if not known:
        return 0.0
    growth = row["growth"][name]
    if len(known) > 1:
        (n, less), (m, more) = known[-2:]
        growth = max(growth, math.log(more / less) / math.log(m / n))
    last, value = known[-1]
    return value * (N / last) ** growth


def run(row: dict[str, Any], N: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One cell, in a fresh process."""
    settings = {name: getattr(arguments, name) for name in ("heads", "head_width", "repeats", "budget", "threads")}
    settings["memory"] = arguments.memory * 2**30
    cell = json.dumps({"spec": row["spec"], "role": row["role"], "length": N} | settings)
    patience = 3 * arguments.budget + 60
    try:
        child = subprocess.run(
            [sys.executable, __file__, "--cell", cell], capture_output=True, text=True, timeout=patience, check=False
        )
    except subprocess.TimeoutExpired:
        return {"skipped": f"stopped after {patience:.0f} s"}
    if child.returncode:
        said = child.stderr.strip().splitlines() or [f"ended with status {child.returncode}"]
        if "can't allocate memory" in child.stderr:
            return {"skipped": f"over {arguments.memory:g} GiB"}
        row.setdefault("failures", []).append(f"failed at {N} tokens: {said[-1]}")
        return {"skipped": "failed"}
    cell = json.loads(child.stdout.splitlines()[-1])
    cell["seconds"] = min(cell["times"])
    if cell["sdpa_times"]:
        cell["sdpa_seconds"] = min(cell["sdpa_times"])
        cell["ratio"] = cell["seconds"] / cell["sdpa_seconds"]
    return cell


def crossover(row: dict[str, Any]) -> int | None:
    """The smallest length from which the mechanism is faster and stays so; a cell that did not run is not faster."""
    found = None
    for N, cell in sorted(row["cells"].items(), reverse=True):
        if cell.get("ratio", math.inf) >= 1:
            break
        found = N
    return found


def told(cell: dict[str, Any]) -> str:
    if "skipped" in cell:
        return cell["skipped"]
    against = f", {cell['ratio']:.3f} of SDPA's {1e3 * cell['sdpa_seconds']:.1f} ms" if "ratio" in cell else ""
    return f"{1e3 * cell['seconds']:.1f} ms{against}, {cell['memory'] / 2**20:.0f} MiB"


def tables(rows: list[dict[str, Any]], lengths: list[int]) -> list[tuple[str, list[list[str]]]]:
    """The titles and lines of the two tables."""
    heads = [str(N) for N in lengths]
    times = [["mechanism", "role", *heads, "crossover"]]
    memory = [["mechanism", "role", *heads]]
    for row in rows:
        if "note" in row:
            continue
        cells = [row["cells"].get(N, {"skipped": "not run"}) for N in lengths]
        mark = " (whole layer)" if any(cell.get("whole") for cell in cells) else ""
        times.append([row["spec"] + mark, row["role"], *map(time_of, cells), crossover_of(row, lengths[0])])
        memory.append([row["spec"] + mark, row["role"], *map(memory_of, cells)])
    return [
        ("Time of forward and backward, as a multiple of SDPA in the same role (SDPA itself in ms)", times),
        ("Peak memory beyond the inputs, MiB", memory),
    ]


def time_of(cell: dict[str, Any]) -> str:
    if "skipped" in cell:
        return cell["skipped"]
    return f"{cell['ratio']:.2f}" if "ratio" in cell else f"{1e3 * cell['seconds']:.1f} ms"


def memory_of(cell: dict[str, Any]) -> str:
    return cell["skipped"] if "skipped" in cell else f"{cell['memory'] / 2**20:.0f}"


def crossover_of(row: dict[str, Any], shortest: int) -> str:
    at = row["crossover"]
    if row["spec"] in (SDPA, *SAME):
        return ""
    return "none" if at is None else f"<= {at}" if at == shortest else str(at)


def show(title: str, lines: list[list[str]], markdown: bool) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n**{title}**\n" if markdown else f"\n{title}\n")
    for number, line in enumerate(lines):
        padded = [
            text.ljust(width) if column < 2 else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        print(f"| {' | '.join(padded)} |" if markdown else "  ".join(padded).rstrip())
        if markdown and number == 0:
            print(f"|{'|'.join('---' if column < 2 else '---:' for column in range(len(line)))}|")


def environment(arguments: argparse.Namespace) -> dict[str, Any]:
    models = [
        line.partition(":")[2].strip()
        for line in (Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else [])
        if line.startswith("model name")
    ]
    threads = arguments.threads or torch.get_num_threads()
    return {"cpu": models[0] if models else platform.processor(), "threads": threads, "torch": torch.__version__}


def parsed() -> argparse.Namespace:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=kind)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    add = parser.add_argument
    add("--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="N", help=f"tokens (default: {LENGTHS})")
    add("--only", nargs="+", default=[], metavar="NAME", help="names or specs (default: all that is registered)")
    add("--role", choices=("auto", "causal", "self", "cross"), default="auto", help="auto: causal, else self (default)")
    add("--heads", type=int, default=8, metavar="H", help="heads (default: 8)")
    add("--head-width", type=int, default=64, metavar="D", help="width of a head (default: 64)")
    add("--repeats", type=int, default=3, metavar="R", help="steps of which the fastest counts (default: 3)")
    add("--threads", type=int, default=0, metavar="K", help="threads of torch (default: chosen by torch)")
    add("--budget", type=float, default=120.0, metavar="S", help="seconds for a cell (default: 120)")
    room = round(0.6 * physical)
    add(
        "--memory",
        type=float,
        default=room,
        metavar="GIB",
        help="most memory for a cell (default: 60 %% of this machine)",
    )
    add("--json", type=Path, metavar="OUT", help="also write every number to this file")
    add("--markdown", action="store_true", help="print the tables in Markdown")
    add("--cell", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if min(*arguments.lengths, arguments.heads, arguments.head_width, arguments.repeats, 1) < 1:
        parser.error("lengths, heads, head width and repeats must be at least 1")
    arguments.lengths = sorted(set(arguments.lengths))
    return arguments


def main() -> None:
    arguments = parsed()
    if arguments.cell:
        print(json.dumps(measure(arguments.cell)))
        return
    try:
        rows = [plan(spec, arguments.role) for spec in specs(arguments.only, max(arguments.lengths))]
    except ValueError as error:
        sys.exit(str(error))
    growth = {"seconds": 2, "memory": 1, "sdpa_seconds": 2}
    bases = {"causal" if row["role"] == "causal" else "self" for row in rows if "note" not in row}
    rows = [{"spec": SDPA, "role": role, "cells": {}, "growth": growth} for role in sorted(bases)] + rows
    around = environment(arguments)
    settings = {name: getattr(arguments, name) for name in ("heads", "head_width", "repeats", "budget", "memory")}
    for number, row in enumerate(rows, 1):
        print(f"[{number}/{len(rows)}] {row['spec']} {row.get('note', '')}", file=sys.stderr, flush=True)
        if "note" not in row:
            fill(row, arguments)
            row["crossover"] = crossover(row)
        if arguments.json:
            # after each row, so that a run that is stopped keeps its results
            arguments.json.write_text(json.dumps({"environment": around, "settings": settings, "rows": rows}, indent=1))
    print(f"{around['cpu']}, {around['threads']} threads, torch {around['torch']}; ", end="")
    print(f"float32, batch 1, {arguments.heads} heads of {arguments.head_width}")
    for title, lines in tables(rows, arguments.lengths):
        show(title, lines, arguments.markdown)
    noise = [
        abs(cell["ratio"] - 1)
        for row in rows
        if row["spec"] in SAME
        for cell in row["cells"].values()
        if "ratio" in cell
    ]
    if noise:
        print(f"\nNoise: {' and '.join(SAME)} are SDPA and should stand at 1; they are off by up to {max(noise):.2f}.")
    notes = [f"- {row['spec']}: {text}" for row in rows for text in (row.get("note"), *row.get("failures", ())) if text]
    if notes:
        print("\nNot measured:\n", *notes, sep="\n")


if __name__ == "__main__":
    main()
