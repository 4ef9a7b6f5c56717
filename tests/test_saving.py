"""`save` and `load_capture`: exact, whole at every moment, and closed to what does not add up."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from samples import HOSTILE, IDS, mistral
from transformers import BloomConfig, BloomForCausalLM, T5Config, T5ForConditionalGeneration

import attnprobe as ap
from attnprobe.biases import ByDistance, ByKey
from attnprobe.keeping import on_device
from attnprobe.saving import captures
from attnprobe.saving.reading import DamagedError
from attnprobe.saving.schema import saved_fields
from attnprobe.saving.tensors import DTYPES

TEXTS = ["The children were playing", "Once upon a time there was a little girl"]


def t5():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=101,
        d_model=30,
        d_kv=7,
        d_ff=40,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        initializer_factor=5.0,
    )
    return T5ForConditionalGeneration(config).eval()


def bloom():
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=101, hidden_size=60, n_layer=2, n_head=6, initializer_range=0.5)
    return BloomForCausalLM(config).eval()


def content(value):
    """All that a record holds but the model and what is counted, tensors as bytes."""
    if isinstance(value, torch.Tensor):
        numbers = value.contiguous().reshape(-1).view(torch.uint8).tolist()
        return value.dtype, tuple(value.shape), numbers
    if is_dataclass(value):
        skipped = ("lm", "module", "parent", "writes", "origin")
        return type(value), {
            one.name: content(getattr(value, one.name))
            for one in fields(value)
            if one.name not in skipped
        }
    if isinstance(value, tuple):
        return tuple(map(content, value))
    if isinstance(value, dict):
        return {name: content(one) for name, one in value.items()}
    return repr(value)


def rows(report):
    return [repr(row) for row in report.rows], report.summary, str(report)


@pytest.fixture(scope="module")
def lm():
    return ap.load("bundled")


@pytest.fixture
def saved(lm, tmp_path):
    """A folder with a capture of two texts."""
    ap.save(ap.capture(lm, TEXTS), tmp_path / "cap")
    return tmp_path / "cap"


CAPTURES = {
    "bundled": lambda: ap.capture(ap.load("bundled"), TEXTS),
    "eager": lambda: ap.capture(ap.load("bundled", attn="eager"), TEXTS, padding_side="left"),
    "bfloat16": lambda: ap.capture(ap.load("bundled", dtype="bfloat16"), TEXTS[1]),
    "float16": lambda: ap.capture(ap.load("bundled", dtype="float16", attn="eager"), TEXTS),
    "hostile": lambda: ap.capture(ap.load("bundled"), [*HOSTILE[:4], "\ud7ff\u0000\u2028 é"]),
    "some layers": lambda: ap.capture(ap.load("bundled"), TEXTS, layers=[1, 3]),
    "grouped heads, a window": lambda: ap.capture(mistral(), [IDS, IDS[:5]]),
    "a bias by key": lambda: ap.capture(bloom(), [IDS, IDS[:5]], padding_side="left"),
    "a bias by distance": lambda: ap.capture(t5(), [IDS, IDS[:5]], target=[[0, 4, 7], [0, 9]]),
    "cross attention": lambda: ap.capture(t5(), [IDS, IDS[:5]], target=[[0, 4], [0, 9]]).cross,
}


@pytest.mark.parametrize("name", CAPTURES)
def test_what_is_loaded_is_what_was_saved(name, tmp_path):
    cap = CAPTURES[name]()
    ap.save(cap, tmp_path / "cap")
    alone, again = (ap.load_capture(tmp_path / "cap", lm) for lm in (None, cap.lm))
    assert content(alone) == content(again) == content(cap)
    assert alone.lm is None
    assert again.lm is cap.lm
    assert [call.module for call in again.calls] == [call.module for call in cap.calls]
    assert [call.parent for call in again.calls] == [call.parent for call in cap.calls]
    assert rows(ap.verify(again)) == rows(ap.verify(cap))
    ours, theirs = ap.verify(cap), ap.verify(alone)
    without = {"projection", "merge", "logits"}
    assert [repr(row) for row in theirs.rows if row.check not in without] == [
        repr(row) for row in ours.rows if row.check not in without
    ]
    asked = [row for row in theirs.rows if row.check in without]
    assert {row.verdict for row in asked} == {"not_checked"}
    assert {row.reason for row in asked if row.check != "logits"} == {
        "the capture has no model with it"
    }
    assert (theirs.model, theirs.model_layers) == (ours.model, ours.model_layers)
    ap.save(alone, tmp_path / "again")  # and what it knows of its model goes on
    assert content(ap.load_capture(tmp_path / "again", cap.lm)) == content(cap)


def test_the_tables_and_pictures_of_a_loaded_capture_are_the_same(lm, saved):
    cap, alone = ap.capture(lm, TEXTS), ap.load_capture(saved)
    assert torch.equal(ap.weights(alone, 1, text=1), ap.weights(cap, 1, text=1))
    assert ap.table(alone).equals(ap.table(cap))
    assert ap.attention_view(alone, text=1).html == ap.attention_view(cap, text=1).html
    assert repr(alone) == repr(cap)
    with pytest.raises(ap.InputError, match="no model"):
        ap.logit_contributions(alone, "and")


def test_the_tensors_can_be_read_by_anybody(lm, saved):
    (file,) = saved.glob("*.safetensors")
    cap, tensors = ap.capture(lm, TEXTS), load_file(file)
    assert torch.equal(tensors["calls.2.query"], cap.calls[2].query)
    assert torch.equal(tensors["output"], cap.output)
    assert {one.dtype for one in tensors.values()} <= set(DTYPES.values())


def test_nothing_is_stored_twice_or_at_more_than_it_takes(lm, tmp_path):
    cap = ap.capture(lm, [" ".join(TEXTS * 4), "Once"])
    mask = cap.calls[0].mask
    assert mask.data_ptr() == cap.calls[1].mask.data_ptr()  # (2, 1, T, T)
    wide = mask.expand(-1, 6, -1, -1)
    calls = tuple(replace(call, mask=wide) for call in cap.calls)
    ap.save(replace(cap, calls=calls), tmp_path / "cap")
    (file,) = (tmp_path / "cap").glob("*.safetensors")
    tensors = load_file(file)
    assert [name for name in tensors if name.endswith(".mask")] == ["calls.0.mask"]
    assert tensors["calls.0.mask"].shape == mask.shape
    again = ap.load_capture(tmp_path / "cap")
    assert {call.mask.data_ptr() for call in again.calls} == {again.calls[0].mask.data_ptr()}
    assert again.calls[0].mask.stride()[1] == 0
    assert torch.equal(again.calls[3].mask, wide)


def test_numbers_that_json_has_no_name_for_come_back(lm, tmp_path):
    cap = ap.capture(lm, TEXTS)
    odd = replace(cap.calls[0], scaling=float("nan"), scaled_before=0.1 + 0.2)
    ap.save(replace(cap, calls=(odd, *cap.calls[1:])), tmp_path / "cap")
    again = ap.load_capture(tmp_path / "cap").calls[0]
    assert again.scaling != again.scaling
    assert again.scaled_before == 0.1 + 0.2


def test_keys_that_were_written_into_are_still_known_to_be(lm, tmp_path):
    cap = ap.capture(lm, TEXTS)
    cap.calls[1].key.add_(1)
    assert [call.written for call in cap.calls] == [False, True, False, False]
    ap.save(cap, tmp_path / "cap")
    again = ap.load_capture(tmp_path / "cap", lm)
    assert [call.written for call in again.calls] == [False, True, False, False]


# The model


def test_another_model_is_refused(lm, gpt2, saved):
    with pytest.raises(ap.InputError, match=r"of bundled, and .* is another model: a GPT2Model"):
        ap.load_capture(saved, lm.model.transformer)
    with pytest.raises(ap.InputError, match=r"its weight transformer\.wte\.weight differs"):
        ap.load_capture(saved, gpt2())
    half = ap.load("bundled", dtype="bfloat16")
    with pytest.raises(ap.InputError, match=r"differs \(dtype, shape or numbers\)"):
        ap.load_capture(saved, half)
    other = ap.load("bundled")
    with torch.no_grad():
        other.model.transformer.h[2].mlp.c_fc.weight.mul_(1.001)
    with pytest.raises(ap.InputError, match=r"its weight transformer\.h\.2\.mlp\.c_fc\.weight"):
        ap.load_capture(saved, other)
    scaled = ap.load("bundled")
    scaled.model.config.scale_attn_by_inverse_layer_idx = True
    with pytest.raises(ap.InputError, match="its config's scale_attn_by_inverse_layer_idx differs"):
        ap.load_capture(saved, scaled)
    eager = ap.load("bundled", attn="eager")  # the kernel is the model's own affair
    assert ap.verify(ap.load_capture(saved, (eager.model, eager.tokenizer))).passed


def test_of_a_capture_without_a_model_none_is_its_own(lm, tmp_path):
    ap.save(replace(ap.capture(lm, TEXTS), lm=None), tmp_path / "cap")
    with pytest.raises(ap.InputError, match="made without a model"):
        ap.load_capture(tmp_path / "cap", lm)


# Whole at every moment


def test_a_capture_is_replaced_by_the_next(lm, saved):
    (saved / "notes.txt").write_text("mine")
    (before,) = saved.glob("*.safetensors")
    ap.save(ap.capture(lm, "Another"), saved)
    assert ap.load_capture(saved).texts == ("Another",)
    assert not before.exists()
    assert sorted(one.suffix for one in saved.iterdir()) == [".json", ".safetensors", ".txt"]


@pytest.mark.parametrize("after", ["tensors", "json", "rename"])
def test_a_saving_that_fails_leaves_what_was_there(lm, saved, monkeypatch, after):
    def fails(*_):
        raise OSError(28, "No space left on device")

    names = sorted(one.name for one in saved.iterdir())
    if after == "tensors":
        monkeypatch.setattr(captures.Store, "write", fails)
    elif after == "json":
        monkeypatch.setattr(captures, "_text", fails)
    else:
        own = os.fsync
        calls = iter([own, own])  # the file of tensors and its folder; then comes the JSON's
        monkeypatch.setattr(os, "fsync", lambda number: next(calls, fails)(number))
    with pytest.raises(ap.InputError, match=r"cannot write .*: .*No space left"):
        ap.save(ap.capture(lm, "Another"), saved)
    monkeypatch.undo()
    assert sorted(one.name for one in saved.iterdir()) == names
    assert ap.load_capture(saved).texts == tuple(TEXTS)


def test_a_process_that_dies_leaves_what_was_there(saved):
    code = f"""
import os, attnprobe as ap
from attnprobe.saving import captures
cap = ap.capture(ap.load("bundled"), "Another")
captures.parsed = lambda text: os._exit(9)  # the tensors are there, the JSON is not
ap.save(cap, {str(saved)!r})
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 9
    assert ap.load_capture(saved).texts == tuple(TEXTS)


def test_who_reads_while_others_write_finds_one_capture_or_the_other(lm, saved):
    short, long = (ap.capture(lm, text) for text in ("One", "Two three four"))
    ap.save(short, saved)
    done = threading.Event()

    def write():
        for _ in range(15):
            ap.save(long, saved)
            ap.save(short, saved)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(ap.load_capture(saved).texts)
    writer.join()
    assert seen == {short.texts, long.texts}


def test_places_that_cannot_be_written(lm, tmp_path):
    cap = ap.capture(lm, "One")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "taken" / "capture.json").mkdir(parents=True)
    for path in ("file", "taken", "no/such/folder"):
        with pytest.raises(ap.InputError, match="cannot write"):
            ap.save(cap, tmp_path / path)
    for path in ("", None, 3, "a\0b"):
        with pytest.raises(ap.InputError, match="expected a folder's path"):
            ap.save(cap, path)
        with pytest.raises(ap.InputError, match="expected a folder's path"):
            ap.load_capture(path)
    with pytest.raises(ap.InputError, match="expected a capture"):
        ap.save([], tmp_path / "cap")
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "cap").exists()
    meta = on_device(cap.calls[0], torch.device("meta"))
    with pytest.raises(ap.InputError, match=r"calls\.0\.query cannot be saved"):
        ap.save(replace(cap, calls=(meta,)), tmp_path / "cap")


# What does not add up


def rewritten(folder, change, *, sign=True):
    """Change what the JSON says, and put the right SHA-256 to it."""
    told = json.loads((folder / "capture.json").read_text())
    change(told)
    if sign:
        told["sha256"] = captures._digest(told)
    (folder / "capture.json").write_text(json.dumps(told))


def tensors_rewritten(folder, header, numbers=b"", length=None):
    """Another file of tensors, with the right SHA-256."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    data = (len(text) if length is None else length).to_bytes(8, "little") + text + numbers

    def change(told):
        told["tensors"] |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (folder / told["tensors"]["file"]).write_bytes(data)

    rewritten(folder, change)


def put(*path_and_value):
    *path, last, value = path_and_value

    def change(told):
        for one in path:
            told = told[one]
        told[last] = value

    return change


BAD_JSON = {
    "a later version": (put("version", 2), "written by a newer attnprobe, in format 2.*reads 1"),
    "a version that is none": (put("version", True), "tells no version"),
    "another format": (put("format", "gguf"), "not of a capture"),
    "more fields": (put("more", 1), "holds"),
    "a path upwards": (put("tensors", "file", "../../etc/passwd"), "names no file of its own"),
    "a path from the root": (put("tensors", "file", "/etc/passwd"), "names no file of its own"),
    "a pickle": (put("tensors", "file", "capture.pt"), "names no file of its own"),
    "a tensor that is not there": (
        put("capture", "output", {"tensor": "no"}),
        "output: there is no tensor 'no'",
    ),
    "a shape of millions": (
        put("capture", "output", {"tensor": "output", "shape": [2, 10**9, 10**9]}),
        "output: .* cannot be repeated to",
    ),
    "ids repeated a million times": (
        put("capture", "calls", 0, "query", {"tensor": "calls.0.query", "shape": [2, 6, 9, 10**9]}),
        "cannot be repeated",
    ),
    "an order that is none": (
        put("capture", "output", {"tensor": "output", "order": [0, 1, 1]}),
        "expected an order",
    ),
    "text for a number": (put("capture", "calls", 0, "scaling", "1"), r"calls\.0\.scaling"),
    "a truth for a number": (put("capture", "calls", 0, "layer", True), r"calls\.0\.layer"),
    "a number past 64 bits": (put("capture", "calls", 0, "step", 2**70), "64 bits"),
    "a kind that is none": (put("capture", "calls", 0, "kind", "both"), "expected one of 'self'"),
    "a field too many": (put("capture", "calls", 0, "module", "os"), "fields of AttentionCall"),
    "a window of nothing": (put("capture", "calls", 0, "expected_mask", "window", 0), "window"),
    "keys by the billion": (put("capture", "calls", 0, "expected_mask", "keys", 10**9), "keys"),
    "a word that is elsewhere": (put("capture", "words", 0, "words", 0, "span", [0, 4]), "span"),
    "a token in no word": (put("capture", "words", 0, "words", 0, "tokens", []), "one word"),
    "a text too few": (put("capture", "texts", ["One"]), "padding: expected shape"),
    "layers twice": (put("capture", "calls", 0, "layer", 1), "each layer once"),
    "a value of another size": (
        put("capture", "calls", 0, "value", {"tensor": "calls.0.hidden_states"}),
        r"calls\.0\.value: expected shape",
    ),
    "a key that is an id": (put("capture", "calls", 0, "key", {"tensor": "input_ids"}), "dtype"),
    "inputs of another text": (
        put("capture", "inputs", "input_ids", {"tensor": "inputs.attention_mask"}),
        "the capture's own",
    ),
    "inputs for other arguments": (
        put("capture", "inputs", "labels", {"tensor": "input_ids"}),
        "inputs.labels: expected one of",
    ),
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_json_that_does_not_add_up_is_refused(name, saved):
    change, match = BAD_JSON[name]
    rewritten(saved, change)
    with pytest.raises(ap.InputError, match=match) as caught:
        ap.load_capture(saved)
    assert str(saved) in str(caught.value)


BAD_BYTES = {
    "nothing": (b"", "not JSON"),
    "no UTF-8": (b"\xff\xfe{}", "not JSON"),
    "a list": (b"[1]", "expected a JSON object"),
    "depth": (b"[" * 200_000, "not JSON"),
    "breadth": (b"[" + b"{}," * 3_000_000 + b"1]", "more than 4,194,304 values"),
    "a name twice": (b'{"format": 1, "format": 2}', "stands twice"),
    "NaN": (b'{"format": NaN}', "NaN is no number"),
    "a number of a million digits": (b'{"format": ' + b"9" * 10**6 + b"}", "not JSON"),
    "a pickle": (b"\x80\x04cos\nsystem\n(S'true'\ntR.", "not JSON"),
}


@pytest.mark.parametrize("name", BAD_BYTES)
def test_what_is_no_json_is_refused(name, saved):
    data, match = BAD_BYTES[name]
    (saved / "capture.json").write_bytes(data)
    with pytest.raises(ap.InputError, match=match):
        ap.load_capture(saved)


ONE = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}

BAD_TENSORS = {
    "too short": ({"header": b"", "length": 2**20}, "header would take"),
    "a header beyond the file": ({"header": b"{}", "length": 2**62}, "header would take"),
    "a header that is no JSON": ({"header": b"\x80\x04]q."}, "not JSON"),
    "sizes past any memory": (
        {"header": {"a": ONE | {"shape": [2**40, 2**40]}}, "numbers": bytes(24)},
        "takes .* bytes",
    ),
    "a negative size": ({"header": {"a": ONE | {"shape": [-2, -3]}}}, "a shape of sizes"),
    "offsets past the file": ({"header": {"a": ONE}, "numbers": bytes(8)}, "its header tells of"),
    "a gap": (
        {"header": {"a": ONE | {"data_offsets": [8, 32]}}, "numbers": bytes(32)},
        "begins at 8, not at 0",
    ),
    "an overlap": ({"header": {"a": ONE, "b": ONE}, "numbers": bytes(24)}, "begins at 0, not at"),
    "more behind it": ({"header": {"a": ONE}, "numbers": bytes(25)}, "its header tells of"),
    "an unknown dtype": ({"header": {"a": ONE | {"dtype": "OBJ"}}}, "dtype is one of"),
    "a shape that is text": ({"header": {"a": ONE | {"shape": "23"}}}, "a shape of sizes"),
    "truths of other numbers": (
        {
            "header": {"a": {"dtype": "BOOL", "shape": [2], "data_offsets": [0, 2]}},
            "numbers": b"\1\2",
        },
        "neither True nor False",
    ),
    "other tensors": ({"header": {"a": ONE}, "numbers": bytes(24)}, "there is no tensor"),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_that_do_not_add_up_are_refused(name, saved):
    given_, match = BAD_TENSORS[name]
    tensors_rewritten(saved, **given_)
    with pytest.raises(ap.InputError, match=match):
        ap.load_capture(saved)


def test_files_that_are_none_are_refused(saved, tmp_path):
    (file,) = saved.glob("*.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(ap.InputError, match="bytes, and was saved with"):
        ap.load_capture(saved)
    file.unlink()
    with pytest.raises(ap.InputError, match=r"cannot read .*safetensors: No such file"):
        ap.load_capture(saved)
    os.mkfifo(file)
    with pytest.raises(ap.InputError, match="not a regular file"):
        ap.load_capture(saved)
    (saved / "capture.json").unlink()
    os.mkfifo(saved / "capture.json")
    with pytest.raises(ap.InputError, match="not a regular file"):
        ap.load_capture(saved)
    with pytest.raises(ap.InputError, match=r"cannot read .*capture\.json: No such file"):
        ap.load_capture(tmp_path)
    with pytest.raises(ap.InputError, match="cannot read"):
        ap.load_capture(file)


def test_any_damage_is_seen(lm, tmp_path):
    ap.save(ap.capture(lm, "One two"), tmp_path)
    own = content(ap.load_capture(tmp_path))
    files = {one: one.read_bytes() for one in tmp_path.iterdir()}

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def check(data):
        file = data.draw(st.sampled_from(sorted(files)))
        bytes_ = bytearray(files[file])
        at = data.draw(st.integers(0, len(bytes_) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "more", "zeros"])):
            case "flip":
                bytes_[at] ^= data.draw(st.integers(1, 255))
            case "cut":
                del bytes_[at:]
            case "more":
                bytes_[at:at] = data.draw(st.binary(min_size=1, max_size=9))
            case "zeros":
                bytes_[at:] = bytes(len(bytes_) - at)
        file.write_bytes(bytes_)
        try:
            found = ap.load_capture(tmp_path)
        except ap.InputError:
            pass
        else:  # white space in the JSON, or zeros for zeros
            assert content(found) == own
        finally:
            file.write_bytes(files[file])

    check()


def test_a_change_of_the_records_is_a_change_of_the_version():
    """Whoever adds a field raises VERSION, and puts both numbers here anew."""
    told, todo = {}, [ap.Capture, ByKey, ByDistance]
    while todo:
        record = todo.pop()
        told[record.__name__] = {name: str(kind) for name, kind in saved_fields(record).items()}
        for kind in saved_fields(record).values():
            found = [kind, *getattr(kind, "__args__", ())]
            todo += [one for one in found if is_dataclass(one) and one.__name__ not in told]
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
    assert (captures.VERSION, digest) == (1, "0eb3f6a1")


def test_damage_is_an_error_of_its_own():
    assert not issubclass(DamagedError, ap.AttnprobeError)


def test_a_folder_of_other_files_is_left_alone(tmp_path, gpt2):
    cap = ap.capture(gpt2(), [5, 17, 23])
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ap.InputError, match="holds other files and no capture"):
        ap.save(cap, tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["notes.txt"]
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "capture-0123.safetensors").write_bytes(b"half")
    (killed / ".capture.json.0123.tmp").write_bytes(b"half")
    ap.save(cap, killed)
    (killed / "notes.txt").write_text("mine")
    ap.save(cap, killed)  # one with a capture to replace
    assert ap.load_capture(killed).input_ids.tolist() == [[5, 17, 23]]
