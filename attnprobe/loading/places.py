"""Where a model's files are: the package, a folder, a GGUF file, or the hub's cache."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from importlib import resources, util
from pathlib import Path

from attnprobe.errors import InputError, ModelError
from attnprobe.loading import hub

BUNDLED = "bundled"
"""The source that names the small GPT-2 within this package."""


@dataclass(frozen=True)
class Place:
    """A folder with a model's files.

    `gguf` tells transformers which of them holds everything; `pickled`, that the weights are there
    as a pickle only, which was asked for.
    """

    name: str
    folder: Path
    gguf: dict[str, str] = field(default_factory=dict)
    pickled: bool = False


def locate(source: str, revision: str | None, trust_remote_code: bool, pickle: bool) -> Place:
    """Find a model's files, and download them where the source is a hub id.

    Raises:
        InputError: a revision of a local model.
        ModelError: no such model, or no files in it that can be read.
    """
    path = Path(source)
    is_gguf = path.suffix.lower() == ".gguf"
    if not (source == BUNDLED or is_gguf or path.exists()):
        folder = hub.fetch(source, revision, code=trust_remote_code, pickle=pickle)
        return _checked(Place(f"{source}@{folder.name[:12]}", folder), pickle)
    if revision is not None:
        raise InputError(f"{source} is local, and only a hub id has revisions: got {revision!r}")
    if source == BUNDLED:
        return _checked(Place(BUNDLED, Path(str(resources.files("attnprobe") / BUNDLED))), False)
    if is_gguf:
        return _gguf(source, path)
    if not path.is_dir():
        raise ModelError(f"{source} is a file: expected a folder, a .gguf file or a hub id")
    return _checked(Place(source, path), pickle)


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


def _checked(place: Place, pickle: bool) -> Place:
    """Refuse a folder that transformers would misread or report unclearly."""
    files = {file.name for file in place.folder.iterdir()} if place.folder.is_dir() else set()
    if "config.json" not in files:
        packed = sorted(name for name in files if name.endswith(".gguf"))
        advice = f"; it holds {packed[0]}: give that file's path" if packed else ""
        raise ModelError(f"{place.name}: no config.json in {place.folder}, so no model{advice}")
    if "adapter_config.json" in files:
        raise ModelError(
            f"{place.name} holds an adapter, which is laid over another model: load both with peft "
            "and pass (model, tokenizer)"
        )
    if not files.intersection(hub.WEIGHTS):
        if pickle and files.intersection(hub.PICKLES):
            return _of_one_folder(replace(place, pickled=True), files, hub.PICKLES)
        pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in files)
        advice = (
            " (pickled weights are not read unless load(…, pickle=True) asks for it: they can be "
            "made to run code)"
            if pickled
            else ""
        )
        raise ModelError(
            f"{place.name}: no {' or '.join(hub.WEIGHTS)} in {place.folder}{advice}. "
            "Weights are read from safetensors or GGUF"
        )
    return _of_one_folder(place, files, hub.WEIGHTS)


def _of_one_folder(place: Place, files: set[str], kind: tuple[str, str]) -> Place:
    """Refuse weights whose index names other files than of its own kind in the same folder.

    Raises:
        ModelError: so it does, or it is no index.
    """
    whole, index_name = kind
    if whole in files:
        return place
    ending = Path(whole).suffix
    try:
        index = json.loads((place.folder / index_name).read_text(encoding="utf-8"))
        names = {str(name) for name in index["weight_map"].values()}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ModelError(f"{place.name}: {index_name} is damaged: no weight_map in it") from None
    for name in sorted(names):
        if Path(name).name != name or not name.endswith(ending):
            raise ModelError(
                f"{place.name}: {index_name} names {name!r}: expected {ending} files in the same "
                "folder"
            )
    return place
