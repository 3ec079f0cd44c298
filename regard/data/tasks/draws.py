"""Uniform numbers, one by one."""

import torch


class Draws:
    """Uniform numbers from a generator, many at a time: one by one they take most of the time."""

    def __init__(self, generator: torch.Generator):
        self.generator, self.left = generator, iter(())

    def __call__(self) -> float:
        for value in self.left:
            return value
        self.left = iter(torch.rand(4096, generator=self.generator).tolist())
        return next(self.left)

    def below(self, top: int) -> int:
        """A whole number from 0 on."""
        return min(top - 1, int(self() * top))
