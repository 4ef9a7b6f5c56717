"""What each part adds to a logit, against a whole GPT-2 in plain numpy, by hand, and mutants."""

import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from test_projections import TEXTS, small
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model, PreTrainedTokenizerFast

import attnprobe as ap
from attnprobe.effects.residual import STREAMS
from attnprobe.loading.continuations import next_token
from attnprobe.rounding import arithmetic, layer_norm

IDS = TEXTS[0]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
KINDS = ["gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "phi", "phi3", "gpt_neox"]


def sharp(kind, dtype=torch.float32, **options):
    """A small random model whose final norm and biases show, 2 layers of 6 heads, 99 ids."""
    model = small(kind, torch.float32, **options)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.normal_(1.0 if "weight" in name else 0.0, 0.5, generator=generator)
    return model.to(dtype)


def by_part(found):
    """Contributions by (part, layer, head), None where a part has none."""
    rows = found.frame.astype(object).where(found.frame.notna(), None).itertuples(index=False)
    return {tuple(row[:3]): row[3] for row in rows}


def ratios(found):
    """The worst ratio of each check."""
    worst = {}
    for row in found.checks:
        worst[row.check] = max(worst.get(row.check, 0.0), row.ratio)
    return worst


# Independent reference: GPT-2's whole forward in numpy, a part of the residual stream at a time.


def norm(x, weight, bias):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attended_values(query, key, value):
    """softmax(QKᵀ/√d)V of one head, causal, row by row."""
    out = np.zeros_like(value)
    for at in range(len(query)):
        scores = np.array([query[at] @ key[to] for to in range(at + 1)]) / math.sqrt(len(query[0]))
        e = np.exp(scores - scores.max())
        out[at] = sum(w * v for w, v in zip(e / e.sum(), value[: at + 1], strict=True))
    return out


def by_numpy(model, ids, at, word):
    """Each part of the logit of a word behind token `at`, and the logit."""
    weights = {name: w.detach().double().numpy() for name, w in model.named_parameters()}

    def of(name):
        return [weights[f"transformer.{name}.{kind}"] for kind in ("weight", "bias")]

    added = {
        ("embedding", None, None): weights["transformer.wte.weight"][ids],
        ("position", None, None): weights["transformer.wpe.weight"][: len(ids)],
    }
    x = sum(added.values())
    heads = model.config.n_head
    for layer in range(model.config.n_layer):
        w, b = of(f"h.{layer}.attn.c_attn")
        query, key, value = np.split(norm(x, *of(f"h.{layer}.ln_1")) @ w + b, 3, axis=-1)
        w, b = of(f"h.{layer}.attn.c_proj")
        size = x.shape[1] // heads
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            mixed = attended_values(query[:, own], key[:, own], value[:, own])
            added["head", layer, head] = mixed @ w[own]
            x = x + added["head", layer, head]
        added["attention bias", layer, None] = np.tile(b, (len(ids), 1))
        x = x + b
        (w_in, b_in), (w, b) = of(f"h.{layer}.mlp.c_fc"), of(f"h.{layer}.mlp.c_proj")
        inner = gelu(norm(x, *of(f"h.{layer}.ln_2")) @ w_in + b_in)
        added["mlp", layer, None] = inner @ w + b
        x = x + added["mlp", layer, None]
    gain, shift = of("ln_f")
    row = weights["transformer.wte.weight"][word]
    deviation = math.sqrt(((x[at] - x[at].mean()) ** 2).mean() + 1e-5)
    parts = {
        name: row @ ((part[at] - part[at].mean()) / deviation * gain)
        for name, part in added.items()
    }
    parts["final norm bias", None, None] = row @ shift
    return parts, norm(x, gain, shift)[at] @ row


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gpt2_equals_its_whole_forward_in_numpy(dtype):
    model = sharp("gpt2", dtype)
    found = ap.logit_contributions(ap.capture(model, IDS), 42)
    want, logit = by_numpy(model, IDS, len(IDS) - 1, 42)
    tolerance = 1e-11 if dtype == torch.float64 else 2e-4
    assert found.logit_model == pytest.approx(logit, abs=tolerance)
    got = by_part(found)
    assert list(got) == list(want)
    assert got == pytest.approx(want, abs=tolerance)
    assert found.total == pytest.approx(logit, abs=tolerance)
    assert found.verified
    # The parts are far larger than what they are right to, and differ from each other.
    assert np.abs([*want.values()]).min() > 1e-3
    assert len({round(value, 3) for value in want.values()}) == len(want)


def test_one_block_by_hand():
    """Every weight but the embeddings and the last biases is 0, so that what adds is known."""
    config = GPT2Config(n_layer=1, n_head=2, n_embd=4, n_positions=8, vocab_size=5)
    model = GPT2LMHeadModel(config).eval()
    rows = {
        "transformer.wte.weight": [[1, 1, 0, 0], [2, 0, 0, 0], [0, 0, 1, 0], [0] * 4, [3, 1, 4, 1]],
        "transformer.wpe.weight": [[0, 1, 0, 0]] + [[9, 9, 9, 9]] * 7,
        "transformer.h.0.attn.c_proj.bias": [0, 0, 1, 0],
        "transformer.h.0.mlp.c_proj.bias": [2, 2, 2, 5],
        "transformer.ln_f.weight": [1, 2, 1, 1],
        "transformer.ln_f.bias": [0, 0, 0, 7],
    }
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.tensor(rows[name])) if name in rows else weight.zero_()
    found = ap.logit_contributions(ap.capture(model, [1]), 4)
    # x = (2, 0, 0, 0) + (0, 1, 0, 0) + (0, 0, 1, 0) + (2, 2, 2, 5) = (4, 3, 3, 5): less its mean,
    # 15/4, (1, -3, -3, 5)/4, of variance 11/16. u = (3, 1, 4, 1), times the weight (3, 2, 4, 1).
    root = math.sqrt(11 / 16 + 1e-5)
    assert by_part(found) == pytest.approx(
        {
            ("embedding", None, None): (3 * 1.5 - 0.5 * (2 + 4 + 1)) / root,
            ("position", None, None): (2 * 0.75 - 0.25 * (3 + 4 + 1)) / root,
            ("head", 0, 0): 0.0,
            ("head", 0, 1): 0.0,
            ("attention bias", 0, None): (4 * 0.75 - 0.25 * (3 + 2 + 1)) / root,
            ("mlp", 0, None): (-0.75 * (3 + 2 + 4) + 2.25 * 1) / root,
            ("final norm bias", None, None): 7.0,
        },
        rel=1e-6,
    )
    assert found.verified
    assert found.logit_model == pytest.approx((3 - 6 - 12 + 5) / 4 / root + 7, rel=1e-6)


# The families


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_familys_parts_add_up(kind, dtype):
    if (kind, dtype) == ("mixtral", torch.float64):
        pytest.skip("torch's grouped product of experts takes no float64")
    # In float64, transformers' eager kernel makes NaN of padding on the left.
    side = "right" if dtype == torch.float64 else "left"
    cap = ap.capture(sharp(kind, dtype), TEXTS, padding_side=side)
    for text in (0, 1):
        found = ap.logit_contributions(cap, 42, text=text)
        assert found.verified, found
        assert found.error <= found.bound
        assert found.logit_model == cap.output[text, cap.positions(text)[-1], 42].item()
        layers = {"head": 2 * 6, "mlp": 2}
        counts = found.frame["part"].value_counts()
        assert {name: counts[name] for name in layers} == layers
        worst = ratios(found)
        print(kind, dtype, {name: f"{ratio:.2g}" for name, ratio in worst.items()})
        assert list(worst) == ["embedding", "merge", "residual", "norm", "unembedding", "logit"]
        assert worst["merge"] > 0.001  # no bound is more than a thousand times the error
        assert dtype == torch.float64 or worst["residual"] > 0.1
        assert worst["norm"] > 0.001
    assert {name.removesuffix("ForCausalLM").lower() for name in STREAMS} == {
        "gpt2lmheadmodel",
        *(one.replace("_", "") for one in KINDS if one != "gpt2"),
    }


def test_sequential_gpt_neox_adds_up_as_parallel_does():
    found = ap.logit_contributions(
        ap.capture(sharp("gpt_neox", use_parallel_residual=False), IDS), 42
    )
    assert found.verified, found


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("gpt2", {"position", "attention bias", "final norm bias"}),
        ("llama", set()),
        ("phi", {"attention bias", "final norm bias", "unembedding bias"}),
        ("gpt_neox", {"attention bias", "final norm bias"}),
    ],
)
def test_a_model_has_the_parts_that_it_has(kind, extra):
    found = ap.logit_contributions(ap.capture(sharp(kind), IDS), 42)
    assert set(found.frame["part"]) == {"embedding", "head", "mlp"} | extra
    frame = found.frame
    assert frame.columns.tolist() == ["part", "layer", "head", "contribution"]
    assert [str(one) for one in frame.dtypes[1:]] == ["Int64", "Int64", "float64"]
    assert frame["layer"].notna().equals(frame["part"].isin(["head", "attention bias", "mlp"]))
    assert frame["head"].notna().equals(frame["part"].eq("head"))
    heads = frame[frame["part"] == "head"].pivot(
        index="layer", columns="head", values="contribution"
    )
    assert heads.shape == (2, 6)


@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "gpt_neox"])
def test_heads_and_bias_are_what_the_attention_adds(kind):
    model = sharp(kind, torch.float64)
    final = model.get_submodule(STREAMS[type(model).__name__].norm)
    given = []
    with final.register_forward_pre_hook(lambda _, args: given.append(args[0][0, -1].detach())):
        cap = ap.capture(model, IDS)
    added = cap.calls[1].attention_output[0, -1]
    centred = [x - x.mean() if isinstance(final, nn.LayerNorm) else x for x in (*given, added)]
    eps = final.eps if isinstance(final, nn.LayerNorm) else final.variance_epsilon
    root = (centred[0].square().mean() + eps).sqrt()
    want = (model.lm_head.weight[42] * final.weight * centred[1] / root).sum().item()
    frame = ap.logit_contributions(cap, 42).frame
    own = frame[(frame["layer"] == 1) & frame["part"].isin(["head", "attention bias"])]
    assert own["contribution"].sum() == pytest.approx(want, abs=1e-11)
    assert abs(want) > 1e-5  # a million times the tolerance


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_of_a_padded_batch_is_as_it_is_alone(side):
    model = sharp("gpt2", torch.float64)
    batch = ap.capture(model, TEXTS, padding_side=side)
    for text in (0, 1):
        alone = ap.logit_contributions(ap.capture(model, TEXTS[text]), 42)
        found = ap.logit_contributions(batch, 42, text=text)
        assert by_part(found) == pytest.approx(by_part(alone), abs=1e-11)
        assert found.verified


def test_behind_a_word_is_what_a_shorter_text_ends_with():
    model = sharp("qwen2", torch.float64)
    cap = ap.capture(model, IDS)
    shorter = ap.logit_contributions(ap.capture(model, IDS[:8]), 42)
    found = ap.logit_contributions(cap, 42, after=7)
    assert by_part(found) == pytest.approx(by_part(shorter), abs=1e-6)
    assert "(token 7)" in found.title
    assert found.logit_model == cap.output[0, 7, 42].item()
    with pytest.raises(ap.InputError, match="word 19 is out of range"):
        ap.logit_contributions(cap, 42, after=19)


def test_against_is_the_difference_of_two():
    cap = ap.capture(sharp("phi"), IDS)
    one, other = (ap.logit_contributions(cap, word) for word in (42, 17))
    found = ap.logit_contributions(cap, 42, against=17)
    assert found.verified
    want = {name: value - by_part(other)[name] for name, value in by_part(one).items()}
    assert by_part(found) == pytest.approx(want, abs=1e-12)
    assert found.logit_model == pytest.approx(one.logit_model - other.logit_model, abs=1e-12)
    assert by_part(ap.logit_contributions(cap, 42, 42)) == dict.fromkeys(want, 0.0)


# Mutants: a model that does something else, each found at the step where it does so.


def part_of(model, name):
    stream = STREAMS[type(model).__name__]
    if name == "block":
        return model.get_submodule(stream.blocks)[1]
    if name == "W_O":
        modules = dict(part_of(model, "block").named_modules())
        return next(one for name, one in modules.items() if OUTPUT.search(name))
    return model.get_submodule(getattr(stream, name, name))


OUTPUT = re.compile(r"att\w*\.(c_proj|o_proj|dense)$")


def mlp_dropped(model):
    """It is computed, and not added."""
    own, kept = part_of(model, "block"), []
    own.mlp.register_forward_hook(lambda _, args, output: kept.append(output))
    own.register_forward_hook(lambda _, args, output: output - kept[-1])


def heads_swapped(model):
    part_of(model, "W_O").register_forward_pre_hook(
        lambda _, args: args[0].unflatten(-1, (6, -1))[..., [0, 2, 1, 3, 4, 5], :].flatten(-2)
    )


def bias_lost(model):
    layer = part_of(model, "W_O")
    layer.register_forward_hook(lambda _, args, output: output - layer.bias)


def after(name, change):
    """What a module gives, changed."""

    def mutant(model):
        part_of(model, name).register_forward_hook(lambda _, args, output: change(output))

    return mutant


def embedding_scaled(model):
    first = part_of(model, "blocks")[0]
    first.register_forward_pre_hook(lambda _, args: (args[0] * 1.1, *args[1:]))


def one_steered(x):
    """A single number of the stream, moved."""
    x = x.clone()
    x[..., 3] += 1
    return x


MUTANTS = {
    "MLP dropped": (mlp_dropped, "residual", 1),
    "residual scaled": (after("block", lambda x: 1.1 * x), "residual", 1),
    "a norm behind": (after("block", lambda x: F.layer_norm(x, x.shape[-1:])), "residual", 1),
    "a number steered": (after("block", one_steered), "residual", 1),
    "heads swapped": (heads_swapped, "merge", 1),
    "b_O lost": (bias_lost, "merge", 1),
    "embedding scaled": (embedding_scaled, "embedding", None),
    "norm scaled": (after("norm", lambda y: 1.1 * y), "norm", None),
    "no mean": (after("norm", lambda y: y - y.mean(-1, keepdim=True)), "norm", None),
    "logits capped": (after("lm_head", lambda y: 10 * torch.tanh(y / 10)), "unembedding", None),
    "logits scaled": (after("lm_head", lambda y: 1.1 * y), "unembedding", None),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt_neox"])
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_a_mismatch_where_it_stands(name, kind, dtype):
    mutant, check, layer = MUTANTS[name]
    model = sharp(kind, dtype, **({"attention_bias": True} if kind == "llama" else {}))
    mutant(model)
    cap = ap.capture(model, IDS)
    found = ap.logit_contributions(cap, int(cap.output[0, -1].abs().argmax()))
    assert not found.verified
    wrong = {(row.check, row.layer): row.ratio for row in found.checks if row.ratio > 1}
    print(name, kind, dtype, wrong)
    assert set(wrong) - {("logit", None)} == {(check, layer)}
    assert f"MISMATCH: these are not what the model added: {check}" in repr(found)
    if dtype == torch.float32:
        assert max(wrong.values()) > 20


def test_parts_that_are_not_the_models_own_are_a_mismatch():
    """What the records say, changed: a head's output, or the attention's, of a right model."""
    cap = ap.capture(sharp("gpt2"), IDS)
    call = cap.calls[1]
    swapped = dataclasses.replace(
        call, head_output_model=call.head_output_model[:, :, [0, 2, 1, 3, 4, 5]]
    )
    moved = dataclasses.replace(call, attention_output=call.attention_output + 0.01)
    for other, checks in ((swapped, {"merge"}), (moved, {"merge", "residual"})):
        found = ap.logit_contributions(dataclasses.replace(cap, calls=(cap.calls[0], other)), 42)
        wrong = {row.check for row in found.checks if row.ratio > 1}
        assert wrong - {"logit"} == checks
        assert not found.verified


# The bound of LayerNorm


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rounding_of_a_layer_norm_leaves_its_bound(dtype):
    generator = torch.Generator().manual_seed(3)
    for size, spread, mean in ((3, 1e-3, 0), (14, 1, 0), (64, 30, 5), (768, 1, 300), (64, 0, 7)):
        x = (mean + spread * torch.randn(40, 5, size, generator=generator)).to(dtype)
        weight, bias = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
        got = F.layer_norm(x, (size,), weight, bias, 1e-5)
        want, bound = layer_norm(
            x.double(), weight.double(), bias.double(), 1e-5, arithmetic(dtype, "sdpa")
        )
        plain = F.layer_norm(x.double(), (size,), weight.double(), bias.double(), 1e-5)
        torch.testing.assert_close(want, plain, rtol=1e-9, atol=1e-9)
        error = (got.double() - want).abs()
        print(dtype, size, float((error / bound).max()))
        assert error.le(bound).all()
        if mean == 0:
            unit = torch.finfo(dtype).eps
            assert bound.le(8 * unit * (size + 12) * (1 + want.abs() + bias.double().abs())).all()


# Words


@pytest.fixture(scope="module")
def bundled():
    return ap.load("bundled")


def named(tokenizer, word, context="in the", vocabulary=10**6):
    return str(next_token(tokenizer, word, context, vocabulary))


def test_a_word_is_taken_with_the_space_before_it(bundled):
    tokenizer = bundled.tokenizer
    ids = {piece: tokenizer(piece)["input_ids"] for piece in (" garden", " the", "the", ".", "\n")}
    assert all(len(one) == 1 for one in ids.values())
    id_of = {piece: one[0] for piece, one in ids.items()}
    assert named(tokenizer, "garden") == f"' garden' (id {id_of[' garden']})"
    assert named(tokenizer, " garden") == f"' garden' (id {id_of[' garden']})"
    assert named(tokenizer, "the") == f"' the' (id {id_of[' the']})"
    for context in ("she said “", "(", "end.\n", "and "):
        assert named(tokenizer, "the", context) == f"'the' (id {id_of['the']})"
    assert named(tokenizer, ".") == f"'.' (id {id_of['.']})"
    assert named(tokenizer, "\n") == f"'\\n' (id {id_of[chr(10)]})"
    assert named(tokenizer, id_of["the"]) == f"'the' (id {id_of['the']})"
    assert named(tokenizer, id_of[" the"]) == f"' the' (id {id_of[' the']})"
    assert named(None, 7) == "id 7"


def sentencepiece(**words):
    """A tokenizer that, like Llama 2's, writes ▁ for a space and puts one before every text."""
    vocabulary = {"<unk>": 0, "\n": 1, "▁": 2, "▁park": 3, "park": 4, "园": 5, "▁园": 6, "▁only": 7}
    tokenizer = Tokenizer(models.WordLevel(vocabulary | words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Metaspace(prepend_scheme="first")]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_a_tokenizer_that_begins_every_text_with_a_space():
    tokenizer = sentencepiece()
    assert named(tokenizer, "park") == "' park' (id 3)"
    assert named(tokenizer, "park", "(") == "'park' (id 4)"
    assert named(tokenizer, "园") == "'园' (id 5)"  # no spaces in Chinese
    assert named(tokenizer, " 园") == "' 园' (id 6)"
    assert named(tokenizer, 3) == "' park' (id 3)"
    assert named(tokenizer, 4) == "'park' (id 4)"
    with pytest.raises(ap.InputError, match="'green' is not one token here but"):
        named(tokenizer, "green")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("playground games", r"is not one token here but ' .*' \(id \d+\) \+ '.*' \(id \d+\)"),
        ("", "the next word is empty"),
        (-1, "token id -1 is out of range: the model has 0 to 4095"),
        (4096, "token id 4096 is out of range"),
        (True, "expected a whole number for a token id, got True"),
        (None, "expected a whole number for a token id, got None"),
        ("\ud800", "surrogate"),
    ],
)
def test_a_word_that_is_no_token(bundled, word, message):
    cap = ap.capture(bundled, "in the")
    with pytest.raises(ap.InputError, match=message):
        ap.logit_contributions(cap, word)
    if word is not None:  # `against` may be left out
        with pytest.raises(ap.InputError, match=message):
            ap.logit_contributions(cap, 5, against=word)


def test_a_bare_model_takes_ids():
    with pytest.raises(ap.InputError, match="a bare model has no word 'park': give its token id"):
        ap.logit_contributions(ap.capture(sharp("gpt2"), IDS), "park")


# What is refused, and what is left behind


def hooks_of(model):
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())


@pytest.mark.parametrize("kind", ["gemma", "gemma2", "gemma3_text", "opt", "cohere", "bert"])
def test_other_models_are_refused_by_name(kind):
    cap = ap.capture(small(kind), IDS)
    with pytest.raises(
        ap.ModelError, match=rf"how {type(cap.lm.model).__name__} makes .*known are GPT2"
    ):
        ap.logit_contributions(cap, 42)


def test_a_model_without_a_head_and_a_capture_without_a_model_are_refused():
    cap = ap.capture(GPT2Model(GPT2Config(n_layer=1, n_head=2, n_embd=4)).eval(), IDS)
    with pytest.raises(ap.ModelError, match="how GPT2Model makes its logits"):
        ap.logit_contributions(cap, 42)
    with pytest.raises(ap.InputError, match="the capture has no model with it"):
        ap.logit_contributions(dataclasses.replace(cap, lm=None), 42)
    with pytest.raises(ap.InputError, match=r"expected a capture.*got str"):
        ap.logit_contributions("a text", 42)


def test_a_model_that_has_changed_since_is_refused():
    model = sharp("gpt2")
    cap = ap.capture(model, IDS)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[3, 5] += 0.1
    with pytest.raises(ap.ModelError, match="no longer gives the logits that were captured"):
        ap.logit_contributions(cap, 42)
    assert hooks_of(model) == 0


def test_a_capture_made_inside_an_edit_says_so():
    model = sharp("gpt2")
    with ap.edit(model, heads=[(1, 2)], head_output="zero"):
        cap = ap.capture(model, IDS)
    with pytest.raises(ap.ModelError, match=r"or it was captured inside an edit\. Capture"):
        ap.logit_contributions(cap, 42)


class Adapted(nn.Linear):
    """What an adapter puts in a Linear's place."""


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("lm_head", lambda old: Adapted(60, 99, bias=False), "lm_head is a .*Adapted"),
        (
            "model.layers.1.self_attn.o_proj",
            lambda old: Adapted(60, 60),
            "heads of layer 1 .*Adapted",
        ),
        (
            "model.norm",
            lambda old: nn.Identity(),
            "model.norm is a Identity; expected is a LayerNorm or",
        ),
    ],
)
def test_layers_that_are_no_plain_ones_are_refused(name, make, message):
    model = sharp("llama")
    model.set_submodule(name, make(model.get_submodule(name)))
    with pytest.raises(ap.ModelError, match=message):
        ap.logit_contributions(ap.capture(model, IDS), 42)


def test_no_hook_is_left_behind():
    model = sharp("llama")
    cap = ap.capture(model, IDS)
    before = model.model.layers[1].mlp.forward
    ap.logit_contributions(cap, 42)
    assert hooks_of(model) == 0

    def fail(x):
        raise RuntimeError("in the middle")

    model.model.layers[1].mlp.forward = fail
    with pytest.raises(RuntimeError, match="in the middle"):
        ap.logit_contributions(cap, 42)
    assert hooks_of(model) == 0
    model.model.layers[1].mlp.forward = before
    assert torch.equal(ap.capture(model, IDS).output, cap.output)


# What a person sees


TEXT = "“Oh, dear!” said Alice. “I don’t know what to do,” said"


def test_a_sentence_from_a_book(bundled):
    cap = ap.capture(bundled, TEXT)
    found = ap.logit_contributions(cap, "the", against="Alice")
    assert found.frame.attrs == {
        "model": "bundled",
        "text": TEXT,
        "after": "said",
        "token": len(cap.words_of(0).tokens) - 1,
        "word": " the",
        "against": " Alice",
        "unit": "logits",
        "logit_model": found.logit_model,
    }
    print(found)
    assert found.verified
    assert found.total == pytest.approx(found.logit_model, abs=1e-4)
    assert len(found.frame) == 2 + 4 * (6 + 1 + 1) + 1
    shown = repr(found).splitlines()
    assert shown[0].startswith("What adds to the logit of ' the' (id ")
    assert "less that of ' Alice' (id " in shown[0]
    assert "after 'said' (token " in shown[0]
    assert shown[-1].startswith("VERIFIED: 35 parts add up to ")
    strongest = found.frame.loc[found.frame["contribution"].abs().idxmax()]
    assert found.top(3).iloc[0].equals(strongest)
    assert len(found.top(3)) == 3
    assert found.top(100).index.sort_values().equals(found.frame.index)
    # Only a head can have found the name: the model card's induction head, by what followed `said`.
    heads = found.frame[found.frame["part"] == "head"].set_index(["layer", "head"])["contribution"]
    assert heads.idxmin() == (1, 0)
    assert heads.min() < 3 * heads.drop((1, 0)).min()


def test_the_page_escapes_words(bundled):
    cap = ap.capture(bundled, "a <b>bold</b> word <")
    page = ap.logit_contributions(cap, "<")._repr_html_()
    assert "<b>" not in page
    assert "&lt;" in page
    assert "<strong>VERIFIED" in page
