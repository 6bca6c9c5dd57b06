"""Versions of Shardwise, torch and transformers."""

import re
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"


@dataclass(frozen=True, kw_only=True)
class Support:
    """The oldest version of a package that Shardwise supports, and the newest one that passed the whole test suite."""

    oldest: str
    tested: str

    def is_newer(self, found: str) -> bool:
        """Returns whether `found` is above the tested version, patch releases aside."""
        return release_of(found) > release_of(self.tested)

    def __str__(self) -> str:
        return f"{self.oldest} to {self.tested}"


SUPPORTED = {"torch": Support(oldest="2.11", tested="2.14"), "transformers": Support(oldest="5.17", tested="5.24")}


def release_of(text: str) -> tuple[int, ...]:
    """Returns the major and minor number of a version such as `2.13.0+cpu`."""
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def installed(package: str) -> str | None:
    """Returns the installed version of a package, without importing it; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def warn_if_untested() -> None:
    """Warns if torch or transformers is newer than the tested versions."""
    newer = [
        f"{package} {found} (tested: {support})"
        for package, support in SUPPORTED.items()
        if (found := installed(package)) is not None and support.is_newer(found)
    ]
    if newer:
        warnings.warn(f"shardwise is not tested with {' and '.join(newer)} yet", UserWarning, stacklevel=3)
