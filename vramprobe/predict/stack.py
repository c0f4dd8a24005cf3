"""Stack: a cell under other releases, for ``predict --stack transformers-4.48,bitsandbytes-0.45``.

In: a spec and the releases' names. Out: the spec under them, or SpecError for what was not read in their source.
"""

from __future__ import annotations

import re

from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.architecture.releases import FIFTH, LAST_FOURTH, OLDEST, in_words, release_of
from vramprobe.catalog.libraries import pinned_libraries
from vramprobe.errors import SpecError
from vramprobe.spec import CellSpec
from vramprobe.terms.step.versions import is_fourth, under, why_not_fourth

#: The oldest bitsandbytes that was read and run.
_OLDEST_QUANTISER = 43


def on_stack(spec: CellSpec, names: str) -> CellSpec:
    """The cell under ``transformers-4.48``, with ``,bitsandbytes-0.45`` where that matters.

    ``transformers-4`` is the last of those, ``transformers-5`` the pinned one, and all from 5.0 on are taken for it.
    Raises SpecError for another name or a release that was not read, UnsupportedArchitecture for a cell of which that
    release's memory is not known.
    """
    return under_versions(spec, names, versions_of(names))


def under_versions(spec: CellSpec, names: str, versions: dict[str, str]) -> CellSpec:
    """Return the cell under the versions that were read: package → version. Raises what :func:`on_stack` raises."""
    pinned = pinned_libraries()
    found = under(spec, {package: version for package, version in versions.items() if version != pinned[package]})
    older = architecture(found.architecture).habits.computes_in_fp32
    if older and not is_fourth(found):
        raise SpecError(
            f"stack: {names!r} given; name the transformers that ran with it, too: transformers-4.48,{names}"
        )
    if is_fourth(found) and (reasons := why_not_fourth(found)):
        raise UnsupportedArchitecture(
            f"the formula engine has no arithmetic under transformers {versions['transformers']} for "
            f"{', '.join(reasons)}; leave it out, or run the cell under that release: docs/versions.md"
        )
    return found


def versions_of(names: str) -> dict[str, str]:
    """Package → version. Raises SpecError."""
    pinned, found = pinned_libraries(), {}
    for name in names.split(","):
        told = re.fullmatch(r"(transformers|bitsandbytes)-(\d+)(\.\d+)?(\.\d+)?", name.strip())
        if told is None:
            raise SpecError(
                f"stack: {name!r} given; name releases of transformers and bitsandbytes: "
                "transformers-4.48,bitsandbytes-0.45"
            )
        package, major, minor, patch = told.groups(default="")
        last = {"4": in_words(LAST_FOURTH), "5": pinned["transformers"]} if package == "transformers" else {}
        version = f"{major}{minor}{patch}" if minor else last.get(major, f"{major}.0")
        newest = release_of(pinned[package])
        ranges = [(_OLDEST_QUANTISER, newest)]
        if package == "transformers":
            ranges = [(OLDEST, LAST_FOURTH), (FIFTH, newest)]
        if not any(low <= release_of(version) <= high for low, high in ranges):
            known = ", and ".join(f"{in_words(low)} to {in_words(high)}" for low, high in ranges)
            raise SpecError(
                f"stack: {name!r} given; known of {package} are {known}. Run the cell under another: docs/versions.md"
            )
        found[package] = version
    return found
