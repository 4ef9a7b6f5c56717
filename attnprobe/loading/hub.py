"""An id on the Hugging Face hub → a folder in the hub's cache, within seconds or not at all."""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from pathlib import Path

from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_url,
    is_offline_mode,
    scan_cache_dir,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    CacheNotFound,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import httpx, validate_repo_id  # type: ignore[attr-defined]

from attnprobe.errors import ModelError
from attnprobe.files import replacing

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""The files of which a folder must hold one to be a model with safetensors weights."""

PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""The same of pickled weights, which are read only where that is asked for."""

_DOWNLOADS = ["*.json", "*.txt", "*.model", "*.jinja", "model.safetensors*", "model-*.safetensors"]
_PROBE_SECONDS = 4

Reached = tuple[str | None, str]
"""A model's commit on the hub, or None and why the hub is not reached."""

logger = logging.getLogger(__name__)


def fetch(
    source: str, revision: str | None = None, *, code: bool = False, pickle: bool = False
) -> Path:
    """Download a model, or take it from the cache where the hub cannot be reached.

    Gives the folder of one commit, named after it. `code` asks for the model's Python files too,
    and `pickle` for pickled weights, where there are no others.

    Raises:
        ModelError: no such model or revision, none this user may read, or the hub cannot be
            reached and the cache does not hold the model.
    """
    try:
        validate_repo_id(source)
    except HFValidationError:
        raise ModelError(
            f"there is no folder {source!r}, and it cannot be a hub id. {_what_works()}"
        ) from None
    commit, unreachable = _reach(source, revision)
    if commit is not None:
        folder = _download(source, revision, commit, code)
        if pickle and not any((folder / name).exists() for name in WEIGHTS):
            folder = _download(source, revision, commit, code, "pytorch_model*.bin")
        return folder
    config = try_to_load_from_cache(source, "config.json", revision=revision)
    if not isinstance(config, str):
        at = "" if revision is None else f" at revision {revision!r}"
        raise ModelError(
            f"{source!r}{at} is neither a folder nor in the hub's cache, and the hub at "
            f"{constants.ENDPOINT} cannot be reached ({unreachable}). {_what_works()}"
        )
    logger.warning("%s is taken from the cache: the hub is not reached (%s)", source, unreachable)
    return Path(config).parent


def _reach(source: str, revision: str | None) -> Reached:
    """Ask the hub for the model's config: its commit if it is there, the reason if the hub is not.

    The question is asked in a thread that can be left behind: a name look-up knows no timeout.

    Raises:
        ModelError: the hub's answer is no.
    """
    if is_offline_mode():
        return None, "HF_HUB_OFFLINE is set"
    answers: queue.SimpleQueue[Reached | ModelError] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(_ask(source, revision)), daemon=True).start()
    try:
        answer = answers.get(timeout=_PROBE_SECONDS + 1)
    except queue.Empty:
        return None, f"no answer within {_PROBE_SECONDS + 1} seconds"
    if isinstance(answer, ModelError):
        raise answer
    return answer


def _ask(source: str, revision: str | None) -> Reached | ModelError:
    url = hf_hub_url(source, "config.json", revision=revision)
    page = f"{constants.ENDPOINT}/{source}"
    try:
        commit = get_hf_file_metadata(url, timeout=_PROBE_SECONDS).commit_hash
    except GatedRepoError:
        return ModelError(
            f"{source!r} is gated: ask for access at {page}, then log in with `hf auth login`"
        )
    except RevisionNotFoundError:
        return ModelError(f"{source!r} has no revision {revision!r}: see {page}/tree/main")
    except RemoteEntryNotFoundError:
        return ModelError(
            f"{source!r} has no config.json on the hub, so transformers cannot load it. If it "
            "holds a .gguf file, download that and give its path"
        )
    except HfHubHTTPError as error:
        status = error.response.status_code
        if isinstance(error, RepositoryNotFoundError) or status in (401, 403):
            return ModelError(
                f"there is no folder {source!r}, and the hub shows no such model to you (status "
                f"{status}): check the name, or log in with `hf auth login` if it is private"
            )
        return None, f"it answers with status {status}"
    except (httpx.HTTPError, OSError) as error:
        return None, f"{type(error).__name__}: {error}"
    return (None, "its answer names no commit") if commit is None else (commit, "")


def _download(source: str, revision: str | None, commit: str, code: bool, *more: str) -> Path:
    """Download one commit. Only when all of it is here, and is what the hub says, does the cache's
    note of the revision name it: until then, what was there before is what is taken offline."""
    cache = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=source, repo_type="model")
    note = cache / "refs" / (revision or constants.DEFAULT_REVISION)
    try:
        known = revision == commit or (note.is_file() and note.read_text() == commit)
        held = set((cache / "blobs").glob("*"))
        folder = Path(
            snapshot_download(
                source,
                revision=commit,
                allow_patterns=[*_DOWNLOADS, *(["*.py"] if code else []), *more],
                ignore_patterns=None if code else ["*/*"],  # other frameworks' weights, examples
                etag_timeout=_PROBE_SECONDS,
            )
        )
        _check_content(source, folder, held if known else set())
        if not known:
            note.parent.mkdir(parents=True, exist_ok=True)
            with replacing(note) as file:
                file.write(commit.encode())
    except (httpx.HTTPError, OSError, ValueError) as error:
        raise ModelError(f"the download of {source!r} failed: {error}") from error
    return folder


def _check_content(source: str, folder: Path, held: set[Path]) -> None:
    """Compare files with the hub's checksums, by which the cache names them; `held` were before.

    Raises:
        ModelError: one differs; it is taken out of the cache.
    """
    before = {one.resolve() for one in held}
    for file in folder.rglob("*"):
        blob = file.resolve()
        if not file.is_symlink() or blob in before:
            continue
        with blob.open("rb") as content:
            if len(blob.name) == 64:
                found = hashlib.file_digest(content, "sha256").hexdigest()
            else:  # as git names it
                header = b"blob %d\0" % blob.stat().st_size
                found = hashlib.sha1(header + content.read()).hexdigest()
        if found != blob.name:
            file.unlink()
            blob.unlink()
            raise ModelError(
                f"the download of {source!r} failed: the content of {file.name} is not what the "
                f"hub's checksum says ({found[:12]}…, expected {blob.name[:12]}…). It was removed: "
                "try again"
            )


def _what_works() -> str:
    cached = ", ".join(_cached_models()) or "none yet"
    return (
        "What works without the hub: 'bundled', a folder, a .gguf file, "
        f"or a model in the cache ({cached})"
    )


def _cached_models() -> list[str]:
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    files = {
        repo.repo_id: {file.file_name for commit in repo.revisions for file in commit.files}
        for repo in repositories
        if repo.repo_type == "model"
    }
    return sorted(
        name
        for name, held in files.items()
        if "config.json" in held and not held.isdisjoint(WEIGHTS)
    )
