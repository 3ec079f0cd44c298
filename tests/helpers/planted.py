"""Contestants that only pretend to compute: a clock of their own, times that are planted, and kills."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from regard.compare.measure import CannotMeasure, Setting
from regard.compare.plan import CostPlan
from regard.compare.run import Environment, fill_costs
from regard.compare.store import Folder


class Killed(BaseException):
    """Stands for a SIGKILL: nothing of ours catches it."""


class World:
    """A machine whose times are planted: seconds of a training step by spec, with noise and a load that drifts."""

    def __init__(self, seconds: dict[str, float], *, noise: float = 0.0, seed: int = 0, drift: float = 0.0):
        self.seconds, self.noise, self.drift = seconds, noise, drift
        self.random = random.Random(seed)
        self.now = 0.0
        self.turns: list[str] = []
        self.prepared: list[str] = []
        self.estimated: list[str] = []
        self.kill_after: int | None = None  # turns
        self.broken: set[str] = set()  # specs whose third turn fails
        self.disturbed: set[str] = set()  # specs whose first estimate is five times too slow
        self.settings: list[Setting] = []
        self.most_alive = self.alive = 0
        self.said: list[str] = []

    def environment(self, **more: Any) -> Environment:
        return Environment(
            contestant=lambda setting: Planted(self, setting), clock=lambda: self.now, report=self.said.append, **more
        )

    def fill(self, plan: CostPlan, folder: Folder, **more: Any) -> None:
        fill_costs(plan, folder, self.environment(**more))

    def spend(self, seconds: float) -> float:
        # what else happens on the machine makes everything slower for a while
        load = 1 + self.drift * self.now / 60
        taken = seconds * load * self.random.lognormvariate(0.0, self.noise) if self.noise else seconds * load
        self.now += taken
        return taken


class Planted:
    """A contestant of a world."""

    def __init__(self, world: World, setting: Setting):
        self.world, self.setting = world, setting
        world.settings.append(setting)
        self.seconds = world.seconds[setting.spec] * setting.length / 64
        world.alive += 1
        world.most_alive = max(world.alive, world.most_alive)

    def estimate(self) -> dict[str, float]:
        self.world.estimated.append(self.setting.spec)
        self.world.now += 0.2 * self.seconds
        first = self.world.estimated.count(self.setting.spec) == 1
        seconds = 5 * self.seconds if first and self.setting.spec in self.world.disturbed else self.seconds
        return {"seconds": seconds, "length": self.setting.length / 8}

    def prepare(self) -> dict[str, Any]:
        if self.seconds > self.setting.seconds:
            raise CannotMeasure("slow", f"about {self.seconds:g} s")
        self.world.prepared.append(self.setting.spec)
        self.world.now += 3 * self.seconds
        counted = {"flops": 10, "flops_forward": 3, "written": 5, "saved_bytes": 8, "sees": self.setting.length}
        counted |= {"parameters": 4, "state_bytes": 64}
        return {"peak": 2**20, "backend": "planted", "seconds": self.seconds, "counted": counted}

    def turn(self) -> dict[str, float]:
        self.world.turns.append(self.setting.spec)
        if self.world.kill_after is not None and len(self.world.turns) > self.world.kill_after:
            raise Killed
        if self.setting.spec in self.world.broken and self.world.turns.count(self.setting.spec) == 3:
            raise CannotMeasure("error", "its process ended")
        return {name: self.world.spend(part * self.seconds) for name, part in PARTS.items()}

    def close(self) -> None:
        self.world.alive -= 1


PARTS = {"forward": 0.3, "train": 1.0, "step": 0.01}


@contextmanager
def survived() -> Iterator[None]:
    """What follows a kill: somebody starts the command again."""
    with suppress(Killed):
        yield
