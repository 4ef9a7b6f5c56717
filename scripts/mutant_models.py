"""Small models of every kind of attention, for `mutants`: what each has that may be got wrong.

What is said of a kind here (that it has a window of 5, in its first layer) is written down by hand,
not read by attnprobe from the config: a fact that attnprobe reads wrongly shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from architecture_trial import TASKS
from small_configs import FIRST_WORD, LAST_WORD, small_model
from torch import Tensor, nn

from attnprobe.capturing import capture
from attnprobe.records import Capture

SEAM = ("sdpa", "eager")


@dataclass(frozen=True)
class Rule:
    """Which keys a query may attend to, as `attnprobe.masks.MaskRule` has it; by its own code."""

    padding: Tensor  # (B, S) bool, True where a token stands
    causal: bool = True
    diagonal: int = 0  # how many keys further than itself a word sees, where causal
    window: int | None = None
    ahead: int | None = None
    chunk: int | None = None

    def allowed(self, queries: int) -> Tensor:
        """(B, 1, T, S) bool. A row without a key sees the one at its own place."""
        keys = self.padding.shape[1]
        row, column = torch.arange(queries)[:, None], torch.arange(keys)
        seen = torch.ones(queries, keys, dtype=torch.bool)
        if self.causal:
            seen &= column <= row + self.diagonal
        if self.window is not None:
            seen &= column > row - self.window
        if self.ahead is not None:
            seen &= column <= row + self.ahead
        by_text = seen & self.padding[:, None]  # (B, T, S)
        if self.chunk is not None:
            first = self.padding.int().argmax(-1)[:, None, None]
            by_text &= (row - first) // self.chunk == (column - first) // self.chunk
        alone = ~by_text.any(-1, keepdim=True) & torch.eye(queries, keys, dtype=torch.bool)
        return (by_text | alone)[:, None]


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of attention, and a model type that has it.

    Attributes:
        type: transformers' name of the model type.
        task: causal, masked or seq2seq.
        note: what tells it from another kind of the same type.
        kernels: those it has; one that computes attention by torch calls of its own has eager only.
        own: whether it does so.
        scale: the factor on q·k: "head" for 1/√d_k, "none", or "other".
        grouped: whether fewer key heads than heads, and more than one.
        rotary: what the modeling file calls the function that turns query and key.
        norm: whether query and key have norms.
        softcap, sinks, bias: whether it has them.
        window, ahead: how many keys a query sees back, itself included, and ahead.
        windowed: in which layers; by default in all.
        chunk, chunked: the size of chunks, and the layers.
        facts: whether attnprobe knows that the config's facts hold for the type.
        projected: whether attnprobe knows the layers' own weights, and what follows on them.
        spread: see `small_model`; such that scores have a standard deviation of about 2.
        changes: fields of the config that are other than `small_configs` makes them.
        tokens: of the two texts.
    """

    type: str
    task: str = "causal"
    note: str = ""
    kernels: tuple[str, ...] = SEAM
    own: bool = False
    scale: str = "head"
    grouped: bool = False
    rotary: str = ""
    norm: bool = False
    softcap: bool = False
    sinks: bool = False
    bias: bool = False
    window: int | None = None
    ahead: int | None = None
    windowed: tuple[int, ...] = (0, 1)
    chunk: int | None = None
    chunked: tuple[int, ...] = (0,)
    facts: bool = True
    projected: bool = True
    spread: float = 2.0
    changes: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[int, int] = (11, 7)

    @property
    def name(self) -> str:
        """The type, and what is special."""
        return f"{self.type}, {self.note}" if self.note else self.type

    @property
    def pair(self) -> bool:
        """Whether it is an encoder-decoder."""
        return self.task == "seq2seq"

    @property
    def causal(self) -> bool:
        """Whether some of its attention is causal."""
        return self.task != "masked"

    def padding(self, keys: int, seed: int) -> Tensor:
        """(B, S) bool, True where a token stands, of what `captured` gives the model."""
        lengths = TARGETS if self.pair and keys == max(TARGETS) else self.tokens
        places = torch.arange(keys).expand(2, -1)
        own = torch.tensor(lengths)[:, None]
        return places >= keys - own if self.left(seed) else places < own

    def left(self, seed: int) -> bool:
        """Whether texts are padded on the left: in every other seed, where that is usual."""
        return self.task == "causal" and seed % 2 == 0

    def rule(self, layer: int, queries: int, keys: int, seed: int) -> Rule:
        """What the queries of a layer may see."""
        windowed = layer in self.windowed
        return Rule(
            self.padding(keys, seed),
            causal=queries == keys == max(TARGETS) if self.pair else self.causal,
            window=self.window if windowed else None,
            ahead=self.ahead if windowed else None,
            chunk=self.chunk if layer in self.chunked else None,
        )


TARGETS = (8, 9)
"""How many tokens a decoder is given, beside the two texts."""

ROTARY = "apply_rotary_pos_emb"
_LONG = {"n_embd": 192, "n_head": 3, "n_positions": 256}
_GROUPED: dict[str, Any] = {"grouped": True, "rotary": ROTARY}
_LATENT: dict[str, Any] = {"rotary": "apply_rotary_pos_emb_interleave", "projected": False}
_OWN: dict[str, Any] = {"own": True, "kernels": ("eager",)}
_FIRST: dict[str, Any] = {"window": 5, "windowed": (0,)}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "mscale": 1.0}
_YARN |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 16}
_CAP = {"attn_logit_softcapping": 5.0}

KINDS = (
    Kind("gpt2", spread=6.0),
    Kind("gpt2", note="70 tokens", changes=_LONG, tokens=(70, 67), spread=6.0),
    Kind("gpt_bigcode"),
    Kind("opt", scale="none"),
    Kind("llama", **_GROUPED),
    Kind("mistral", **_GROUPED, window=5),
    Kind("qwen3", **_GROUPED, norm=True),
    Kind("phi", **_GROUPED),
    Kind("gpt_neox", rotary=ROTARY),
    Kind("cohere", **_GROUPED),
    Kind("cohere2", **_GROUPED, **_FIRST, projected=False),
    Kind(
        "gemma2",
        **(_GROUPED | _FIRST),
        kernels=("eager",),
        scale="other",
        softcap=True,
        changes=_CAP,
        spread=0.8,
    ),
    Kind("gemma3_text", **_GROUPED, **_FIRST, scale="other", norm=True, facts=False),
    Kind("gpt_oss", **_GROUPED, **_FIRST, kernels=("eager",), sinks=True, spread=1.2),
    Kind(
        "llama4_text",
        grouped=True,
        rotary="apply_rotary_emb",
        chunk=5,
        facts=False,
        projected=False,
    ),
    Kind("deepseek_v3", **_LATENT),
    Kind("deepseek_v3", note="YaRN", **_LATENT, scale="other", changes={"rope_parameters": _YARN}),
    Kind("diffllama", **_GROUPED, projected=False),
    Kind("bert", "masked"),
    Kind(
        "modernbert",
        "masked",
        rotary=ROTARY,
        window=4,
        ahead=3,
        windowed=(1,),
        projected=False,
    ),
    Kind("t5", "seq2seq", scale="none", bias=True, spread=0.35),
    Kind("bart", "seq2seq"),
    Kind("openai-gpt", **_OWN, projected=False),
    Kind("roformer", "masked", **_OWN, projected=False, spread=1.0),
    Kind("gpt_neo", **_OWN, scale="none", window=6, windowed=(1,), facts=False, spread=0.25),
    Kind("bloom", **_OWN, bias=True, spread=1.0),
)


def made(kind: Kind, kernel: str, dtype: torch.dtype, seed: int, spread: float = 1.0) -> nn.Module:
    """The kind's small random model; `spread` makes its scores so many times as large."""
    return small_model(
        kind.type,
        getattr(transformers, TASKS[kind.task][kind.type]),
        kernel,
        decoder=kind.task == "causal",
        seed=seed,
        spread=kind.spread * spread,
        **kind.changes,
    ).to(dtype)


def captured(kind: Kind, model: nn.Module, seed: int) -> Capture:
    """A capture of two texts of the kind's lengths."""
    return capture(
        model,
        _words(kind.tokens, seed),
        target=_words(TARGETS, seed + 3) if kind.pair else None,
        padding_side="left" if kind.left(seed) else "right",
    )


def _words(lengths: tuple[int, int], first: int) -> list[list[int]]:
    count = LAST_WORD - FIRST_WORD + 1
    return [
        [FIRST_WORD + (17 * at + 5 * length + first) % count for at in range(length)]
        for length in lengths
    ]
