"""Faults of the disk, the hub and the environment: said clearly, and nothing good is lost."""

import hashlib
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hub import Client, Hub, save_gpt2, total
from typer.testing import CliRunner

import attnprobe as ap
from attnprobe import cli
from attnprobe.loading import hub as hub_module

COMMANDS = {
    "page.html": ["view", "--kind", "attention"],
    "table.csv": ["table"],
}


def run(*args):
    """The command, in this process."""
    return CliRunner().invoke(cli.app, list(args))


# The disk


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory):
    """A disk of 32 KiB, if this machine lets one be made."""
    place = tmp_path_factory.mktemp("disk")
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk(small_disk, name):
    out = small_disk / name
    out.write_text("of yesterday")
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * 20_000)
    text = "The children were playing in the green park " * 3
    done = run(*COMMANDS[name], text, "--out", str(out))
    filler.unlink()
    assert done.exit_code == 2
    assert f"cannot write {out}: No space left on device" in done.stderr
    assert out.read_text() == "of yesterday"
    assert [one.name for one in small_disk.iterdir()] == [name]
    out.unlink()


def test_a_disk_that_may_only_be_read(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    try:
        done = run("table", "--out", str(small_disk / "t.csv"), "--model", "no/such/model")
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert done.exit_code == 2
    assert f"nothing may be written to {small_disk}" in done.stderr
    assert "no/such/model" not in done.stderr  # refused before any work


def test_a_file_larger_than_may_be(tmp_path):
    """As a quota has it: what is written stops in the middle."""
    out = tmp_path / "page.html"
    out.write_text("of yesterday")

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        done = run("view", "--kind", "head", "--out", str(out))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.exit_code == 2
    assert f"cannot write {out}: File too large" in done.stderr
    assert out.read_text() == "of yesterday"
    assert list(tmp_path.iterdir()) == [out]


def test_killed_while_writing(tmp_path):
    """A page is the one of before or the new one, whole, whenever the process is killed."""
    out = tmp_path / "page.html"
    view = ap.View("a page", "x" * 3_000_000 + "end", 10, "")
    sizes, left = [0], set()
    for number in range(240):
        if number >= 40 and left and max(sizes) == 3_000_003:
            break
        out.write_text("of yesterday")
        child = os.fork()
        if not child:
            try:
                while True:
                    view.save(out)
            finally:
                os._exit(1)
        rounds, step = divmod(number, 40)  # a busy machine takes longer to get there
        threading.Event().wait(step / 2000 * 2**rounds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        text = out.read_text()
        assert text == "of yesterday" or (len(text) == 3_000_003 and text.endswith("end"))
        sizes.append(len(text))
        left |= {one.name for one in tmp_path.iterdir() if one != out}
    assert max(sizes) == 3_000_003  # some were killed after they had written,
    assert left  # and some while they wrote: into a file of another name
    assert all(name.startswith(".attnprobe.") for name in left)


# The environment


@pytest.mark.parametrize("home", ["/proc/nothing", None])
def test_without_a_home(tmp_path, home):
    """Neither HOME nor the hub's cache can be written, or even be."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG"))}
    env.pop("HOME", None)
    env |= {"OMP_NUM_THREADS": "1"} | ({} if home is None else {"HOME": home, "HF_HOME": home})
    out = tmp_path / "heatmap.svg"
    done = subprocess.run(
        [sys.executable, "-m", "attnprobe", "view", "--kind", "heatmap", "--out", str(out)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert out.exists()


def test_a_cache_that_cannot_be_written(gpt2_folder, tmp_path):
    """HF_HOME names a file: nothing can be put in it."""
    (tmp_path / "home").write_text("a file")
    with Hub() as hub, Client(hub.url, tmp_path / "home") as client:
        hub.add("gpt2", gpt2_folder)
        outcome = client.load("gpt2")
        assert outcome["error"] == "ModelError"
        assert f"Not a directory: '{tmp_path / 'home'}" in outcome["message"]
        assert client.load("bundled")["name"] == "bundled"


# The hub


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory):
    return save_gpt2(tmp_path_factory.mktemp("gpt2"), seed=1)


@pytest.fixture(scope="module")
def newer(tmp_path_factory):
    return save_gpt2(tmp_path_factory.mktemp("newer"), seed=2)


FAULTS = {
    401: "401",
    404: "404",
    500: "500",
    "stops": "peer closed connection",
    "stalls": "timed out",
    "differs": "model.safetensors is not what the hub's checksum says",
}


def test_a_newer_model_that_does_not_arrive(gpt2_folder, newer, tmp_path):
    """The error says what was wrong; what the cache held is still there, and the next try works."""
    commit = hashlib.sha1(b"newer").hexdigest()
    with Hub() as hub, Client(hub.url, tmp_path, HF_HUB_DOWNLOAD_TIMEOUT="1") as client:
        hub.add("gpt2", gpt2_folder)
        assert client.load("gpt2")["total"] == pytest.approx(total(gpt2_folder))
        hub.repositories["gpt2"].commits[commit] = newer
        hub.repositories["gpt2"].branches["main"] = commit
        for fault, said in FAULTS.items():
            with hub.spoiling("model.safetensors", fault):
                outcome = client.load("gpt2")
            assert outcome["error"] == "ModelError"
            assert "the download of 'gpt2' failed" in outcome["message"]
            assert said in outcome["message"]
            assert outcome["seconds"] < 40
            with hub.answering(503):
                assert client.load("gpt2")["total"] == pytest.approx(total(gpt2_folder))
        after = client.load("gpt2")
    assert after["total"] == pytest.approx(total(newer))
    assert after["name"] == f"gpt2@{commit[:12]}"


@pytest.mark.parametrize("status", [429, 500])
def test_a_hub_that_refuses_at_the_first_question(gpt2_folder, tmp_path, status):
    with Hub() as hub, Client(hub.url, tmp_path) as client:
        hub.add("gpt2", gpt2_folder)
        with hub.answering(status):
            outcome = client.load("gpt2")
        assert f"it answers with status {status}" in outcome["message"]
        assert client.load("gpt2")["total"] == pytest.approx(total(gpt2_folder))


def test_a_download_that_was_killed_is_not_taken_for_the_model(gpt2_folder, newer, tmp_path):
    """Offline, the older model is taken; with the hub, what came half-way is looked at again."""
    home = tmp_path / "home"
    with Hub() as hub:
        hub.add("gpt2", gpt2_folder)
        with Client(hub.url, home) as client:
            client.load("gpt2")
        commit = hashlib.sha1(b"newer").hexdigest()
        hub.repositories["gpt2"].commits[commit] = newer
        hub.repositories["gpt2"].branches["main"] = commit
        with hub.spoiling("model.safetensors", "stalls"), Client(hub.url, home) as client:
            print('["gpt2", {}]', file=client._process.stdin, flush=True)
            while not any(
                one.startswith("GET") and one.endswith(f"{commit}/model.safetensors")
                for one in hub.requests
            ):
                threading.Event().wait(0.01)
            client._process.kill()
            hub.stalled.set()
        with hub.answering(503), Client(hub.url, home) as client:
            assert client.load("gpt2")["total"] == pytest.approx(total(gpt2_folder))
        with Client(hub.url, home) as client:
            assert client.load("gpt2")["total"] == pytest.approx(total(newer))


@pytest.mark.parametrize("kind", ["sha1", "sha256"])
def test_both_kinds_of_checksum(tmp_path, kind):
    """Small files are named as git names them, large ones by their SHA-256."""
    content = b"weights"
    if kind == "sha256":
        name = hashlib.sha256(content).hexdigest()
    else:
        name = hashlib.sha1(b"blob 7\0" + content).hexdigest()
    blob = tmp_path / name
    blob.write_bytes(content)
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(blob)
    hub_module._check_content("some/model", folder, set())
    blob.write_bytes(b"weighta")
    hub_module._check_content("some/model", folder, {blob})  # looked at when it came
    with pytest.raises(ap.ModelError, match=r"content of model\.safetensors is not what"):
        hub_module._check_content("some/model", folder, set())
    assert not blob.exists()
    assert list(folder.iterdir()) == []


def test_the_tests_hub_spoils_what_it_is_told_to(gpt2_folder):
    """Else the faults above would be none."""
    import urllib.error
    import urllib.request

    with Hub() as hub:
        hub.add("gpt2", gpt2_folder)
        url = f"{hub.url}/gpt2/resolve/main/model.safetensors"
        whole = urllib.request.urlopen(url).read()
        assert whole == (Path(gpt2_folder) / "model.safetensors").read_bytes()
        with hub.spoiling("model.safetensors", "differs"):
            other = urllib.request.urlopen(url).read()
        with hub.spoiling("model.safetensors", 404), pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(url)
    assert len(other) == len(whole)
    assert sum(a != b for a, b in zip(other, whole, strict=True)) == 1
