"""Every mutant of attention is reported, in every dtype; the right kernel never is."""

import mutants
import pytest
import torch

CASES = [(kernel, dtype) for kernel in ("sdpa", "eager") for dtype in mutants.DTYPES]


@pytest.mark.parametrize(("kernel", "dtype"), CASES)
@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_is_caught(mutant, kernel, dtype):
    for size in mutants.SIZES:
        for seed in (0, 1):
            found = mutants.report(mutant, size, kernel, dtype, seed)
            print(mutant.__name__, kernel, dtype, size, seed, f"{mutants.beyond(found):.3g}")
            assert found.verdict == "mismatch"


@pytest.mark.parametrize(("kernel", "dtype"), CASES)
@pytest.mark.parametrize("spread", [0.3, 3.0, 20.0])
def test_the_right_kernel_is_never_reported(kernel, dtype, spread):
    for size in mutants.SIZES:
        for seed in (2, 3):
            found = mutants.report(mutants.unchanged, size, kernel, dtype, seed, spread)
            assert found.passed, found
            assert mutants.beyond(found) <= 1


@pytest.mark.parametrize(("kernel", "dtype"), CASES)
def test_with_sharp_scores_every_mutant_but_rounded_weights_is_caught(kernel, dtype):
    """Scores of 20 cost digits: there, weights rounded once more may lie within the rounding."""
    size = mutants.SIZES[1]
    for mutant in mutants.MUTANTS:
        if mutant is not mutants.weights_rounded:
            assert mutants.report(mutant, size, kernel, dtype, 0, 20.0).verdict == "mismatch"


def test_the_hidden_mutant_is_one_of_size_not_of_luck():
    """The one that hides: float16 weights in a fused float32 kernel, behind scores of 20."""
    size, kernel, dtype = mutants.SIZES[1], "sdpa", torch.float32
    ratios = {
        spread: mutants.beyond(
            mutants.report(mutants.weights_rounded, size, kernel, dtype, 0, spread)
        )
        for spread in (1.0, 3.0, 20.0)
    }
    print(ratios)
    assert ratios[1.0] > ratios[3.0] > 1 > ratios[20.0]
