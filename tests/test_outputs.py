"""Outputs without weights, and their bound, against the tiles that hold every weight."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe import outputs as module
from attnprobe.formula import tiles
from attnprobe.masks import GivenMask, MaskRule
from attnprobe.outputs import attention, outputs, weights
from attnprobe.rounding import arithmetic
from attnprobe.rowbounds import RowBounds
from attnprobe.terms import Terms

BATCH, HEADS, KEY_HEADS, QUERIES, KEYS, SIZE, VALUE_SIZE = 2, 6, 3, 11, 17, 10, 7
SCALING = 0.3


def operands(seed=0, dtype=torch.float32, spread=2.0, queries=QUERIES, keys=KEYS, size=SIZE):
    torch.manual_seed(seed)
    query = torch.randn(BATCH, HEADS, queries, size) * spread
    key = torch.randn(BATCH, KEY_HEADS, keys, size)
    value = torch.randn(BATCH, KEY_HEADS, keys, VALUE_SIZE)
    return [one.to(dtype) for one in (query, key, value)]


def padding():
    real = torch.ones(BATCH, KEYS, dtype=torch.bool)
    real[1, :8] = False  # so the first rows of the second text see nothing, where causal
    return real


def given_mask():
    torch.manual_seed(3)
    return GivenMask(torch.rand(BATCH, HEADS, QUERIES, KEYS) > 0.4, QUERIES)


RULES = {
    "causal": MaskRule(QUERIES, KEYS, offset=6),
    "offset 0": MaskRule(QUERIES, KEYS),
    "all keys": MaskRule(QUERIES, KEYS, causal=False),
    "padding": MaskRule(QUERIES, KEYS, offset=6, padding=padding()),
    "window": MaskRule(QUERIES, KEYS, offset=6, window=4),
    "two sides": MaskRule(QUERIES, KEYS, causal=False, offset=6, window=4, ahead=2),
    "chunks": MaskRule(QUERIES, KEYS, offset=6, chunk=5),
    "by head": given_mask(),
}


def by_tiles(query, key, value, rule, **options):
    """Output, bound and seen, whole, by `tiles`."""
    found = list(tiles(query, key, value, rule, SCALING, tile_bytes=2**30, **options))
    assert len(found) == 1
    return found[0].output, found[0].output_bound, found[0].seen


def assembled(query, key, value, rule, **options):
    """The same by `outputs`; every row of every head is given once."""
    batch, heads, queries, _ = query.shape
    output = torch.full((batch, heads, queries, value.shape[-1]), torch.nan, dtype=torch.float64)
    bound, seen = output.clone(), torch.ones(batch, heads, queries, dtype=torch.bool)
    for rows in list(outputs(query, key, value, rule, SCALING, **options)):
        here = (rows.text, rows.heads, slice(rows.start, rows.stop))
        assert output[here].isnan().all()
        output[here] = rows.output
        if rows.bound is not None:
            bound[here] = rows.bound
        if rows.seen is not None:
            seen[here] = rows.seen
    assert not output.isnan().any()
    return output, bound, seen


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("tile_bytes", [1, 8 * 2 * KEYS * 3, 2**21])
def test_output_equals_the_tiles_for_any_rule_and_size(name, tile_bytes):
    expected = by_tiles(*operands(), RULES[name])
    found = assembled(*operands(), RULES[name], tile_bytes=tile_bytes)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-12, atol=1e-15)
    assert torch.equal(found[2], expected[2].expand_as(found[2]))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("text", range(BATCH))
@pytest.mark.parametrize("rows", [slice(None), slice(2, 3), slice(3, 9)])
@pytest.mark.parametrize(
    "terms", [Terms(), Terms(softcap=2.0, sinks=torch.arange(-2.0, HEADS - 2))]
)
@pytest.mark.parametrize("tile", [1, 8 * 2 * KEYS * 3, 2**21])
def test_weights_of_one_text_equal_the_tiles(name, text, rows, terms, tile, monkeypatch):
    monkeypatch.setattr(module, "TILE_BYTES", tile)
    query, key, value = operands(spread=9.0)
    rule = RULES[name].within(text, range(HEADS), slice(0, QUERIES), slice(0, KEYS))
    own = (one[text : text + 1] for one in (query, key, value))
    (whole,) = tiles(*own, rule, SCALING, terms, tile_bytes=2**30)
    expected = torch.zeros(HEADS, QUERIES, KEYS, dtype=torch.float64)
    expected[..., : whole.weights.shape[-1]] = whole.weights[0]
    found = weights(query[text], key[text], rule, SCALING, terms, rows=rows)
    np.testing.assert_allclose(found, expected[:, rows], rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tile_bytes", [1, 2**21])
@pytest.mark.parametrize("size", [SIZE, 64])
def test_bound_is_that_of_the_weights_and_little_more(name, dtype, tile_bytes, size):
    rounding = arithmetic(dtype, "sdpa")
    given = operands(dtype=dtype, size=size)
    assert RowBounds.of(*given[:2], SCALING, rounding) is not None
    _, least, seen = by_tiles(*given, RULES[name], rounding=rounding)
    _, bound, _ = assembled(*given, RULES[name], rounding=rounding, tile_bytes=tile_bytes)
    ratio = (bound / least)[seen.expand(bound.shape[:3])]
    print(name, dtype, size, ratio.min(), ratio.mean(), ratio.max())
    assert ratio.min() >= 1 - 1e-9
    # Beside size + 8 units of |q||k|, scores may be off by 5 of |s| and 3 of the row's largest:
    # here by as many of |q||k| and of |q| times the largest |k|.
    norms = given[1].double().norm(dim=-1)
    given_away = (5 + 3 * (norms.amax(-1, keepdim=True) / norms).max()) / (size + 8)
    assert ratio.max() <= min(1 + given_away, 1.35)
    assert ratio.mean() <= 1.2


def test_bound_is_that_of_the_weights_where_scores_are_as_large_as_their_operands():
    """Of one number each, |q·k| is |q||k|; and of keys of one length the largest is each: nothing
    is given away but the float32 sums' rounding, though scores be off by so much that expm1 tells.
    """
    given = [
        one / one.abs() * size for one, size in zip(operands(size=1), (3e4, 1, 1), strict=True)
    ]
    rounding, rule = arithmetic(torch.float32, "sdpa"), RULES["all keys"]
    _, least, _ = by_tiles(*given, rule, rounding=rounding)
    _, bound, _ = assembled(*given, rule, rounding=rounding)
    assert least.min() > 0.009
    np.testing.assert_allclose(bound / least, 1, atol=1e-5)
    assert (bound >= least).all()


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([0.0, 1e-3, 0.3, 3.0, 30.0]),
    st.sampled_from([1e-40, 1e-20, 1.0, 1e20]),
    st.sampled_from(list(RULES)),
    st.sampled_from(["sdpa", "eager", "somebodys_own"]),
)
def test_bound_is_never_below_that_of_the_weights(seed, spread, scale, name, kernel):
    query, key, value = operands(seed, spread=spread)
    key[..., 3, :] *= 5  # a key that stands out, as a text's first token does
    rounding = arithmetic(torch.float32, kernel)
    given = (query, key, value * scale)
    _, least, seen = by_tiles(*given, RULES[name], rounding=rounding)
    _, bound, _ = assembled(*given, RULES[name], rounding=rounding)
    assert bool((bound >= least * (1 - 1e-9))[seen.expand(bound.shape[:3])].all())


@pytest.mark.parametrize(
    ("dtype", "kernel", "spread", "terms"),
    [
        (torch.float64, "sdpa", 1.0, Terms()),
        (torch.float16, "eager", 1.0, Terms()),
        (torch.bfloat16, "somebodys_own", 1.0, Terms()),
        (torch.float32, "sdpa", 3e4, Terms()),
        (torch.float32, "sdpa", 1.0, Terms(softcap=20.0)),
        (torch.float32, "sdpa", 1.0, Terms(sinks=torch.randn(HEADS))),
        (torch.float32, "sdpa", 1.0, Terms(bias=torch.randn(1, HEADS, QUERIES, KEYS))),
    ],
)
def test_bound_is_by_weights_where_the_other_would_be_looser(dtype, kernel, spread, terms):
    given, rounding = operands(dtype=dtype, spread=spread), arithmetic(dtype, kernel)
    options = {"terms": terms, "rounding": rounding}
    expected = by_tiles(*given, RULES["padding"], **options)
    found = assembled(*given, RULES["padding"], **options)
    assert all(torch.equal(*pair) for pair in zip(found[:2], expected[:2], strict=True))


def test_rows_that_are_kept_stay_as_they_are():
    given, rule = operands(queries=200, keys=200), MaskRule(200, 200)
    options = {"rounding": arithmetic(torch.float32, "sdpa"), "tile_bytes": 2**15}
    kept = list(outputs(*given, rule, SCALING, **options))
    assert len(kept) > 10
    pointers = {one.untyped_storage().data_ptr() for r in kept for one in (r.output, r.bound)}
    assert len(pointers) == 2 * len(kept)
    again = outputs(*given, rule, SCALING, **options)
    assert all(torch.equal(one.bound, other.bound) for one, other in zip(kept, again, strict=True))


def test_the_models_own_tensors_are_not_written_to():
    given = operands(dtype=torch.float64)
    before = [one.clone() for one in given]
    attention(*given, RULES["causal"], SCALING)
    assert all(torch.equal(*pair) for pair in zip(given, before, strict=True))


def test_no_scores_beyond_the_diagonal_are_computed(monkeypatch):
    given, rule = operands(queries=300, keys=300), MaskRule(300, 300)
    seen = []
    bmm = torch.bmm

    def counted(left, right, **more):
        if left.shape[2] == SIZE:  # the scores
            seen.append(left.shape[0] * left.shape[1] * right.shape[2])
        return bmm(left, right, **more)

    monkeypatch.setattr(module.torch, "bmm", counted)
    attention(*given, rule, SCALING)
    assert 0.5 < sum(seen) / (BATCH * HEADS * 300 * 300) < 0.62
