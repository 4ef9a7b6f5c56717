from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnprobe.masks import GivenMask, MaskRule, additive, disagreement


@settings(deadline=None)  # the first call of torch takes its time
@given(
    st.integers(1, 7),
    st.integers(0, 5),
    st.booleans(),
    st.none() | st.integers(1, 6),
    st.none() | st.integers(0, 4),
    st.none() | st.integers(1, 5),
    st.integers(0, 2**14 - 1),
)
def test_rule_equals_its_definition_by_loops(queries, offset, causal, window, ahead, chunk, bits):
    keys = queries + offset
    padding = torch.tensor([[bool(bits >> j & 1) for j in range(keys)], [True] * keys])
    rule = MaskRule(queries, keys, causal, window, padding, offset, ahead, chunk)
    allowed = rule.allowed(keys=keys)
    for b in range(2):
        first = padding[b].tolist().index(True) if padding[b].any() else 0
        for i in range(queries):
            for j in range(keys):
                at = offset + i
                expected = bool(padding[b, j])
                if causal:
                    expected = expected and j <= at
                if window is not None:
                    expected = expected and j >= at - window + 1
                if ahead is not None:
                    expected = expected and j <= at + ahead
                if chunk is not None:
                    expected = expected and (at - first) // chunk == (j - first) // chunk
                assert allowed[b, 0, i, j] == expected


def test_tiles_of_rows_reach_no_further_than_they_see():
    rule = MaskRule(5, 9, offset=4)
    assert [rule.reach(stop) for stop in (1, 3, 5)] == [5, 7, 9]
    assert rule.allowed(1, 3).shape == (1, 1, 2, 7)
    assert torch.equal(rule.allowed(1, 3), rule.allowed(keys=9)[:, :, 1:3, :7])
    assert MaskRule(5, 9, causal=False).reach(1) == 9


def test_a_single_query_over_a_cache_sees_all_of_it():
    assert bool(MaskRule(1, 6, offset=5).allowed().all())


def test_additive_is_zero_or_minus_infinity():
    assert additive(torch.tensor([True, False])).tolist() == [0.0, float("-inf")]


@pytest.mark.parametrize("hidden", [float("-inf"), torch.finfo(torch.float16).min, -1e4])
def test_masks_that_mean_the_same_do_not_differ(hidden):
    allowed = MaskRule(4, 4).allowed()
    passed = torch.zeros(1, 1, 4, 4).masked_fill(~allowed, hidden)
    assert not disagreement(passed, allowed).any()
    assert not disagreement(allowed.clone(), allowed).any()


@pytest.mark.parametrize(("entry", "value"), [((2, 3), 0.0), ((2, 1), -torch.inf), ((3, 0), 0.5)])
def test_one_wrong_entry_is_found_where_it_is(entry, value):
    allowed = MaskRule(4, 4).allowed()
    passed = additive(allowed)
    passed[0, 0, *entry] = value
    assert disagreement(passed, allowed).nonzero().tolist() == [[0, 0, *entry]]


def test_rows_without_a_key_never_differ():
    rule = MaskRule(3, 3, padding=torch.tensor([[False, True, True]]))
    passed = additive(rule.allowed())
    passed[0, 0, 0] = 0.0  # as sdpa's masks have it: a row that sees nothing may see anything
    assert not disagreement(passed, rule.allowed()).any()


@given(
    st.integers(1, 9),
    st.integers(0, 6),
    st.booleans(),
    st.sampled_from([None, 3]),
    st.sampled_from([None, 4]),
    st.booleans(),
)
def test_what_is_open_to_all_rows_is_allowed_and_the_rest_is_the_same(
    queries, offset, causal, window, chunk, padded
):
    keys = queries + offset
    padding = torch.arange(keys)[None] > 1 if padded else None
    rule = MaskRule(queries, keys, causal, window, padding, offset, None, chunk)
    for start in range(queries):
        allowed = rule.allowed(start, queries)
        first = rule.open_to(start)
        assert allowed[..., :first].all()
        assert torch.equal(rule.allowed(start, queries, first=first), allowed[..., first:])
    if causal and window is None and chunk is None and not padded:
        assert rule.open_to(0) == offset + 1


def test_a_rule_is_the_same_only_fact_by_fact():
    padding = torch.tensor([[False, True, True]])
    rule = MaskRule(3, 3, padding=padding)
    assert rule.same_as(MaskRule(3, 3, padding=padding.clone()))
    others = [{"padding": ~padding}, {"padding": None}, {"window": 2}, {"offset": 1}]
    others += [{"causal": False}, {"ahead": 1}, {"chunk": 2}, {"keys": 2}, {"queries": 2}]
    for other in others:
        assert not rule.same_as(replace(rule, **other)), other
    assert not rule.same_as(GivenMask(torch.ones(1, 1, 3, 3, dtype=torch.bool), 3))
