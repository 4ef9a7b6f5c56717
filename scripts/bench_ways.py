"""The ways to look into a model that `bench.py` measures: attnprobe's and others'.

Each is given a model of its own kernel and returns what runs it. A library is imported where its
way is prepared: the others need not be there.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

Run = Callable[[Tensor], Any]
"""Runs a model on token ids, (B, T), and returns what is kept of it."""


@dataclass(frozen=True)
class Shape:
    """A random GPT-2 and the texts that it is given."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    vocabulary: int = 50257
    tokens: int = 128
    texts: int = 1
    seed: int = 0

    def model(self) -> GPT2LMHeadModel:
        """The same weights each time, large enough that attention is far from uniform."""
        torch.manual_seed(self.seed)
        sizes = {"n_layer": self.layers, "n_head": self.heads, "n_embd": self.width}
        ends = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
        config = GPT2Config(
            **sizes,
            **ends,
            vocab_size=self.vocabulary,
            n_positions=max(1024, self.tokens),
            initializer_range=(4 / self.width) ** 0.5,
            attn_implementation="sdpa",
        )
        return GPT2LMHeadModel(config).eval()

    def ids(self) -> Tensor:
        """Random token ids, (B, T)."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randint(self.vocabulary, (self.texts, self.tokens), generator=generator)


def plain(model: GPT2LMHeadModel) -> Run:
    return lambda ids: model(ids).logits


def output_attentions(model: GPT2LMHeadModel) -> Run:
    return lambda ids: model(ids, output_attentions=True)


def hooks(model: GPT2LMHeadModel) -> Run:
    """What any capture of query, key, value and head output must do at least: keep them."""

    def run(ids: Tensor) -> Any:
        kept: list[Tensor] = []
        with ExitStack() as stack:
            for block in model.transformer.h:
                attention = block.attn
                qkv = attention.c_attn.register_forward_hook(lambda m, a, out: kept.append(out))
                z = attention.c_proj.register_forward_pre_hook(lambda m, a: kept.append(a[0]))
                stack.callback(qkv.remove)
                stack.callback(z.remove)
            return model(ids).logits, kept

    return run


def products(model: GPT2LMHeadModel) -> Run:
    """A forward, and the least that a check of `output` in float64 does of each layer: q·k, softmax
    and ·V below the diagonal, and one float32 product of the weights for the bound. No mask, no
    bound, nothing compared: tiles of 64 rows of 4 heads, as `attnprobe.outputs` takes them at 1,024
    tokens, all in memory that is there."""
    heads, layers = model.config.n_head, model.config.n_layer
    size, height, some = model.config.n_embd // heads, 64, 4

    def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.rand(shape, dtype=dtype)

    def run(ids: Tensor) -> Any:
        texts, tokens = ids.shape
        query, key, value = (random(heads, tokens, size) for _ in range(3))
        absolute = random(heads, tokens, 2 * size, dtype=torch.float32)
        scores = random(some * height * tokens)
        narrow = torch.empty_like(scores, dtype=torch.float32)
        for first in [*range(0, heads, some)] * layers * texts:
            own = slice(first, min(first + some, heads))
            for start in range(0, tokens, height):
                stop = min(start + height, tokens)
                shape = (own.stop - first, stop - start, stop)
                weights = scores[: math.prod(shape)].view(shape)
                torch.bmm(query[own, start:stop], key[own, :stop].mT, out=weights)
                torch.softmax(weights, -1, out=weights)
                torch.bmm(weights, value[own, :stop])
                rounded = narrow[: math.prod(shape)].view(shape).copy_(weights)
                torch.bmm(rounded, absolute[own, :stop])
        return model(ids).logits

    return run


def capture(model: GPT2LMHeadModel) -> Run:
    import attnprobe as ap

    return lambda ids: ap.capture(model, ids)


def capture_and_weights(model: GPT2LMHeadModel) -> Run:
    import attnprobe as ap

    def run(ids: Tensor) -> Any:
        cap = ap.capture(model, ids)
        for layer in range(cap.layers):
            for text in range(len(cap)):
                ap.weights(cap, layer, text=text)
        return cap

    return run


def _verify(model: GPT2LMHeadModel, checks: list[str] | None) -> Run:
    import attnprobe as ap

    def run(ids: Tensor) -> Any:
        report = ap.verify(model, ids, checks=checks)
        if not report.passed:
            raise SystemExit(report.summary)
        return report

    return run


def verify_output(model: GPT2LMHeadModel) -> Run:
    return _verify(model, ["output"])


def verify_all(model: GPT2LMHeadModel) -> Run:
    return _verify(model, None)


def _bridge(model: GPT2LMHeadModel, names: tuple[str, ...] | None) -> Run:
    from transformer_lens.model_bridge import TransformerBridge

    with tempfile.TemporaryDirectory() as folder:  # it reads the config by name, then uses ours
        model.config.save_pretrained(folder)
        bridge = TransformerBridge.boot_transformers(folder, hf_model=model, device="cpu")
    keep = None if names is None else lambda name: name.endswith(names)
    return lambda ids: bridge.run_with_cache(ids, names_filter=keep)


def bridge_all(model: GPT2LMHeadModel) -> Run:
    return _bridge(model, None)


def bridge_attention(model: GPT2LMHeadModel) -> Run:
    ends = ("q", "k", "v", "attn_scores", "pattern", "z")
    return _bridge(model, tuple(f"attn.hook_{one}" for one in ends))


def nnsight_hooks(model: GPT2LMHeadModel) -> Run:
    from nnsight import NNsight

    wrapped = NNsight(model)

    def run(ids: Tensor) -> Any:
        kept: list[Any] = []
        with wrapped.trace(ids):
            for block in wrapped.transformer.h:
                kept.append(block.attn.c_attn.output.save())
                kept.append(block.attn.c_proj.input.save())
            logits = wrapped.output.logits.save()
        return logits, kept

    return run


def nnsight_weights(model: GPT2LMHeadModel) -> Run:
    from nnsight import NNsight

    wrapped = NNsight(model)

    def run(ids: Tensor) -> Any:
        kept: list[Any] = []
        with wrapped.trace(ids):
            for block in wrapped.transformer.h:
                kept.append(block.attn.c_attn.output.save())
                kept.append(block.attn.c_proj.input.save())
                kept.append(block.attn.output[1].save())
            logits = wrapped.output.logits.save()
        return logits, kept

    return run


def torchlens_trace(model: GPT2LMHeadModel) -> Run:
    import torchlens

    return lambda ids: torchlens.trace(model, ids)


def torchlens_softmax(model: GPT2LMHeadModel) -> Run:
    import torchlens

    return lambda ids: torchlens.record(model, ids, save=torchlens.func("softmax"))


EAGER = (
    output_attentions,
    nnsight_weights,
    torchlens_trace,  # under sdpa there are no weights to be seen
    torchlens_softmax,
)
WAYS: dict[str, tuple[Callable[[GPT2LMHeadModel], Run], str]] = {
    "plain eager": (plain, "eager"),
    **{
        one.__name__.replace("_", " "): (one, "eager" if one in EAGER else "sdpa")
        for one in (
            plain,
            *(output_attentions, hooks, capture, capture_and_weights),
            *(products, verify_output, verify_all),
            *(bridge_all, bridge_attention, nnsight_hooks, nnsight_weights),
            *(torchlens_trace, torchlens_softmax),
        )
    },
}
"""By name: what prepares it, and the kernel of its model."""


def prepared(shape: Shape, way: str, models: dict[str, GPT2LMHeadModel]) -> Run:
    """What runs a way. `models` are those made before, by kernel; a bridge gets one of its own, as
    it changes the model that it is given."""
    prepare, kernel = WAYS[way]
    of = way if prepare in (bridge_all, bridge_attention) else kernel
    if of not in models:
        models[of] = shape.model()
        models[of].set_attn_implementation(kernel)
    return prepare(models[of])
