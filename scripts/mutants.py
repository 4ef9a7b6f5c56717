"""Wrong attention, on purpose: how far beyond its bound does `verify` find each mutant?

Each mutant is a right kernel with one thing wrong, put where transformers looks the kernel up. A
GPT-2 that runs with it must be reported as a mismatch. `python scripts/mutants.py` prints the
table; `tests/test_mutants.py` asserts it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_utils import AttentionInterface
from transformers.models.gpt2 import modeling_gpt2

from attnprobe.capturing import capture
from attnprobe.report import VerificationReport
from attnprobe.verification import verify

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LOWER = {
    torch.float32: torch.float16,
    torch.float16: torch.bfloat16,
    torch.bfloat16: torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class Size:
    """A small GPT-2 and a batch of two texts for it; no two sizes alike, so no swap can pass."""

    heads: int
    head_size: int
    layers: int
    tokens: tuple[int, int]

    @property
    def embedding(self) -> int:
        """The model's width, E = H·D."""
        return self.heads * self.head_size


SIZES = (Size(6, 10, 2, (11, 7)), Size(3, 64, 2, (37, 29)), Size(5, 16, 3, (130, 101)))

Inputs = tuple[nn.Module, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]]
Kernel = Callable[..., tuple[Tensor, Tensor | None]]
Mutant = Callable[[Kernel, Inputs], tuple[Tensor, Tensor | None]]


def unchanged(kernel: Kernel, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """No mutant: the kernel as it is."""
    module, query, key, value, mask, rest = inputs
    return kernel(module, query, key, value, mask, **rest)


def no_scaling(kernel: Kernel, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """softmax(QKᵀ + M)V."""
    module, query, key, value, mask, rest = inputs
    return kernel(module, query, key, value, mask, **rest | {"scaling": 1.0})


def scaled_by_embedding(kernel: Kernel, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Divided by the root of the embedding's size instead of one head's."""
    module, query, key, value, mask, rest = inputs
    scaling = (query.shape[1] * query.shape[3]) ** -0.5
    return kernel(module, query, key, value, mask, **rest | {"scaling": scaling})


def no_mask(kernel: Kernel, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Every word sees every other, and the padding."""
    module, query, key, value, _, rest = inputs
    return kernel(module, query, key, value, None, **rest | {"is_causal": False})


def mask_one_later(kernel: Kernel, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """The diagonal one key further: each word sees the next one."""
    return _with_diagonal(kernel, inputs, 1)


def mask_one_earlier(kernel: Kernel, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """The diagonal one key back: no word but the first sees itself."""
    return _with_diagonal(kernel, inputs, -1)


def padding_ignored(kernel: Kernel, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Causal, but padded keys are attended to."""
    module, query, key, value, _, rest = inputs
    causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    return kernel(module, query, key, value, _as_additive(causal, query.dtype), **rest)


def softmax_over_queries(kernel: Kernel, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Columns sum to 1 instead of rows."""
    return _by_hand(inputs, lambda scores: scores.softmax(-2).nan_to_num())


def heads_swapped(kernel: Kernel, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """The first two heads stand in each other's place."""
    output, weights = unchanged(kernel, inputs)
    order = [1, 0, *range(2, output.shape[2])]
    return output[:, :, order], None if weights is None else weights[:, order]


def value_of_wrong_layer(kernel: Kernel, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Values of the layer before, from the second layer on."""
    module, query, key, value, mask, rest = inputs
    before = value if module.layer_idx == 0 else value_of_wrong_layer.value
    value_of_wrong_layer.value = value
    return kernel(module, query, key, before, mask, **rest)


def weights_rounded(kernel: Kernel, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Weights kept in the next lower dtype: float32 → float16 → bfloat16 → float8."""
    lower = LOWER[inputs[3].dtype]
    return _by_hand(inputs, lambda scores: scores.softmax(-1).to(lower).to(scores.dtype))


MUTANTS: tuple[Mutant, ...] = (
    no_scaling,
    scaled_by_embedding,
    no_mask,
    mask_one_later,
    mask_one_earlier,
    padding_ignored,
    softmax_over_queries,
    heads_swapped,
    value_of_wrong_layer,
    weights_rounded,
)


@contextmanager
def installed(mutant: Mutant) -> Iterator[None]:
    """Have transformers hand out the mutant in place of GPT-2's sdpa and eager kernels."""

    def mutated(kernel: Kernel) -> Kernel:
        def run(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            **rest: Any,
        ) -> tuple[Tensor, Tensor | None]:
            return mutant(kernel, (module, query, key, value, attention_mask, rest))

        return run

    kernels = AttentionInterface._global_mapping
    with (
        mock.patch.dict(kernels, sdpa=mutated(kernels["sdpa"])),
        mock.patch.object(
            modeling_gpt2,
            "eager_attention_forward",
            mutated(modeling_gpt2.eager_attention_forward),
        ),
    ):
        yield


def model(size: Size, kernel: str, dtype: torch.dtype, seed: int, spread: float) -> GPT2LMHeadModel:
    """A random GPT-2 whose scores have about the given standard deviation."""
    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=size.layers,
        n_head=size.heads,
        n_embd=size.embedding,
        n_positions=256,
        vocab_size=211,
        initializer_range=(spread / size.embedding) ** 0.5,
        attn_implementation=kernel,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).eval().to(dtype)


def report(
    mutant: Mutant,
    size: Size,
    kernel: str,
    dtype: torch.dtype,
    seed: int,
    spread: float = 3.0,
) -> VerificationReport:
    """What `verify` says of a model that runs with the mutant."""
    lm = model(size, kernel, dtype, seed, spread)
    texts = [torch.randint(1, 211, (tokens,)).tolist() for tokens in size.tokens]
    with installed(mutant):
        return verify(capture(lm, texts, padding_side="left" if seed % 2 else "right"))


def beyond(found: VerificationReport) -> float:
    """The largest ratio of error to bound among the checks that compare numbers."""
    frame = found.to_frame()
    return float(frame[frame.check.isin(["weights", "output", "logits"])].ratio.max())


def _with_diagonal(kernel: Kernel, inputs: Inputs, diagonal: int) -> tuple[Tensor, Tensor | None]:
    module, query, key, value, mask, rest = inputs
    allowed = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(diagonal)
    allowed[0, 0] = True  # a row without any key would be NaN, and no test
    if mask is not None:  # what padding hides stays hidden
        hides = ~mask if mask.dtype == torch.bool else mask < -1e4
        allowed = allowed & ~hides.all(-2, keepdim=True)
    return kernel(module, query, key, value, _as_additive(allowed, query.dtype), **rest)


def _as_additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(allowed.shape, dtype=dtype)
    mask = mask.masked_fill(~allowed, torch.finfo(dtype).min)
    return mask.view(-1, 1, *mask.shape[-2:])


def _by_hand(inputs: Inputs, weigh: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor | None]:
    """Attention in float32 with another way from scores to weights; rounded as eager, if eager."""
    module, query, key, value, mask, rest = inputs
    wide = torch.float32 if module.config._attn_implementation == "sdpa" else query.dtype
    scores = query.to(wide) @ key.to(wide).transpose(-1, -2) * rest["scaling"]
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask.dtype == torch.bool:
        mask = _as_additive(mask.view(-1, *mask.shape[-2:]), wide)
    weights = weigh(scores + mask.to(wide))
    output = (weights @ value.to(wide)).to(value.dtype).transpose(1, 2)
    return output, weights if module.config._attn_implementation == "eager" else None


def main() -> int:
    """Print the smallest ratio of each mutant over seeds and sizes, per kernel and dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--spread", type=float, default=3.0, help="standard deviation of scores")
    options = parser.parse_args()
    seeds = range(options.seeds)
    transformers.logging.set_verbosity_error()
    print("Error / bound, least and most over", len(seeds), "seeds and", len(SIZES), "sizes;")
    print(f"above 1 is a mismatch. Scores have a standard deviation of {options.spread:g}.\n")
    missed = 0
    for kernel in ("sdpa", "eager"):
        for dtype in DTYPES:
            print(kernel, str(dtype).removeprefix("torch."))
            for mutant in (unchanged, *MUTANTS):
                runs = [
                    report(mutant, size, kernel, dtype, seed, options.spread)
                    for size in SIZES
                    for seed in seeds
                ]
                ratios = [beyond(run) for run in runs]
                wrong = sum(run.passed != (mutant is unchanged) for run in runs)
                missed += wrong
                print(
                    f"  {mutant.__name__:22} {min(ratios):10.3g} {max(ratios):10.3g}"
                    + (f"   {wrong} of {len(runs)} judged wrongly" if wrong else "")
                )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
