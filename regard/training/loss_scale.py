"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, arXiv 1710.03740).

Small gradients underflow to zero in float16. The loss is multiplied by a large number, and so are its gradients, which
are divided by it again in float32. The scale halves when a gradient overflows, and doubles after many steps in which
none did.
"""

from dataclasses import dataclass

FIRST_SCALE, LEAST_SCALE = 2.0**16, 2.0**-6
STEPS_TO_DOUBLE = 2000


@dataclass
class LossScale:
    """The number that the loss is multiplied by."""

    value: float = FIRST_SCALE
    steps_since_rescale: int = 0

    def update(self) -> None:
        """Call it after a step whose gradients were finite."""
        self.steps_since_rescale += 1
        if self.steps_since_rescale == STEPS_TO_DOUBLE:
            self.value, self.steps_since_rescale = self.value * 2, 0

    def can_shrink(self) -> bool:
        return self.value > LEAST_SCALE

    def shrink(self) -> None:
        """Call it after a step whose gradients overflowed."""
        self.value, self.steps_since_rescale = self.value / 2, 0
