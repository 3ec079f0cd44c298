"""What other people's packages add to Regard. To install such a package is enough: entry points name what it adds.

    [project.entry-points."regard.attention"]
    retention = "mypackage.retention:Retention"

The groups are regard.attention, regard.feedforward, regard.position, regard.models and regard.tasks. The word on the
left is what users write. Nothing of a package is imported before its word is used or listed. What cannot be loaded is
left out with one warning, and its word is refused with the reason. No package can take a word of ours.
"""

import importlib.metadata
import keyword
import warnings
from collections.abc import Callable, Collection
from typing import Any, NamedTuple


class PluginWarning(UserWarning):
    """An installed package names something for Regard that cannot be used."""


class Plugin(NamedTuple):
    """An entry point, not loaded yet."""

    package: str  # name and version of the installed package
    point: importlib.metadata.EntryPoint


class Plugins:
    """The entry points of one group by their words. `check(word, value)` gives what is registered for a loaded value,
    or raises a ValueError that says what is wrong with it; `taken()` are the words of ours."""

    def __init__(
        self, kind: str, group: str, taken: Callable[[], Collection[str]], check: Callable[[str, Any], Any]
    ) -> None:
        self.kind, self.group, self.taken, self.check = kind, group, taken, check
        self.forget()

    def forget(self) -> None:
        """Looks anew at what is installed when it is asked next."""
        self._points: dict[str, Plugin] | None = None
        self._loaded: dict[str, Any] = {}
        self._refused: dict[str, str] = {}  # why, by word
        self._warned: set[str] = set()

    def points(self) -> dict[str, Plugin]:
        """What is installed, by word."""
        if self._points is None:
            self._points = {}
            taken = self.taken()
            for point in sorted(entry_points(self.group), key=lambda point: (point.name, package_of(point))):
                plugin = Plugin(package_of(point), point)
                word = point.name
                if word in taken:
                    self._warn(f"{self.kind} {word!r} of the package {plugin.package}", "the word is Regard's own")
                elif word in self._points:
                    others = f"{self._points[word].package} and {plugin.package}"
                    self._refused[word] = f"two packages name it, {others}: uninstall one of them"
                else:
                    self._points[word] = plugin
                    if not word.isidentifier() or keyword.iskeyword(word):
                        self._refused[word] = "a name is one word of letters, digits and underscores"
        return self._points

    def package(self, word: str) -> str | None:
        """The package that a word comes from, with its version."""
        plugin = self.points().get(word)
        return None if plugin is None else plugin.package

    def load(self, word: str) -> Any:
        """What a word of `points` stands for; a ValueError says why it cannot be used."""
        plugin = self.points()[word]
        cause: BaseException | None = None
        if word not in self._loaded and word not in self._refused:
            try:
                self._loaded[word] = self.check(word, plugin.point.load())
            # a module that ends the program must not end ours
            except (Exception, SystemExit) as error:
                name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                self._refused[word], cause = name + " ".join(str(error).split()), error
        if word in self._refused:
            raise ValueError(
                f"{self.kind} {word!r} of the package {plugin.package} ({plugin.point.value}) cannot be used: "
                f"{self._refused[word]}; update the package or uninstall it"
            ) from cause
        return self._loaded[word]

    def load_all(self) -> dict[str, Any]:
        """All that can be used, by word; a warning for each that cannot."""
        found = {}
        for word, plugin in self.points().items():
            try:
                found[word] = self.load(word)
            except ValueError:
                self._warn(f"{self.kind} {word!r} of the package {plugin.package}", self._refused[word])
        return found

    def refuse(self, word: str, error: Exception) -> None:
        """Leaves out what was loaded and then failed at the first use of it, with a warning."""
        self._loaded.pop(word, None)
        self._refused[word] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        self.load_all()

    def _warn(self, what: str, why: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(f"{what} is left out: {why}", PluginWarning, stacklevel=2)


def entry_points(group: str) -> list[importlib.metadata.EntryPoint]:
    """The entry points of a group in all installed packages."""
    return list(importlib.metadata.entry_points(group=group))


def package_of(point: importlib.metadata.EntryPoint) -> str:
    """Name and version of the package that an entry point comes from."""
    return "(unknown)" if point.dist is None else f"{point.dist.name} {point.dist.version}"
