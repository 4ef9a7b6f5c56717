"""Where a model's files are: the package, a folder, a GGUF file, or the hub's cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import resources, util
from pathlib import Path

from attnprobe.errors import InputError, ModelError
from attnprobe.loading import hub

BUNDLED = "bundled"
"""The source that names the small GPT-2 within this package."""


@dataclass(frozen=True)
class Place:
    """A folder with a model's files; `gguf` tells transformers which of them holds everything."""

    name: str
    folder: Path
    gguf: dict[str, str] = field(default_factory=dict)


def locate(source: str, revision: str | None, trust_remote_code: bool) -> Place:
    """Find a model's files, and download them where the source is a hub id.

    Raises:
        InputError: a revision of a local model.
        ModelError: no such model, or no files in it that can be read.
    """
    path = Path(source)
    is_gguf = path.suffix.lower() == ".gguf"
    if not (source == BUNDLED or is_gguf or path.exists()):
        folder = hub.fetch(source, revision, code=trust_remote_code)
        return _checked(Place(f"{source}@{folder.name[:12]}", folder))
    if revision is not None:
        raise InputError(f"{source} is local, and only a hub id has revisions: got {revision!r}")
    if source == BUNDLED:
        return _checked(Place(BUNDLED, Path(str(resources.files("attnprobe") / BUNDLED))))
    if is_gguf:
        return _gguf(source, path)
    if not path.is_dir():
        raise ModelError(f"{source} is a file: expected a folder, a .gguf file or a hub id")
    return _checked(Place(source, path))


def _gguf(source: str, path: Path) -> Place:
    if not path.is_file():
        raise ModelError(f"there is no file {source}. One that is on the hub has to be downloaded")
    with path.open("rb") as file:
        start = file.read(4)
    if start != b"GGUF":
        raise ModelError(f"{source} is not a GGUF file: it starts with {start!r}, not with b'GGUF'")
    lacking = [name for name in ("gguf", "accelerate") if util.find_spec(name) is None]
    if lacking:
        raise ModelError(
            f"to read {source}, transformers needs the package {' and '.join(lacking)}: "
            "pip install 'attnprobe[gguf]'"
        )
    return Place(source, path.parent, {"gguf_file": path.name})


def _checked(place: Place) -> Place:
    """Refuse a folder that transformers would misread or report unclearly."""
    files = {file.name for file in place.folder.iterdir()} if place.folder.is_dir() else set()
    if "config.json" not in files:
        packed = sorted(name for name in files if name.endswith(".gguf"))
        advice = f"; it holds {packed[0]}: give that file's path" if packed else ""
        raise ModelError(f"{place.name}: no config.json in {place.folder}, so no model{advice}")
    if not files.intersection(hub.WEIGHTS):
        pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in files)
        advice = " (pickled weights are not read: they can run code)" if pickled else ""
        raise ModelError(
            f"{place.name}: no {' or '.join(hub.WEIGHTS)} in {place.folder}{advice}. "
            "Weights are read from safetensors or GGUF"
        )
    return place
