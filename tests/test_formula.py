import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.formula import scores, softmax, tiles
from attnprobe.masks import MaskRule
from attnprobe.outputs import attention
from attnprobe.rounding import arithmetic, gamma, linear, unit_roundoff
from attnprobe.terms import Terms

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def by_loops(query, key, value, allowed, scaling):
    """The formula as a newcomer would write it: plain numpy, one word at a time."""
    batch, heads, queries, _ = query.shape
    groups = heads // key.shape[1]
    weights = np.zeros((batch, heads, queries, key.shape[2]))
    output = np.zeros((batch, heads, queries, value.shape[3]))
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                seen = [j for j in range(key.shape[2]) if allowed(b, i, j)]
                if not seen:
                    continue
                s = np.array([query[b, h, i] @ key[b, h // groups, j] * scaling for j in seen])
                e = np.exp(s - s.max())
                weights[b, h, i, seen] = e / e.sum()
                output[b, h, i] = sum(
                    w * value[b, h // groups, j] for w, j in zip(e / e.sum(), seen, strict=True)
                )
    return weights, output


def assembled(query, key, value, rule, scaling, **options):
    weights = torch.zeros(*query.shape[:3], key.shape[2], dtype=torch.float64)
    outputs = []
    for tile in tiles(query, key, value, rule, scaling, **options):
        weights[:, :, tile.start : tile.stop, : tile.weights.shape[-1]] = tile.weights
        outputs.append(tile.output)
    return weights, torch.cat(outputs, 2)


def test_two_words_by_hand():
    # d_k = 4. The second word's q·k is 0 with the first key and 2·ln 3 with its own; divided by
    # √4 that is 0 and ln 3; e⁰ : e^(ln 3) = 1 : 3; so ¼·4 + ¾·8 = 7. The first sees itself only.
    query, key, value = (
        torch.tensor([[rows]], dtype=torch.float64)
        for rows in (
            [[5, 5, 5, 5], [2, 0, 0, 0]],
            [[0, 9, 0, 0], [math.log(3), 0, 0, 0]],
            [[4], [8]],
        )
    )
    (tile,) = tiles(query, key, value, MaskRule(2, 2), 4**-0.5)
    assert tile.scores[0, 0, 1].tolist() == [0.0, math.log(3)]
    assert tile.scores[0, 0, 0, 1] == -math.inf
    torch.testing.assert_close(
        tile.weights[0, 0], torch.tensor([[1.0, 0], [0.25, 0.75]]).double(), rtol=1e-15, atol=0
    )
    torch.testing.assert_close(
        tile.output.flatten(), torch.tensor([4.0, 7.0]).double(), rtol=1e-15, atol=0
    )


@pytest.mark.parametrize("tile_bytes", [1, 5 * 8 * 2 * 6 * 17, 2**22])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 4])
def test_equals_loops_for_any_tile(tile_bytes, causal, window):
    torch.manual_seed(1)
    batch, heads, key_heads, queries, keys, size, value_size = 2, 6, 3, 11, 17, 10, 7
    query = torch.randn(batch, heads, queries, size) * 2
    key = torch.randn(batch, key_heads, keys, size)
    value = torch.randn(batch, key_heads, keys, value_size)
    padding = torch.ones(batch, keys, dtype=torch.bool)
    padding[1, :8] = False  # so the first rows of the second text see nothing, where causal
    rule = MaskRule(queries, keys, causal=causal, window=window, padding=padding, offset=6)

    def allowed(b, i, j):
        at = i + 6
        inside = window is None or j > at - window
        return bool(padding[b, j]) and inside and (j <= at or not causal)

    expected = by_loops(*(x.double().numpy() for x in (query, key, value)), allowed, 0.3)
    found = assembled(query, key, value, rule, 0.3, tile_bytes=tile_bytes)
    for want, got in zip(expected, found, strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-12, atol=1e-14)
    whole = attention(query, key, value, rule, 0.3)  # heads after words, as kernels return it
    np.testing.assert_allclose(whole.transpose(1, 2).numpy(), expected[1], rtol=1e-12, atol=1e-14)


def test_row_without_a_key_is_marked_and_zero():
    padding = torch.tensor([[False, False, True]])
    query, key, value = torch.randn(3, 1, 2, 3, 5)
    (tile,) = tiles(query, key, value, MaskRule(3, 3, padding=padding), 1.0)
    assert tile.seen[0, 0].tolist() == [False, False, True]
    assert tile.output[0, :, :2].abs().sum() == 0
    assert torch.equal(tile.output[0, :, 2], value[0, :, 2].double())


def test_scores_are_dot_products_with_length_not_cosines():
    query = torch.tensor([[[[3.0, 4.0]]]])
    key = torch.tensor([[[[6.0, 8.0], [-4.0, 3.0]]]])
    assert scores(query, key, 0.5).flatten().tolist() == [25.0, 0.0]


@given(st.lists(st.floats(-700, 700), min_size=1, max_size=9))
def test_softmax_rows_sum_to_one_and_ignore_shifts(row):
    s = torch.tensor(row, dtype=torch.float64)
    w = softmax(s)
    assert w.min() >= 0
    assert abs(w.sum() - 1) < 1e-14
    torch.testing.assert_close(softmax(s - 31.0), w, rtol=1e-11, atol=0)


@pytest.mark.parametrize(
    ("dtype", "storage"),
    [(torch.float32, 2**-24), (torch.float16, 2**-11), (torch.bfloat16, 2**-8)],
)
def test_unit_roundoffs(dtype, storage):
    one = torch.tensor(1.0, dtype=dtype)
    assert arithmetic(dtype, "sdpa").storage == storage
    assert one + torch.tensor(storage, dtype=dtype) == one  # half way: rounds to even
    assert one + torch.tensor(1.5 * storage, dtype=dtype) > one
    assert arithmetic(dtype, "sdpa").scores == 2**-24
    assert arithmetic(dtype, "eager").scores == storage
    assert gamma(3, 0.1) == pytest.approx(0.3 / 0.7)


def kernels(query, key, value, scaling):
    """Real kernels of torch, causal: fused, and plain products with the weights they show."""
    fused = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    scores = query @ key.transpose(-1, -2) * scaling
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, torch.finfo(scores.dtype).min).softmax(-1)
    return {"sdpa": (fused, None), "eager": (weights @ value, weights)}


def worst_ratios(dtype, tokens, spread, seed, size=64):
    torch.manual_seed(seed)
    query, key, value = torch.randn(3, 2, 3, tokens, size).to(dtype)
    query = query * spread
    ratios = {}
    for kernel, (output, weights) in kernels(query, key, value, size**-0.5).items():
        worst = 0.0
        for tile in tiles(
            query,
            key,
            value,
            MaskRule(tokens, tokens),
            size**-0.5,
            rounding=arithmetic(dtype, kernel),
        ):
            error = (output[:, :, tile.start : tile.stop].double() - tile.output).abs()
            worst = max(worst, (error / tile.output_bound).max().item())
            if weights is not None:
                got = weights[:, :, tile.start : tile.stop, : tile.weights.shape[-1]].double()
                error = (got - tile.weights).abs()
                assert bool((error <= tile.weights_bound).all())
        ratios[kernel] = worst
    return ratios


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 90), st.sampled_from([0.0, 0.1, 1.0, 4.0, 15.0, 45.0]), st.integers(0, 2**31))
def test_bound_holds_for_torchs_own_kernels(dtype, tokens, spread, seed):
    assert all(ratio <= 1 for ratio in worst_ratios(dtype, tokens, spread, seed).values())


@pytest.mark.parametrize(
    ("dtype", "at_least"), [(torch.float32, 0.003), (torch.float16, 0.3), (torch.bfloat16, 0.3)]
)
def test_bound_is_not_empty(dtype, at_least):
    """Real errors come near the bound: within a factor of 4 where each result is rounded once."""
    found = worst_ratios(dtype, 150, 1.0, 0)
    print(dtype, found)
    assert all(ratio >= at_least for ratio in found.values())


def test_bound_grows_with_scores_not_with_tokens():
    def bound(tokens, spread):
        torch.manual_seed(0)
        query, key, value = torch.randn(3, 1, 1, tokens, 64)
        *_, last = tiles(
            query * spread,
            key,
            value,
            MaskRule(tokens, tokens),
            64**-0.5,
            rounding=arithmetic(torch.float32, "sdpa"),
        )
        return (last.output_bound / (last.weights @ value.double().abs()))[0, 0, -1].mean().item()

    assert bound(90, 45.0) > 10 * bound(90, 1.0)
    assert bound(900, 1.0) < 3 * bound(90, 1.0) + 2e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_and_its_bound(dtype):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 5, 37), torch.randn(37, 23), torch.randn(23) * 9
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    y, bound = linear(x, weight, bias, arithmetic(dtype, "sdpa"))
    exact = np.einsum("bte,ef->btf", x.double().numpy(), weight.double().numpy())
    np.testing.assert_allclose(y.numpy(), exact + bias.double().numpy(), rtol=1e-12, atol=1e-12)
    got = torch.addmm(bias, x.view(-1, 37), weight).view(2, 5, 23).double()
    assert bool(((got - y).abs() <= bound).all())
    without_bias = x.double() @ weight.double()
    assert bool(((without_bias - y).abs() > bound).any())


@pytest.mark.parametrize("dtype", DTYPES)
def test_linears_bound_is_of_its_norms_and_its_weights_stay(dtype):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((2, 5, 37), (37, 23), (23,)))
    by_column, r = weight.T.contiguous().T, arithmetic(dtype, "")
    kept = weight.clone()
    for held in (weight, by_column):  # as Conv1D and as Linear hold it
        _, bound = linear(x, held, bias, r)
        assert torch.equal(held, kept)
        columns = np.linalg.norm(weight.double().numpy(), axis=0)
        rows = np.linalg.norm(x.double().numpy(), axis=-1, keepdims=True)
        stored = gamma(2, r.storage)
        sized = (1 + stored) * gamma(39, r.accumulate + unit_roundoff(torch.float64)) + stored
        expected = sized * (rows * columns + bias.double().abs().numpy())
        atol = 1e-6 if dtype == torch.float16 else 1e-30  # what is flushed to zero
        np.testing.assert_allclose(bound.numpy(), expected, rtol=1e-12, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bound_holds_where_small_numbers_are_flushed_to_zero(dtype):
    assert torch.set_flush_denormal(True)
    try:
        torch.manual_seed(0)
        query, key, value = torch.randn(3, 1, 2, 300, 16)
        tensors = [x.to(dtype) for x in (query, key, value * 1e-38)]
        for kernel, (output, _) in kernels(*tensors, 0.25).items():
            for tile in tiles(
                *tensors, MaskRule(300, 300), 0.25, rounding=arithmetic(dtype, kernel)
            ):
                error = (output[:, :, tile.start : tile.stop].double() - tile.output).abs()
                assert bool((error <= tile.output_bound).all())
    finally:
        torch.set_flush_denormal(False)


def test_a_kernel_of_unknown_name_gets_the_room_of_both():
    own = arithmetic(torch.bfloat16, "somebodys_own")
    assert own.scores == arithmetic(torch.bfloat16, "eager").scores
    assert own.blocked


@pytest.mark.parametrize("rows", [slice(0, 3), slice(4, 5), slice(6, None), slice(None)])
@pytest.mark.parametrize("tile_bytes", [1, 2**22])
def test_some_rows_are_those_of_the_whole(rows, tile_bytes):
    torch.manual_seed(2)
    query, key, value = (
        torch.randn(2, 6, 11, 10),
        torch.randn(2, 3, 17, 10),
        torch.randn(2, 3, 17, 7),
    )
    rule = MaskRule(11, 17, offset=6, window=9)
    terms = Terms(bias=torch.randn(1, 6, 11, 17), sinks=torch.randn(2, 6, 11, 1))
    rounding = arithmetic(torch.float32, "sdpa")
    (whole,) = tiles(query, key, value, rule, 0.3, terms, rounding=rounding)
    options = {"rounding": rounding, "rows": rows, "tile_bytes": tile_bytes}
    found = list(tiles(query, key, value, rule, 0.3, terms, **options))
    assert [row for tile in found for row in range(tile.start, tile.stop)] == list(range(11))[rows]
    for tile in found:
        here, reach = slice(tile.start, tile.stop), tile.weights.shape[-1]
        pairs = [
            (tile.output, whole.output[:, :, here]),
            (tile.output_bound, whole.output_bound[:, :, here]),
            (tile.weights, whole.weights[:, :, here, :reach]),
            (tile.scores, whole.scores[:, :, here, :reach]),
        ]
        for got, want in pairs:
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)
