"""Stack: a cell as another release of transformers builds it, for ``predict --stack transformers-4.48``.

In: a spec and a release's name. Out: the spec under it, or SpecError for what was not read in that release's source.
"""

from __future__ import annotations

import re

from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.architecture.releases import FIFTH, LAST_FOURTH, OLDEST, in_words, release_of
from vramprobe.catalog.libraries import pinned_libraries
from vramprobe.errors import SpecError
from vramprobe.spec import CellSpec
from vramprobe.terms.versions import under, why_not_fourth


def on_stack(spec: CellSpec, name: str) -> CellSpec:
    """The cell under ``transformers-4.48``; ``transformers-4`` is the last of those, ``transformers-5`` the pinned one.

    Raises SpecError for another name or a release that was not read, UnsupportedArchitecture for a cell of which that
    release's memory is not known.
    """
    pinned = pinned_libraries()["transformers"]
    found = re.fullmatch(r"transformers-(\d+)(?:\.(\d+))?(?:\.\d+)?", name)
    if found is None:
        raise SpecError(f"stack: {name!r} given; name a release of transformers, such as transformers-4.48")
    default = {"4": in_words(LAST_FOURTH), "5": pinned}
    version = f"{found[1]}.{found[2]}" if found[2] else default.get(found[1], f"{found[1]}.0")
    release, newest = release_of(version), release_of(pinned)
    if not (OLDEST <= release <= LAST_FOURTH or FIFTH <= release <= newest):
        raise SpecError(
            f"stack: {name!r} given; known are transformers-{in_words(OLDEST)} to -{in_words(LAST_FOURTH)}, and "
            f"-{in_words(FIFTH)} to -{in_words(newest)}. Run the cell under another: docs/versions.md"
        )
    if release >= FIFTH:
        return spec  # one arithmetic for all of them: what they do otherwise is in benchmarks/versions.md
    older = under(spec, version)
    if reasons := why_not_fourth(older):
        raise UnsupportedArchitecture(
            f"the formula engine has no arithmetic under transformers {version} for {', '.join(reasons)}; leave it out, "
            "or run the cell under that release: docs/versions.md"
        )
    return older
