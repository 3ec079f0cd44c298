"""Lists of modules of one type: PyTorch's `nn.ModuleList` tells a checker only that modules are in it.

While a program runs `ModuleListOf` is `nn.ModuleList`, which takes no type: in signatures it stands in quotes.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar, overload

from torch import nn

if TYPE_CHECKING:
    Item = TypeVar("Item", bound=nn.Module)

    class ModuleListOf(nn.ModuleList, Generic[Item]):
        def __init__(self, modules: Iterable[Item] | None = None) -> None: ...

        def __iter__(self) -> Iterator[Item]: ...

        @overload
        def __getitem__(self, idx: int) -> Item: ...

        @overload
        def __getitem__(self, idx: slice) -> "ModuleListOf[Item]": ...

        # PyTorch's stub takes the index positionally or by name, and gives a module or a list for either
        def __getitem__(self, idx: int | slice) -> "Item | ModuleListOf[Item]": ...  # pyright: ignore[reportIncompatibleMethodOverride]

else:
    ModuleListOf = nn.ModuleList
