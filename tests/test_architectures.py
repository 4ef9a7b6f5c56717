"""The sweep over transformers' model types: small models, states with their reasons, processes."""

import os
import signal

import architectures
import pytest
import transformers
from architecture_trial import TASKS, Trial, trial
from architectures import CHECKS, PAGE, Entry, page, running
from small_configs import VOCABULARY, small_config, small_model

from attnprobe.architecture.known import KNOWN_TYPES


def config(kind, task="causal"):
    return small_config(kind, getattr(transformers, TASKS[task][kind]))


def test_sizes_go_by_what_a_field_means_whatever_its_name():
    llama, gpt2, t5 = config("llama"), config("gpt2"), config("t5", "seq2seq")
    assert (llama.hidden_size, llama.num_attention_heads, llama.num_key_value_heads) == (96, 6, 3)
    assert (gpt2.n_embd, gpt2.n_head, gpt2.n_layer) == (96, 6, 2)
    assert (t5.d_model, t5.num_heads, t5.d_kv) == (96, 6, 32)
    assert {llama.vocab_size, gpt2.vocab_size, t5.vocab_size} == {VOCABULARY}
    assert 0 < gpt2.eos_token_id < VOCABULARY


def test_latent_attention_has_a_key_for_each_head_and_values_of_another_size():
    mla = config("deepseek_v3")
    assert mla.num_key_value_heads == mla.num_attention_heads
    assert mla.v_head_dim not in (mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.qk_head_dim)


def test_each_kind_of_layer_is_kept_once():
    assert config("gemma3_text").layer_types == ["sliding_attention", "full_attention"]
    assert config("qwen3_next").layer_types == ["linear_attention", "full_attention"]
    assert config("llama").num_hidden_layers == 2


def test_sub_configs_are_small_too():
    text = config("gemma3").get_text_config()
    assert (text.hidden_size, text.num_attention_heads, text.vocab_size) == (96, 6, VOCABULARY)


def test_the_same_model_twice_is_the_same():
    cls = transformers.GPT2LMHeadModel
    first, second = (small_model("gpt2", cls, "eager", decoder=True) for _ in range(2))
    assert first.transformer.wte.weight.equal(second.transformer.wte.weight)


def test_a_verified_type():
    found = trial("causal", "llama", "eager")
    assert (found.state, found.reason, found.terms) == ("verified", "", ["GQA"])
    assert found.checks["weights"]["verdicts"] == {"verified": 12}
    assert 0.1 < found.entropy < 0.9  # sharp, but not all on one key


@pytest.mark.parametrize(
    ("task", "kind", "kernel", "state", "reason"),
    [
        ("causal", "mamba", "eager", "unsupported", "no softmax attention"),
        (
            *("masked", "longformer", "eager", "unsupported"),
            "attention that cannot be followed: its scores go through pad",
        ),
        ("causal", "bloom", "sdpa", "no_kernel", "BloomForCausalLM does not support"),
        ("causal", "xlnet", "eager", "unsupported", "it multiplies by einsum"),
        ("causal", "musicgen", "eager", "unsupported", "needs an input other than text"),
    ],
)
def test_what_is_not_verified_has_a_state_and_a_reason(task, kind, kernel, state, reason):
    found = trial(task, kind, kernel)
    assert found.state == state
    assert reason in found.reason


def test_an_encoder_decoder_has_cross_attention():
    found = trial("seq2seq", "bart", "eager")
    assert [call["kind"] for call in found.calls] == ["self"] * 2 + ["self", "cross"] * 2
    assert "cross attention" in found.terms


def die(task, kind, kernel):
    os._exit(3)


def hang(task, kind, kernel):
    signal.pause()


@pytest.mark.parametrize(
    ("does", "reason"), [(die, "died with exit code 3"), (hang, "took over 1 s")]
)
def test_a_type_that_dies_or_hangs_harms_only_itself(monkeypatch, does, reason):
    def one_of_two(task, kind, kernel):
        return does(task, kind, kernel) if kind == "bad" else Trial("verified")

    monkeypatch.setattr(architectures, "trial", one_of_two)
    monkeypatch.setattr(architectures, "SECONDS", 1)
    found = {one.kind: one for one in running([("causal", "bad"), ("causal", "good")], jobs=2)}
    assert found["good"].worst.state == "verified"
    assert (found["bad"].worst.state, found["bad"].worst.reason) == ("crash", reason)


def test_the_worst_kernel_decides_and_an_absent_one_does_not():
    def entry(**trials):
        return Entry("causal", "some", trials)

    assert entry(sdpa=Trial("verified"), eager=Trial("mismatch")).worst.state == "mismatch"
    assert entry(sdpa=Trial("no_kernel"), eager=Trial("verified")).worst.state == "verified"


def test_marks():
    def entry(check, *verdicts):
        checks = [{check: {"verdicts": {verdict: 1}}} for verdict in verdicts]
        return Entry("causal", "some", {str(n): Trial("", checks=c) for n, c in enumerate(checks)})

    assert entry("mask", "verified", "not_checked").mark("mask") == "✓–"
    assert entry("mask", "verified", "mismatch").mark("mask") == "✗"
    assert entry("weights", "verified", "not_checked").mark("weights") == "✓"
    assert entry("mask").mark("mask") == ""


def test_the_page_does_not_depend_on_the_order_in_which_types_end():
    some = [Entry("causal", kind, {"sdpa": Trial("verified")}) for kind in ("b", "a", "c")]
    assert page(some) == page(some[::-1])
    assert page(some).index("`a`") < page(some).index("`b`")
    assert "| verified | 3 | 3 |" in page(some)


# The committed table


def rows():
    """The rows of docs/architectures.md: (task, type, state, {check: mark})."""
    task, found = "", []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            task = line[3:]
        elif line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            marks = dict(zip(CHECKS, cells[3 : 3 + len(CHECKS)], strict=True))
            found.append((task, cells[0].strip("`"), cells[1], marks))
    return found


def test_the_table_is_of_this_release_and_keeps_its_floor():
    text = PAGE.read_text(encoding="utf-8")
    assert f"transformers {transformers.__version__}'s" in text
    every = rows()
    assert {(task, kind) for task, kind, *_ in every} == {
        (task, kind) for task, kinds in TASKS.items() for kind in kinds
    }
    assert {state for _, _, state, _ in every} == {"verified", "unsupported"}
    causal = set(TASKS["causal"])
    verified = {task: set() for task in TASKS}
    for task, kind, state, marks in every:
        if state == "verified":
            verified[task].add(kind)
            assert marks["output"] == marks["logits"] == "✓", kind
            assert "✗" not in marks.values()
    assert len(verified["causal"]) >= 180
    assert len((verified["masked"] | verified["seq2seq"]) - causal) >= 40


def test_known_types_are_those_whose_mask_and_output_are_verified():
    for _, kind, state, marks in rows():
        if kind in KNOWN_TYPES:
            assert (state, marks["mask"], marks["output"]) == ("verified", "✓", "✓"), kind
    assert {kind for _, kind, *_ in rows()} >= KNOWN_TYPES


# Chosen so that every term, and every way to see attention, is met.
SOME = [
    *("gpt2", "llama", "mistral", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "granite_swa"),
    *("llama4_text", "deepseek_v3", "deepseek_v32", "diffllama", "zamba2", "recurrent_gemma"),
    *("lfm2", "opt", "phi3", "doge", "inkling2_text", "bloom", "falcon", "mpt", "gpt_neo", "xglm"),
    *("openai-gpt", "roformer", "cpmant"),
]
OTHERS = [
    *(("masked", kind) for kind in ("modernbert", "albert", "distilbert", "mpnet", "deberta-v2")),
    *(("seq2seq", kind) for kind in ("t5", "bart", "fsmt", "t5gemma")),
]


@pytest.mark.parametrize(("task", "kind"), [*(("causal", kind) for kind in SOME), *OTHERS])
def test_a_type_of_every_kind_is_verified(task, kind):
    found = trial(task, kind, "eager")
    assert (found.state, found.reason) == ("verified", "")
    for check in ("output", "weights", "logits"):
        assert "mismatch" not in found.checks[check]["verdicts"]
    assert set(found.checks["output"]["verdicts"]) == {"verified"}


def test_the_types_of_the_fast_subset_meet_every_term():
    text = PAGE.read_text(encoding="utf-8")
    lines = [
        line
        for line in text.splitlines()
        if any(line.startswith(f"| `{kind}` |") for kind in [*SOME, *(kind for _, kind in OTHERS)])
    ]
    for term in (
        *("GQA", "MQA", "window", "chunked", "softcap", "sinks", "bias", "bias in the mask"),
        *("value size ≠ key size", "cross attention", "a module runs several times"),
    ):
        assert any(term in line for line in lines), term
