"""How much memory there is, and refusing what would take more than its share before it is taken.

A call may take half of what is free, by default: of the machine's memory on Linux, or of what its
control group has left where that is less; of a GPU's, what CUDA says is free. Elsewhere it is half
of all memory there is; and where nothing is known, nothing is refused. ATTNPROBE_MEMORY_LIMIT sets
another limit, in bytes, or as `800MB` or `12GB`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from attnprobe.errors import InputError

if TYPE_CHECKING:
    import torch

VARIABLE = "ATTNPROBE_MEMORY_LIMIT"

SMALL = 2**24
"""What takes no more bytes is never refused by default: asking costs time as well."""

_UNITS = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def need(size: float, what: str, instead: str, device: torch.device | None = None) -> None:
    """Say what is about to be taken.

    Args:
        size: how many bytes, about.
        what: for what, as in "the weights of 9 heads".
        instead: a narrower call, as in "give head=…".
        device: where; the machine's own memory by default.

    Raises:
        InputError: it is more than the limit.
    """
    told = os.environ.get(VARIABLE)
    if size <= SMALL and told is None:
        return
    most = _free(device) if told is None else _bytes_of(told)
    if most is None or size <= (most if told else most / 2):
        return
    limit = f"what {VARIABLE} allows, {read(most)}" if told else f"half of the {read(most)} free"
    raise InputError(
        f"{what} would take about {read(size)}, more than {limit}. Instead: {instead}. Or set "
        f"{VARIABLE}, such as {VARIABLE}={_round(size)}"
    )


def read(size: float) -> str:
    """Bytes as people read them: 4.8 GB."""
    unit = next((one for one in ("GB", "MB", "kB") if size >= _UNITS[one]), "")
    return (
        f"{size / _UNITS[unit]:.3g} {unit or 'bytes'}" if size < 1e12 else f"{size / 1e9:,.0f} GB"
    )


def _round(size: float) -> str:
    """At least so many bytes, as the variable takes them."""
    unit = "GB" if size >= 10**9 else "MB"
    return f"{size / _UNITS[unit] + 1:.0f}{unit}"


def _bytes_of(told: str) -> float:
    """What the variable says.

    Raises:
        InputError: it is no number of bytes.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(kB|MB|GB|)\s*", told)
    if found is None:
        raise InputError(f"{VARIABLE} is a number of bytes, or as 800MB or 12GB; got {told!r}")
    return float(found[1]) * _UNITS[found[2]]


def _free(device: torch.device | None) -> float | None:
    """How many bytes are free; None if that is not known."""
    if device is not None and device.type == "cuda":
        import torch

        free = torch.cuda.mem_get_info(device)[0]
        return float(
            free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        )
    known = [_of_machine(), *_of_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))]
    return min((one for one in known if one is not None), default=None)


def _of_machine() -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        (free,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        return 1024.0 * int(free)
    except (OSError, ValueError):
        pass  # no Linux, or one that keeps it to itself
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return None


def _of_groups(own: Path, root: Path) -> Iterator[float]:
    """What each control group that this process is in has left, of either version."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if not kinds:
            folder, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in kinds.split(","):
            folder = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = folder / path.lstrip("/")
        while True:  # a group inside another has what both have left; one not shown here, nothing
            left = _left(group, *names)
            if left is not None:
                yield left
            if group == folder:
                break
            group = group.parent


def _left(group: Path, limit: str, usage: str, cached: str) -> float | None:
    try:
        most, used = ((group / name).read_text(encoding="ascii") for name in (limit, usage))
        stat = (group / "memory.stat").read_text(encoding="ascii")
    except OSError:
        return None
    if not most.strip().isdecimal():  # "max"
        return None
    given_back = re.search(rf"^{cached} (\d+)$", stat, re.MULTILINE)
    return max(0.0, float(most) - float(used) + (float(given_back[1]) if given_back else 0.0))
