"""Models from strangers: `load` runs none of their code, and reads no pickle, unless told to."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hub import Client, Hub, save_gpt2, total
from safetensors.torch import load_file

from attnprobe.errors import InputError, ModelError
from attnprobe.models import load


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gpt2(tmp_path_factory.mktemp("gpt2"), seed=1)


@pytest.fixture
def copy(gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder to spoil, and a place of its own for code that is trusted."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.syspath_prepend(tmp_path / "m")
    return Path(shutil.copytree(gpt2, tmp_path / "copy"))


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | changes))


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.write_text, (self.mark, "ran"))


def marked(mark: Path, code: str) -> str:
    return f"import pathlib\npathlib.Path({str(mark)!r}).write_text('ran')\n{code}\n"


def of_config(folder: Path, mark: Path) -> None:
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    edit(folder / "config.json", auto_map=classes)
    edit(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    code = """
from transformers import GPT2Config, GPT2LMHeadModel
class Config(GPT2Config): pass
class Model(GPT2LMHeadModel): config_class = Config
"""
    (folder / "own.py").write_text(marked(mark, code))


def of_an_unknown_type(folder: Path, mark: Path) -> None:
    of_config(folder, mark)
    edit(folder / "config.json", model_type="own")


def of_the_tokenizer(folder: Path, mark: Path) -> None:
    classes = {"AutoTokenizer": ["own.Tokenizer", None]}
    edit(folder / "tokenizer_config.json", tokenizer_class="Tokenizer", auto_map=classes)
    code = "from transformers import GPT2Tokenizer\nclass Tokenizer(GPT2Tokenizer): pass"
    (folder / "own.py").write_text(marked(mark, code))


def of_generate(folder: Path, mark: Path) -> None:
    (folder / "custom_generate").mkdir()
    code = marked(mark, "def generate(model, **options): pass")
    (folder / "custom_generate" / "generate.py").write_text(code)


CODE = [of_config, of_an_unknown_type, of_the_tokenizer, of_generate]


@pytest.mark.parametrize("spoil", CODE)
@pytest.mark.parametrize("trusted", [False, True])
def test_code_runs_only_where_it_is_trusted(
    spoil: Callable[[Path, Path], None], trusted: bool, copy: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    spoil(copy, mark)
    try:
        load(copy, trust_remote_code=trusted)
    except ModelError:
        assert not trusted
    # A module of the same content is imported once in a process, so each mark is its own.
    assert mark.exists() is trusted


def test_a_kernel_out_of_a_repository_is_code(copy: Path) -> None:
    edit(copy / "config.json", attn_implementation="somebody/kernel")
    with pytest.raises(ModelError, match=r"'somebody/kernel' of a repository.*trust_remote_code"):
        load(copy)
    assert load(copy, attn="sdpa").model.config._attn_implementation == "sdpa"


def test_trust_and_pickle_are_said_by_the_user_alone(copy: Path) -> None:
    for given in ("no", None, 1):
        with pytest.raises(InputError, match="trust_remote_code is True or False"):
            load(copy, trust_remote_code=given)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="pickle is True or False"):
            load(copy, pickle=given)  # type: ignore[arg-type]


# Pickles


def pickled(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def test_a_pickle_is_read_only_where_it_is_asked_for(copy: Path, gpt2: Path) -> None:
    pickled(copy)
    with pytest.raises(ModelError, match=r"unless load\(…, pickle=True\) asks for it"):
        load(copy)
    ours, theirs = load(copy, pickle=True).model, load(gpt2).model
    assert all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )


def test_where_there_are_safetensors_the_pickle_is_left_alone(copy: Path, tmp_path: Path) -> None:
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(tmp_path / "mark")))
    for asked in (False, True):
        assert load(copy, pickle=asked).model is not None
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("asked", [False, True])
def test_a_pickle_that_does_more_than_hold_tensors_runs_nothing(
    asked: bool, copy: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(mark)))
    with pytest.raises(ModelError):
        load(copy, pickle=asked)
    assert not mark.exists()
    pickle.loads((copy / "pytorch_model.bin").read_bytes())  # noqa: S301  # and it would have
    assert mark.exists()


@pytest.mark.parametrize("name", ["weights.bin", "../model.safetensors", "/etc/model.safetensors"])
def test_an_index_names_files_of_its_kind_beside_it(name: str, copy: Path, tmp_path: Path) -> None:
    (copy / "model.safetensors").rename(tmp_path / "model.safetensors")
    (copy / "weights.bin").write_bytes(pickle.dumps(Payload(tmp_path / "mark")))
    edit(copy / "model.safetensors.index.json", metadata={}, weight_map={"wte.weight": name})
    with pytest.raises(ModelError, match=r"expected \.safetensors files in the same folder"):
        load(copy)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("content", ["[]", "{", '{"weight_map": 3}', "\udcff"])
def test_an_index_that_is_none_is_refused(content: str, copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    index = copy / "model.safetensors.index.json"
    index.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ModelError, match=r"index\.json is damaged: no weight_map in it"):
        load(copy)


def test_an_adapter_is_laid_over_another_model(copy: Path, gpt2: Path) -> None:
    edit(copy / "adapter_config.json", peft_type="LORA", base_model_name_or_path=str(gpt2))
    with pytest.raises(ModelError, match="load both with peft"):
        load(copy)


# The hub


def test_of_the_hub_neither_code_nor_pickles_are_fetched(
    gpt2: Path, copy: Path, tmp_path: Path
) -> None:
    code = tmp_path / "code"
    shutil.copytree(copy, code)
    of_config(code, tmp_path / "mark")
    (code / "pytorch_model.bin").write_bytes(b"a pickle")
    pickled(copy)
    with Hub() as hub, Client(hub.url, tmp_path / "home") as client:
        hub.add("own/code", code)
        hub.add("own/pickle", copy)
        assert client.load("own/code")["total"] == pytest.approx(total(gpt2))
        assert client.load("own/pickle")["error"] == "ModelError"
        asked = "\n".join(hub.requests)
        assert "model.safetensors" in asked
        assert ".py" not in asked
        assert ".bin" not in asked
        assert not (tmp_path / "mark").exists()
        assert client.load("own/pickle", pickle=True)["total"] == pytest.approx(total(gpt2))
        assert "pytorch_model.bin" in "\n".join(hub.requests)
        client.load("own/code", trust_remote_code=True)
        assert (tmp_path / "mark").exists()
