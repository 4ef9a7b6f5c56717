"""JavaScript out of installed packages, and small changes to it that are checked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from attnprobe.errors import AttnprobeError

Patch = tuple[str, str]
"""A piece of a script that must stand in it exactly once, and what goes in its place."""

# Releases that hold what the views need.
_KNOWN = {
    one.split("==")[0]: one
    for one in ("bertviz==1.4.1", "mpld3==0.5.12", "XStatic-jQuery==3.7.1.1")
}


def d3() -> str:
    """d3 5.7.0, the version that BertViz asks for, as mpld3 ships it."""
    return _script("mpld3", "mpld3/js/d3.v5.min.js")


def jquery() -> str:
    """jQuery without its requests and effects, as XStatic-jQuery ships it."""
    return _script("XStatic-jQuery", "xstatic/pkg/jquery/data/jquery.slim.min.js")


def bertviz(name: str, patches: Sequence[Patch]) -> str:
    """A script of BertViz with patches made.

    Raises:
        AttnprobeError: it is not there, or not the script that the patches were written for.
    """
    return patched(_script("bertviz", f"bertviz/{name}"), patches, f"{name} of bertviz")


def patched(script: str, patches: Sequence[Patch], name: str) -> str:
    """A script with each patch made, in order; `name` says which script, for the error.

    Raises:
        AttnprobeError: what a patch replaces does not stand in the script exactly once.
    """
    for old, new in patches:
        count = script.count(old)
        if count != 1:
            raise AttnprobeError(
                f"{name} {version('bertviz')} is not the script that this view was made for: it "
                f"holds {old!r} {count} times, expected once. Install {_KNOWN['bertviz']}"
            )
        script = script.replace(old, new)
    return script


@cache
def _script(package: str, path: str) -> str:
    # The package is not imported: mpld3 would import all of matplotlib for the sake of one file.
    try:
        found = Path(str(distribution(package).locate_file(path)))
        script = found.read_text(encoding="utf-8")
    except (PackageNotFoundError, OSError) as error:
        raise AttnprobeError(
            f"a view needs {path}, as {_KNOWN[package]} has it: pip install {_KNOWN[package]}"
        ) from error
    if "</script" in script.lower():  # it would end the page's script there
        raise AttnprobeError(f"{path} from {package} cannot stand in a page: it holds </script")
    return script
