"""ALiBi's slopes and T5's buckets, against the papers' formulas and values worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from attnprobe.biases import ByDistance, ByKey, alibi, alibi_slopes, distance_buckets, learned
from attnprobe.masks import MaskRule
from attnprobe.outputs import attention
from attnprobe.terms import Terms

# Slopes


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [8]),
        (2, [4, 8]),
        (3, [4, 8, 2]),
        (6, [2, 4, 6, 8, 1, 3]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
        (16, [n / 2 for n in range(1, 17)]),
    ],
)
def test_slopes_by_hand(heads, exponents):
    assert alibi_slopes(heads).tolist() == pytest.approx([2**-n for n in exponents], rel=1e-15)


def test_eight_heads_are_the_papers():
    assert alibi_slopes(8).tolist() == [
        1 / 2,
        1 / 4,
        1 / 8,
        1 / 16,
        1 / 32,
        1 / 64,
        1 / 128,
        1 / 256,
    ]


def slopes_of_the_paper(heads):
    """`get_slopes` as Press et al. wrote it."""

    def of_a_power(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(heads).is_integer():
        return of_a_power(heads)
    closest = 2 ** math.floor(math.log2(heads))
    return of_a_power(closest) + slopes_of_the_paper(2 * closest)[0::2][: heads - closest]


def test_slopes_of_any_number_of_heads():
    for heads in range(1, 131):
        assert alibi_slopes(heads).tolist() == pytest.approx(slopes_of_the_paper(heads), rel=1e-12)


def test_a_largest_exponent_of_another_size():
    # MPT: 2^(-16·i/4), and of 3 heads the second and the fourth of those first.
    assert alibi_slopes(4, 16).tolist() == [2**-4, 2**-8, 2**-12, 2**-16]
    assert alibi_slopes(3, 16).tolist() == [2**-8, 2**-16, 2**-4]


def test_alibi_is_slope_times_position():
    positions = torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 3, 0]])
    bias = alibi(alibi_slopes(3), positions, 0.5, (torch.float16,))
    assert bias.values.shape == (2, 3, 1, 5)
    assert bias.values[1, 2, 0].tolist() == [0, 1 / 8, 1 / 4, 3 / 8, 0]
    assert bias.rows(4, 9, 4).shape == (2, 3, 1, 4)
    rule, scores = MaskRule(5, 5), torch.randn(1, 3, 5, 5, dtype=torch.float64)
    # The paper's own -slope·(i - j) gives the same weights.
    back = torch.arange(5) - torch.arange(5)[:, None]
    paper = alibi_slopes(3)[:, None, None] * back
    ours = alibi(alibi_slopes(3), torch.arange(5)[None], 1.0, ()).rows(0, 5, 5)
    weights = [
        (scores + one).masked_fill(~rule.allowed(), -torch.inf).softmax(-1) for one in (paper, ours)
    ]
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [24, 112])
def test_the_unit_holds_for_slopes_made_in_float32(heads, dtype):
    """As BLOOM makes them: powers of a rounded base, times positions, cast to the model's dtype."""
    exact = alibi(alibi_slopes(heads), torch.arange(2000)[None], 1.0, (dtype,))
    power = 2 ** math.floor(math.log2(heads))
    made = []
    for base, steps in (
        (power, range(1, power + 1)),
        (2 * power, range(1, 2 * (heads - power), 2)),
    ):
        start = torch.tensor(2 ** (-(2 ** -(math.log2(base) - 3))), dtype=torch.float32)
        made += [torch.pow(start, torch.tensor(steps, dtype=torch.int32))]
    rounded = (torch.cat(made)[:, None] * torch.arange(2000)).to(dtype)
    error = (rounded.double() - exact.values[0, :, 0]).abs()
    assert (error <= exact.unit * exact.values[0, :, 0]).all()
    relative = (error[:, 1:] / exact.values[0, :, 0, 1:]).max()
    assert relative > exact.unit * (0.9 if dtype != torch.float32 else 0.01)  # and is not empty


# Buckets


@pytest.mark.parametrize(
    ("distance", "bucket"),
    # 16 + ⌊ln(n / 16) / ln 8 · 16⌋: 18 → 0.91, 19 → 1.32, 32 → 5.33, 64 → 10.67, 127 → 15.94
    [
        *((0, 0), (-1, 1), (-15, 15), (-16, 16), (-18, 16), (-19, 17), (-32, 21), (-64, 26)),
        *((-127, 31), (-128, 31), (-5000, 31), (1, 0), (700, 0)),
    ],
)
def test_buckets_of_a_decoder_by_hand(distance, bucket):
    found = distance_buckets(torch.tensor([distance]), 32, 128, one_sided=True)
    assert found.tolist() == [bucket]


@pytest.mark.parametrize(
    ("distance", "bucket"),
    # 8 + ⌊ln(n / 8) / ln 16 · 8⌋: 11 → 0.92, 12 → 1.17, 15 → 1.81, 16 → 2, 32 → 4, 127 → 7.98
    [
        *((0, 0), (1, 1), (7, 7), (8, 8), (11, 8), (12, 9), (15, 9), (16, 10), (31, 11), (32, 12)),
        *((64, 14), (127, 15), (128, 15), (900, 15)),
    ],
)
def test_buckets_of_an_encoder_by_hand(distance, bucket):
    found = distance_buckets(torch.tensor([-distance, distance]), 32, 128, one_sided=False)
    assert found.tolist() == [bucket, bucket + 16 * (distance > 0)]


def bucket_of_the_paper(distance, count, farthest, one_sided):
    """In plain Python: floats, with room for their rounding where a bucket begins."""
    side = 0
    if one_sided:
        distance = max(-distance, 0)
    else:
        count //= 2
        side = count if distance > 0 else 0
        distance = abs(distance)
    exact = count // 2
    if distance < exact:
        return side + distance
    grown = math.log(distance / exact) / math.log(farthest / exact) * (count - exact)
    return side + min(exact + math.floor(grown + 1e-9), count - 1)


@pytest.mark.parametrize("one_sided", [True, False])
@pytest.mark.parametrize(("count", "farthest"), [(32, 128), (12, 20), (24, 100), (64, 800)])
def test_buckets_of_every_distance(count, farthest, one_sided):
    distances = torch.arange(-1000, 1001)
    found = distance_buckets(distances, count, farthest, one_sided=one_sided).tolist()
    assert found == [bucket_of_the_paper(n, count, farthest, one_sided) for n in range(-1000, 1001)]
    # T5's own, whose logarithms are in float32, are the same.
    theirs = T5Attention._relative_position_bucket(distances, not one_sided, count, farthest)
    assert found == theirs.tolist()


# Rows of them


@pytest.mark.parametrize(
    ("queries", "keys", "offset"), [(5, 5, 0), (3, 11, 8), (1, 9, 8), (7, 13, 2)]
)
def test_a_learned_bias_by_loops(queries, keys, offset):
    table = torch.randn(8, 3)
    bias = learned(table, queries, keys, offset, 20, one_sided=False)
    whole = bias.rows(0, queries, keys)
    assert whole.shape == (1, 3, queries, keys)
    assert whole.dtype == torch.float64
    for i in range(queries):
        for j in range(keys):
            bucket = bucket_of_the_paper(j - offset - i, 8, 20, False)
            assert torch.equal(whole[0, :, i, j], table[bucket].double())
    assert torch.equal(bias.rows(1, queries, keys - 2), whole[:, :, 1:, : keys - 2])
    assert bias.unit == 0


def test_terms_take_a_bias_by_rows_as_they_take_a_tensor():
    values = torch.randn(4, 11 + 13 - 1, dtype=torch.float64)
    by_rows = ByDistance(values, 11)
    whole = by_rows.rows(0, 11, 13)
    query, key, value = (torch.randn(2, 4, n, 5) for n in (11, 13, 13))
    rule = MaskRule(11, 13, offset=2)
    outputs = [
        attention(query, key, value, rule, 0.4, Terms(bias=one)) for one in (by_rows, whole, None)
    ]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2])
    part = Terms(bias=by_rows).within(1, [2, 0], slice(3, 9), slice(4, 12)).bias
    assert torch.equal(part, whole[:, [2, 0], 3:9, 4:12])


def test_terms_say_how_far_a_bias_may_be_off():
    assert Terms().unit == Terms(bias=torch.ones(1, 1, 1, 2)).unit == 0
    assert Terms(bias=ByKey(torch.ones(1, 2, 1, 3), 0.25)).unit == 0.25
