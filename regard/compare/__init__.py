"""Compares mechanisms: what they cost at a length, on this machine, and what follows from it.

`compare` is `regard compare` for notebooks; `Results.load` reads a folder of results and measures nothing.
"""

from pathlib import Path
from typing import Any

from regard.compare.results import Results

__all__ = ["Results", "compare"]


def compare(*specs: str, out: str | Path = "runs/compare", **settings: Any) -> Results:
    """Measures the cost of mechanisms against that of softmax, and stores it in a folder: what the folder has already
    is not measured again. Call it below `if __name__ == "__main__":` in a script, as it starts processes.

    Args:
        specs: mechanisms with their options; none: all that take the role.
        out: folder of the results.
        settings: fields of `regard.compare.plan.CostPlan`, such as lengths=(8192,), role="self", minutes=5.
    """
    from regard.compare.plan import CostPlan
    from regard.compare.results import write_plans
    from regard.compare.run import fill_costs, with_threads
    from regard.compare.store import Folder

    plan, folder = with_threads(CostPlan(specs=specs, **settings)), Folder(out)
    write_plans(folder, plan, ())
    fill_costs(plan, folder)
    return Results(plan, folder)
