"""Attention by plain torch calls: what is followed, what is refused, and that nothing changes."""

import math
import re
from dataclasses import replace

import pytest
import torch
import transformers
from architecture_trial import TASKS, texts
from small_configs import small_model
from torch import nn
from torch.overrides import _get_current_function_mode_stack as modes
from transformers import BloomConfig, BloomForCausalLM, FalconConfig, FalconForCausalLM

import attnprobe as ap
from attnprobe.checking.basis import basis_of
from attnprobe.checking.checks import BY_CALL
from attnprobe.hooks import replaced, watched
from attnprobe.rounding import OWN
from attnprobe.seam.following import Following

B, H, T, S, D, V = 2, 3, 5, 7, 4, 6

CAUSAL = ("big_bird", "bloom", "cpmant", "falcon", "git", "gpt_neo", "gpt_neox_japanese", "mpt")
CAUSAL += ("megatron-bert", "mvp", "openai-gpt", "rembert", "roformer", "trocr", "xglm", "xlm")
MASKED = ("convbert", "deberta", "flaubert", "ibert", "luke", "mpnet", "nystromformer")
MASKED += ("squeezebert", "tapas")
UNCHECKED_MASK = {"cpmant", "deberta"}


def small(task, kind, kernel="eager"):
    return small_model(
        kind, getattr(transformers, TASKS[task][kind]), kernel, decoder=task == "causal"
    )


@pytest.mark.parametrize(
    ("task", "kind", "kernel"),
    [("causal", kind, "eager") for kind in CAUSAL]
    + [("masked", kind, "eager") for kind in MASKED]
    + [("causal", "falcon", "sdpa")],
)
def test_a_type_is_verified_and_computes_what_it_did(task, kind, kernel):
    model = small(task, kind, kernel)
    if kind == "big_bird":  # it puts other modules in place in its first forward
        with pytest.raises(ap.ModelError, match="put it in place as it ran"):
            ap.capture(model, texts())
    cap = ap.capture(model, texts())
    with torch.no_grad():
        assert torch.equal(model(**cap.inputs)[0], cap.output)
    assert {call.kernel for call in cap.calls} == {OWN if kernel == "eager" else "sdpa"}
    assert [call.layer for call in cap.calls] == [0, 1]
    report = ap.verify(cap)
    verdicts = {
        check: {row.verdict for row in report.rows if row.check == check}
        for check in ("mask", "weights", "output", "logits")
    }
    assert verdicts["output"] == verdicts["logits"] == {"verified"}
    assert verdicts["weights"] == {"verified" if kernel == "eager" else "not_checked"}
    assert ("not_checked" in verdicts["mask"]) == (kind in UNCHECKED_MASK)
    assert "mismatch" not in verdicts["mask"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["bloom", "gpt_neo", "xglm", "megatron-bert", "mpt"])
def test_half_precision(kind, dtype):
    model = small("causal", kind).to(dtype)
    cap = ap.capture(model, texts())
    assert {call.dtype for call in cap.calls} == {dtype}
    report = ap.verify(cap, checks=["weights", "output"])
    assert "mismatch" not in {row.verdict for row in report.rows}
    assert "verified" in {row.verdict for row in report.rows if row.check == "weights"}


@pytest.mark.parametrize(("kernel", "times"), [("eager", 2), ("sdpa", 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_falcon_with_alibi_scales_its_bias_too(dtype, kernel, times):
    torch.manual_seed(0)
    config = FalconConfig(
        vocab_size=99,
        hidden_size=60,
        num_hidden_layers=2,
        num_attention_heads=6,
        alibi=True,
        multi_query=False,
        initializer_range=0.5,
        attn_implementation=kernel,
    )
    model = FalconForCausalLM(config).eval().to(dtype)
    cap = ap.capture(model, texts())
    # Press et al. 2022: 2^(-8/4), …, then every second of those for 8 heads; bfloat16 in Falcon.
    # transformers' eager Falcon adds them twice: to the scores, and within the mask.
    slopes = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]).double()
    want = slopes[:, None, None] * torch.arange(11) / math.sqrt(10)
    added = basis_of(cap.calls[1]).added[0, :, -1:].double()
    torch.testing.assert_close(added, times * want, rtol=1e-2, atol=1e-4)
    rebuilt = cap.calls[1].expected_terms.bias.rows(0, 11, 11)
    torch.testing.assert_close(rebuilt[0], want)
    verdicts = {row.verdict for row in ap.verify(cap, checks=["mask", "output"]).rows}
    assert ("mismatch" in verdicts) == (times == 2)


class Own(nn.Module):
    """Attention by torch calls, of given query, key and value."""

    num_heads = H

    def scores(self, q, k):
        return q @ k.transpose(-1, -2) / 2

    def forward(self, q, k, v):
        return torch.softmax(self.scores(q, k), -1) @ v


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, q, k, v):
        return self.inner(q, k, v)


def own(steps):
    """A model whose attention computes its scores by a function."""

    class Some(Own):
        def scores(self, q, k):
            return steps(q, k)

    return Outer(Some())


def drawn(dtype=torch.float32, seed=0):
    make = torch.Generator().manual_seed(seed)
    shapes = (B, H, T, D), (B, H, S, D), (B, H, S, V)
    return tuple(torch.randn(shape, generator=make).to(dtype) for shape in shapes)


def one_call(model, q, k, v):
    """The single call of a model, whose output must be the same without a probe."""
    without = model(q, k, v)
    with watched(model) as calls:
        within = model(q, k, v)
    assert torch.equal(without, within)
    assert calls.unseen == []
    (call,) = calls
    return call


def product(q, k):
    return q @ k.transpose(-1, -2)


LOOK = torch.ones(T, S).tril(2).bool()
MINUS = torch.zeros(T, S).masked_fill(~LOOK, torch.finfo(torch.float32).min)
BIAS = torch.arange(H * S).view(H, 1, S) / 10


def in_place(q, k):
    scores = product(q, k)
    scores *= 0.3
    scores += BIAS
    scores.masked_fill_(~LOOK, -math.inf)
    return scores


def folded(q, k):
    q, k = (one.reshape(B * H, -1, D) for one in (q, k))
    base = BIAS.expand(B, H, 1, S).reshape(B * H, 1, S)
    scores = torch.baddbmm(base, q, k.transpose(1, 2), beta=2, alpha=0.3)
    return scores.view(B, H, T, S) + MINUS


def beside(q, k):
    scores = product(q, k)
    scores.view(B * H, T, S).float().contiguous()
    return scores * 0.3


def like(q, k):
    scores = product(q, k)
    return scores + torch.zeros_like(scores).masked_fill(~LOOK, -1e9).type_as(scores)


STEPS = {
    "twice": (lambda q, k: product(q, k) * 0.6 / 2, 0.3, None, False),
    "mask of its shape": (like, 1.0, None, True),
    "no change to a view": (beside, 0.3, None, False),
    "nothing": (product, 1.0, None, False),
    "query before": (lambda q, k: product(q * 0.3, k), 1.0, None, False),
    "times": (lambda q, k: 0.3 * product(q, k), 0.3, None, False),
    "over a tensor": (lambda q, k: product(q, k) / torch.tensor(2.0).sqrt(), 2**-0.5, None, False),
    "added": (lambda q, k: product(q, k) + MINUS, 1.0, None, True),
    "taken off": (lambda q, k: product(q, k) - 1e9 * (~LOOK).float(), 1.0, None, True),
    "filled": (lambda q, k: product(q, k).masked_fill(~LOOK, -1e9), 1.0, None, True),
    "where": (lambda q, k: torch.where(LOOK, product(q, k), -1e9), 1.0, None, True),
    "where not": (
        lambda q, k: torch.where(~LOOK, torch.tensor(-1e9), product(q, k)),
        1,
        None,
        True,
    ),
    "method where": (lambda q, k: product(q, k).where(LOOK, torch.tensor(-1e9)), 1, None, True),
    "gate": (lambda q, k: product(q, k) * LOOK.float() - 1e4 * (1 - LOOK.float()), 1, None, True),
    "clamped": (lambda q, k: torch.max(product(q, k) + MINUS, MINUS.min()), 1.0, None, True),
    "bias": (lambda q, k: product(q, k) + BIAS + MINUS, 1.0, 1.0, True),
    "scaled bias": (lambda q, k: (product(q, k) + BIAS) * 0.3 + MINUS, 0.3, 0.3, True),
    "in place": (in_place, 0.3, 1.0, True),
    "folded": (folded, 0.3, 2.0, True),
    "einsum": (lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k) * 0.3, 0.3, None, False),
    "cast": (lambda q, k: product(q, k).double().float().contiguous(), 1.0, None, False),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_stands_between_product_and_softmax(name):
    steps, scaling, bias, masked = STEPS[name]
    q, k, v = drawn()
    call = one_call(own(steps), q, k, v)
    assert torch.equal(call.query, q * 0.3 if name == "query before" else q)
    assert torch.equal(call.key, k)
    assert torch.equal(call.value, v)
    assert call.scaling == pytest.approx(scaling)
    weights = steps(q, k).softmax(-1)
    assert torch.equal(call.weights_model, weights)
    assert torch.equal(call.head_output_model, (weights @ v).transpose(1, 2))
    if masked:
        assert torch.equal(call.mask.expand(B, H, T, S), LOOK.expand(B, H, T, S))
    else:
        assert call.mask is None
    if bias is None:
        assert call.terms.bias is None
    else:
        shown = call.terms.bias.expand(B, H, T, S)
        torch.testing.assert_close(shown, (BIAS.double() * bias).expand(B, H, T, S))
    own_scale = replace(call, expected_scaling=call.scaling, expected_mask=None)
    for check in ("weights", "output"):
        assert {row.verdict for row in BY_CALL[check](own_scale)} == {"verified"}


def test_one_key_head_for_all():
    q, k, v = drawn()
    call = one_call(own(lambda q, k: product(q, k) / 2), q, k[:, :1], v[:, :1])
    assert call.key.shape == (B, 1, S, D)
    assert call.value.shape == (B, 1, S, V)
    assert {row.verdict for row in BY_CALL["output"](call)} == {"verified"}


def test_folded_weights_and_values():
    class Folded(Own):
        def forward(self, q, k, v):
            q, k, v = (one.flatten(0, 1) for one in (q, k, v))
            weights = torch.bmm(q / 2, k.mT).softmax(-1)
            weights = nn.functional.dropout(weights, p=0.5, training=False)
            return torch.bmm(weights, v).view(B, H, T, V).transpose(1, 2).contiguous()

    q, k, v = drawn()
    call = one_call(Outer(Folded()), q, k, v)
    assert torch.equal(call.query, q / 2)
    assert torch.equal(call.value, v)
    assert call.head_output_model.shape == (B, T, H, V)
    assert torch.equal(call.attention_output, call.head_output_model)


def test_what_a_model_does_to_its_output_afterwards_is_not_taken_for_it():
    class Adds(Own):
        def forward(self, q, k, v):
            output = super().forward(q, k, v)
            output += 1
            return output

    call = one_call(Outer(Adds()), *drawn())
    assert {row.verdict for row in BY_CALL["output"](call)} == {"verified"}


def cancelling(q, k):
    return product(q, k) + 3 * BIAS - 2 * BIAS


def through_a_view(q, k):
    scores = product(q, k)
    scores[..., 0].fill_(-1e9)
    return scores


def assigned(q, k):
    scores = product(q, k)
    scores[..., 0] = -1e9
    return scores


def written(q, k):
    scores = product(q, k)
    q.mul_(1.5)
    return scores


REFUSED = {
    "narrow": (lambda q, k: product(q, k).half().float(), "casts its scores to torch.float16"),
    "two products": (lambda q, k: product(q, k) + product(q + 1, k), "two products together"),
    "softcap": (lambda q, k: product(q, k).tanh(), "go through tanh"),
    "hidden by nothing": (lambda q, k: product(q, k).masked_fill(~LOOK, -5), "hide nothing"),
    "factors": (lambda q, k: product(q, k) * BIAS, "multiplies its scores by a tensor"),
    "through a view": (through_a_view, "fill_ writes into a view"),
    "cancelling": (cancelling, "biases that cancel"),
    "assigned": (assigned, "goes through __setitem__"),
    "written": (written, "writes into its query or key"),
    "mask scaled": (lambda q, k: product(q, k).masked_fill(~LOOK, -1e9) / 2, "after it masked"),
    "rounded": (lambda q, k: product(q, k) / 2 / 2 / 2 / 2 / 2 / 2, "rounds its scores more often"),
    "transposed": (lambda q, k: product(k, q).mT, "go through mT"),
    "einsum": (lambda q, k: torch.einsum("bhid,bhjd->bijh", q, k).permute(0, 3, 1, 2), "einsum"),
}


class Fails(Own):
    def forward(self, q, k, v):
        return self.end(self.scores(q, k), v)


class OtherAxis(Fails):
    def end(self, scores, v):
        return torch.softmax(scores, 2) @ v


class NoProduct(Fails):
    def end(self, scores, v):
        return (torch.softmax(scores, -1)[..., None] * v[:, :, None]).sum(-2)


class Lse(Fails):
    def end(self, scores, v):
        return torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)) @ v


class Changed(Fails):
    def end(self, scores, v):
        return (torch.softmax(scores, -1) * 0.9) @ v


class OfScores(Fails):
    def end(self, scores, v):
        weights = torch.softmax(scores, -1)
        return weights @ (weights.mT @ scores)


class FiveAxes(Fails):
    def end(self, scores, v):
        return (torch.softmax((v[:, None] @ v[:, None].mT), -1) @ v[:, None])[:, 0]


class ElsewhereMade(nn.Module):
    """A softmax of scores that another module made."""

    def forward(self, scores):
        return torch.softmax(scores, -1)


class Unnamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.normalise = ElsewhereMade()

    def forward(self, q, k, v):
        return self.normalise(product(q, k)) @ v


def test_a_softmax_of_scores_that_were_not_seen_is_named():
    model = Outer(Unnamed())
    with watched(model) as calls:
        model(*drawn())
    assert calls == []
    assert [(one.name, "no product" in one.reason) for one in calls.unseen] == [
        ("inner.normalise", True)
    ]


def test_torchs_own_attention_module_is_named():
    class Some(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = nn.MultiheadAttention(12, 3, batch_first=True)

        def forward(self, x):
            return self.attend(x, x, x)[0]

    model, x = Some().eval(), torch.randn(B, T, 12)
    layer = nn.TransformerEncoderLayer(12, 3, batch_first=True).eval()
    with torch.no_grad():
        without, of_layer = model(x), layer(x)
        with watched(model) as calls, watched(layer):
            assert torch.equal(model(x), without)
            assert torch.equal(layer(x), of_layer)
    assert [one.name for one in calls.unseen] == ["attend"]


CLASSES = {
    OtherAxis: "not a softmax over keys",
    NoProduct: "softmax was followed to no product|go through",
    Lse: "logsumexp is not a softmax",
    Changed: "weights go through mul after softmax",
    OfScores: "weights go through mT",
    FiveAxes: "axes",
}


@pytest.mark.parametrize("name", [*REFUSED, *CLASSES])
def test_what_cannot_be_followed_is_named(name):
    if name in REFUSED:
        steps, reason = REFUSED[name]
        model = own(steps)
    else:
        model, reason = Outer(name()), CLASSES[name]
    q, k, v = drawn()
    without = model(q.clone(), k, v)
    with watched(model) as calls:
        assert torch.equal(model(q.clone(), k, v), without)
    assert calls == []
    assert [one.name for one in calls.unseen] == ["inner"]
    assert re.search(reason, calls.unseen[0].reason)


def test_a_routers_softmax_is_no_attention():
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D, 4))

        def forward(self, q, k, v):
            flat = q.reshape(-1, D)
            chosen = torch.softmax(flat @ self.weight, -1).topk(2).values
            other = torch.softmax(flat @ (self.weight * 1), -1).topk(2).values
            return (chosen + other).sum()

    model = Outer(Router())
    with watched(model) as calls:
        model(*drawn())
    assert (calls, calls.unseen) == ([], [])


def test_only_a_part_seen_is_said():
    model = small("causal", "prophetnet")  # its second stream has an axis more
    cap = ap.capture(model, texts())
    assert len(cap.calls) == len(cap.unseen) == 2
    report = ap.verify(cap)
    assert report.verdict == "not_checked"
    assert "self_attn computed its attention unseen: its scores have axes" in report.summary
    (logits,) = (row for row in report.rows if row.check == "logits")
    assert (logits.verdict, "unseen" in logits.reason) == ("not_checked", True)
    with pytest.raises(ap.InputError, match=r"layer 1: .* unseen: its scores"):
        cap.call(1)


@pytest.mark.parametrize(
    ("kind", "seen"), [("longt5", 4), ("pegasus_x", 6), ("led", 4), ("bigbird_pegasus", 6)]
)
def test_an_encoder_that_is_not_seen_beside_a_decoder_that_is(kind, seen):
    model = small("seq2seq", kind)
    ids = torch.tensor([texts()[0]])
    inputs = {"input_ids": ids, "decoder_input_ids": ids[:, :8]}
    with torch.no_grad(), watched(model):
        model(**inputs)
    with torch.no_grad(), watched(model) as calls:
        model(**inputs)
    assert len(calls) == seen
    assert len(calls.unseen) == (0 if kind == "bigbird_pegasus" else 2)
    assert all("encoder" in one.name for one in calls.unseen)


@pytest.mark.parametrize(
    ("task", "kind", "reason"),
    [
        ("masked", "funnel", "einsum"),
        ("masked", "longformer", "scores go through pad"),
        ("causal", "reformer", "logsumexp"),
    ],
)
def test_a_type_that_cannot_be_followed_is_refused_by_name(task, kind, reason):
    with pytest.raises(ap.ModelError, match=f"computed its attention unseen: .*{reason}"):
        ap.capture(small(task, kind), texts())


def test_disentangled_attention_is_two_products():
    config = transformers.DebertaV2Config(
        vocab_size=99,
        hidden_size=60,
        num_hidden_layers=1,
        num_attention_heads=6,
        intermediate_size=70,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=8,
    )
    model = transformers.DebertaV2ForMaskedLM(config).eval()
    with pytest.raises(ap.ModelError, match="its scores go through gather"):
        ap.capture(model, texts())


def test_landmarks_are_not_taken_for_attention():
    config = transformers.NystromformerConfig(
        vocab_size=99,
        hidden_size=60,
        num_hidden_layers=1,
        num_attention_heads=6,
        intermediate_size=70,
        segment_means_seq_len=12,
        num_landmarks=4,
        max_position_embeddings=64,
    )
    model = transformers.NystromformerForMaskedLM(config).eval()
    with watched(model) as calls:
        model(torch.tensor([texts()[0] + [11]]))
    assert len(calls.unseen) == 1


@pytest.fixture(scope="module")
def neox():
    return ap.capture(small("causal", "gpt_neox_japanese"), texts())


MUTANTS = {
    "heads swapped": lambda call: replace(call, query=call.query.flip(1)),
    "wrong values": lambda call: replace(call, value=call.value.roll(1, 2)),
    "no scale": lambda call: replace(call, scaling=1.0, facts_known=True, expected_scaling=1.0),
    "no mask": lambda call: replace(call, mask=None, facts_known=True),
    "output": lambda call: replace(call, head_output_model=call.head_output_model * 1.001),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_a_followed_call_is_found(neox, name):
    calls = (neox.calls[0], MUTANTS[name](neox.calls[1]))
    report = ap.verify(replace(neox, calls=calls), checks=["mask", "weights", "output"])
    bad = {(row.layer, row.check) for row in report.rows if row.verdict == "mismatch"}
    assert bad
    assert {layer for layer, _ in bad} == {1}
    assert ("mask" in {check for _, check in bad}) == (name == "no mask")


@pytest.mark.parametrize("damage", ["scale", "mask"])
def test_a_damaged_model_of_a_known_type_is_found(monkeypatch, damage):
    monkeypatch.setattr("attnprobe.seam.interception.KNOWN_TYPES", frozenset({"roformer"}))
    model = small("causal", "roformer")
    attention = type(model.roformer.encoder.layer[0].attention.self)
    forward = attention.forward

    def damaged(self, hidden_states, attention_mask=None, **kwargs):
        if damage == "scale":
            monkeypatch.setattr("math.sqrt", lambda _: 1.0)
        mask = None if damage == "mask" else attention_mask
        return forward(self, hidden_states, mask, **kwargs)

    damaged.__wrapped__ = forward
    monkeypatch.setattr(attention, "forward", damaged)
    cap = ap.capture(model, texts())
    monkeypatch.undo()
    report = ap.verify(cap, checks=["mask", "weights", "output"])
    assert report.verdict == "mismatch"


def test_a_replacement_stands_for_what_is_followed():
    model = small("causal", "bloom")
    ids = torch.tensor([texts()[0]])
    with torch.no_grad():
        without = model(ids).logits
        with replaced(model, _twice_the_values), ap.probe(model) as calls:
            within = model(ids).logits
        after = model(ids).logits
    assert torch.equal(calls[0].head_output_model, calls[0].value.transpose(1, 2) * 2)
    assert not torch.allclose(without, within)
    assert torch.equal(without, after)


def test_generate_with_a_cache():
    model = small("causal", "bloom")
    ids = torch.tensor([texts()[0]])
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    without = model.generate(ids, **options)
    with ap.probe(model) as calls:
        assert torch.equal(model.generate(ids, **options), without)
    assert [(call.step, call.expected_mask.offset, call.key.shape[2]) for call in calls[::2]] == [
        (0, 0, 11),
        (1, 11, 12),
        (2, 12, 13),
    ]
    assert {row.verdict for call in calls for row in BY_CALL["output"](call)} == {"verified"}


def test_gradients_pass():
    model = small("causal", "bloom")
    ids = torch.tensor([texts()[0]])
    with ap.probe(model):
        model(ids, labels=ids).loss.backward()
    weight = model.transformer.h[0].self_attention.query_key_value.weight
    within = weight.grad.clone()
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    assert torch.equal(within, weight.grad)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_behind(error):
    model = small("causal", "bloom")
    ids = torch.tensor([texts()[0]])

    def fail(*_):
        raise error("in the middle")

    handle = model.transformer.h[1].self_attention.dense.register_forward_hook(fail)
    with pytest.raises(error, match="in the middle"), ap.probe(model) as calls:
        model(ids)
    handle.remove()
    assert len(calls) == 2
    assert modes() == []
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    with torch.no_grad():
        assert ap.verify(ap.capture(model, texts())).passed


def test_a_probe_goes_on_after_an_exception():
    model = small("causal", "bloom")
    ids = torch.tensor([texts()[0]])
    with ap.probe(model) as calls:
        with pytest.raises(TypeError):
            model.transformer.h[0].self_attention(ids.float()[..., None].expand(1, 11, 96))
        assert modes() == []
        model(ids)
    assert len(calls) == 2
    assert calls[1].attention_output.shape == (1, 11, 96)


@pytest.mark.parametrize(("task", "kind"), [("causal", "llama"), ("masked", "bert")])
def test_models_that_ask_for_a_kernel_are_not_followed(monkeypatch, task, kind):
    monkeypatch.setattr(Following, "__torch_function__", lambda *_: pytest.fail("followed"))
    assert ap.verify(ap.capture(small(task, kind), texts())).passed


def test_a_router_beside_the_seam_is_followed_alone(monkeypatch):
    names = []
    follow = Following.__torch_function__

    def noted(self, func, *rest):
        names.append(getattr(func, "__name__", ""))
        return follow(self, func, *rest)

    monkeypatch.setattr(Following, "__torch_function__", noted)
    cap = ap.capture(small("causal", "mixtral"), texts())
    assert cap.unseen == ()
    assert names.count("softmax") == 2  # a router a layer; not the kernels' own
    assert "matmul" not in names


def test_a_kernel_that_is_asked_for_within_a_followed_module_is_seen_once():
    class Around(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, ids):
            return torch.softmax(self.inner(ids).logits[:, -1], -1)

    class Model(nn.Module):
        def __init__(self, around):
            super().__init__()
            self.around = around

        def forward(self, ids):
            return self.around(ids)

    model = Model(Around(small("causal", "llama")))
    with torch.no_grad(), watched(model) as calls:
        model(torch.tensor([texts()[0]]))
    assert [call.kernel for call in calls] == ["eager", "eager"]
    assert calls.unseen == []


def test_two_probes_see_the_same():
    config = BloomConfig(vocab_size=99, hidden_size=24, n_layer=1, n_head=4)
    model = BloomForCausalLM(config).eval()
    ids = torch.tensor([texts()[0]])
    with ap.probe(model) as outer, ap.probe(model) as inner:
        model(ids)
    assert len(outer) == len(inner) == 1
    assert torch.equal(outer[0].head_output_model, inner[0].head_output_model)


@pytest.mark.parametrize("kind", ["bloom", "falcon", "gpt_neo"])
def test_a_mask_that_was_lost_does_not_pass_though_the_type_is_not_known(kind):
    model = small("causal", kind)
    assert ap.verify(ap.capture(model, texts())).passed

    def open_everything(module, args, kwargs):
        mask = kwargs.get("attention_mask")
        return args, kwargs | {"attention_mask": None if mask is None else torch.zeros_like(mask)}

    for module in model.modules():
        if type(module).__name__.endswith("Attention"):
            module.register_forward_pre_hook(open_everything, with_kwargs=True)
    report = ap.verify(ap.capture(model, texts()))
    assert not report.passed
    assert report.verdict == "mismatch" or "later or padding" in report.summary


def _twice_the_values(call, run):
    return call.value.transpose(1, 2) * 2, None
