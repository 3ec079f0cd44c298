"""`triton.jit` with types: what a kernel takes on the host is not what its parameters are on the device.

Triton's own types give a kernel the signature of its body, in which a size is a `tl.constexpr` and a tensor a pointer.
A host passes ints and torch.Tensors, and a kernel may call another with plain numbers.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, overload


class Kernel(Protocol):
    """A function on the device: launched from the host as kernel[grid](...), called by other kernels."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


if TYPE_CHECKING:

    @overload
    def jit(function: Callable[..., Any]) -> Kernel: ...

    @overload
    def jit(*, do_not_specialize: Sequence[str]) -> Callable[[Callable[..., Any]], Kernel]: ...

    def jit(function: Any = None, *, do_not_specialize: Sequence[str] = ()) -> Any: ...

else:
    from triton import jit

__all__ = ["Kernel", "jit"]
