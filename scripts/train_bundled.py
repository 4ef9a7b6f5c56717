"""Train the small GPT-2 that ships with attnprobe, and write its model card.

    python scripts/train_bundled.py CORPUS_FOLDER --out attnprobe/bundled
    python scripts/train_bundled.py CORPUS_FOLDER --out attnprobe/bundled --card-only

The corpus is any folder of plain text files. The last part of each file is held out: neither
the tokenizer nor the model sees it. The model is there to be looked at, so two well-known
circuits must be in it: a head that attends to the previous token, and an induction head, which
finds the earlier copy of the present token and attends to what came after it. Trials of some
minutes from a random start formed no induction head. So each batch mixes sequences that repeat
themselves with the text, and the run starts from a faint sketch of both heads. The card says so,
and gives their scores before and after training.

The same seed, thread count and version of PyTorch give the same model. A better checkpoint
replaces the one in the output folder as training goes on, so a run cut short leaves a usable
model; `--card-only` then writes its card.
"""

import argparse
import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

END = "<|endoftext|>"
VOCABULARY = 4096
CONTEXT = 256
HELD_OUT_SHARE = 0.05

# Batches: rows of CONTEXT tokens, some of which repeat themselves.
BATCH = 16
REPEAT_ROWS = 5
TEXT_BLOCK_SHARE = 0.25
SHORTEST_BLOCK = 4
LONGEST_GAP = 3

# The start. The gains leave both sketched heads well short of what training makes of them; the
# card gives their scores before and after.
EMBEDDING_RMS = 0.1
LOOK_BACK_GAIN = 1.2
MATCH_GAIN = 1.5

# Optimisation.
DROPOUT = 0.05
MUON_RATE = 0.002
ADAMW_RATE = 2e-3
EMBEDDING_RATE = 3e-4
WARM_UP_SHARE = 0.02
DECAY_SHARE = 0.5

# Measurement.
INDUCTION_LENGTHS = (16, 32, 64, 100)
INDUCTION_SEEDS = (0, 1, 2)
PROMPT = "The children were playing in the"
SAMPLE_TOKENS = 90


@dataclass
class Run:
    """What the weights alone do not tell about a training run."""

    seed: int
    steps_planned: int
    steps_done: int = 0
    seconds: int = 0
    threads: int = field(default_factory=torch.get_num_threads)
    torch_version: str = torch.__version__


@dataclass
class Corpus:
    """A folder of books, each cut into a part to train on and a held-out end."""

    titles: list[str]
    train: list[str]
    held_out: list[str]


# ---------------------------------------------------------------------------------------------
# Text


def read_corpus(folder: Path) -> Corpus:
    paths = sorted(folder.glob("*.txt"))
    if not paths:
        raise SystemExit(f"no .txt files in {folder}; expected a folder of plain text files")
    corpus = Corpus([], [], [])
    for path in paths:
        text = unwrap(strip_gutenberg(path.read_text(encoding="utf-8")))
        cut = text.find("\n", int(len(text) * (1 - HELD_OUT_SHARE))) + 1
        corpus.titles.append(title_from(path))
        corpus.train.append(text[:cut])
        corpus.held_out.append(text[cut:])
    return corpus


def title_from(path: Path) -> str:
    small = {"a", "and", "in", "of", "the"}
    words = [w if w in small else w.capitalize() for w in path.stem.replace("_", " ").split()]
    return " ".join(words)


def strip_gutenberg(text: str) -> str:
    """Drop Project Gutenberg's header and licence, where the file has them."""
    text = re.split(r"\*\*\* ?START OF TH.*?\*\*\*", text, maxsplit=1)[-1]
    return re.split(r"\*\*\* ?END OF TH.*?\*\*\*", text, maxsplit=1)[0]


def unwrap(text: str) -> str:
    """Join the lines of each paragraph, so that a word at a line's start keeps its space.

    An indented line (verse, a title) stays a line of its own.
    """
    paragraphs = re.split(r"\n\s*\n", text.strip("\n"))
    joined = (re.sub(r"\n(?! )", " ", paragraph) for paragraph in paragraphs)
    lines = (re.sub(r"[ \t]+", " ", line).strip() for text in joined for line in text.split("\n"))
    return "".join(f"{line}\n" for line in lines if line)


def train_tokenizer(texts: list[str]) -> GPT2Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END],
            # All 256 bytes, so that text in any script can be encoded.
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    learned = json.loads(bpe.to_str())["model"]
    return GPT2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],
        unk_token=END,
        bos_token=END,
        eos_token=END,
        model_max_length=CONTEXT,
    )


def encode(texts: list[str], tokenizer: GPT2Tokenizer) -> np.ndarray:
    """All texts as one stream of ids, an end-of-text after each.  (N,)"""
    ids: list[int] = []
    for text in texts:
        # Below the tokenizer's own call, which warns of every text longer than the context.
        for line in tokenizer.backend_tokenizer.encode_batch(text.splitlines(keepends=True)):
            ids.extend(line.ids)
        ids.append(tokenizer.eos_token_id)
    return np.array(ids)


def ids_but_the_end(tokenizer: GPT2Tokenizer) -> np.ndarray:
    return np.array([i for i in range(len(tokenizer)) if i != tokenizer.eos_token_id])


# ---------------------------------------------------------------------------------------------
# Batches


def text_row(stream: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A window of the corpus; every token but the first is a target.  (T,), (T,)"""
    start = rng.integers(len(stream) - CONTEXT)
    targets = np.ones(CONTEXT, dtype=bool)
    targets[0] = False
    return stream[start : start + CONTEXT], targets


def repeat_row(
    stream: np.ndarray, normal_ids: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens in which a block returns again and again.  (T,), (T,)

    Only what can be copied is a target: later copies, from their second token. Block length,
    start and the gaps between copies vary, so no fixed distance predicts the next token and the
    earlier copy has to be found by its content.
    """
    longest = CONTEXT // 2
    size = int(np.exp(rng.uniform(np.log(SHORTEST_BLOCK), np.log(longest + 1))))
    if rng.random() < TEXT_BLOCK_SHARE:
        at = rng.integers(len(stream) - size)
        block = stream[at : at + size]
    else:
        block = rng.choice(normal_ids, size, replace=False)

    row = rng.choice(normal_ids, CONTEXT)
    targets = np.zeros(CONTEXT, dtype=bool)
    first = start = int(rng.integers(min(size, CONTEXT - 2 * size) + 1))
    while start < CONTEXT:
        end = min(start + size, CONTEXT)
        row[start:end] = block[: end - start]
        targets[start + 1 : end] = start > first
        start = end + int(rng.integers(LONGEST_GAP + 1))
    return row, targets


def batches(
    stream: np.ndarray, normal_ids: np.ndarray, steps: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Token ids (B, T) and where the loss counts (B, T), for each step."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        rows = [repeat_row(stream, normal_ids, rng) for _ in range(REPEAT_ROWS)]
        rows += [text_row(stream, rng) for _ in range(BATCH - REPEAT_ROWS)]
        ids, targets = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
        yield ids, targets


# ---------------------------------------------------------------------------------------------
# Model and optimisation


def build_model(tokenizer: GPT2Tokenizer, seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=CONTEXT,
        n_embd=192,
        n_layer=4,
        n_head=6,
        # gelu_new computed in one fused operation.
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        nn.init.normal_(model.transformer.wte.weight, std=EMBEDDING_RMS)
        # A sine's root mean square is its amplitude over the root of two.
        waves = sinusoids(CONTEXT, config.n_embd) * math.sqrt(2)
        model.transformer.wpe.weight.copy_(waves * EMBEDDING_RMS)
        sketch_circuits(model)
    # Dropout is set here and not in the configuration: the saved model is for looking at.
    # Attention keeps its full weights, since dropped weights blur sharp heads.
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and not name.endswith("attn_dropout"):
            module.p = DROPOUT
    return model


def sinusoids(positions: int, width: int) -> Tensor:
    """Sines and cosines of falling frequency.  (P, D)

    From these, "one position earlier" is a rotation, a linear map that a head finds early.
    """
    angles = torch.arange(positions)[:, None] * sinusoid_frequencies(positions, width)  # (P, D/2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def sinusoid_frequencies(positions: int, width: int) -> Tensor:
    """From two radians a position down to about two in the whole context.  (D/2,)"""
    return 2.0 * positions ** (-torch.arange(0, width, 2) / width)


def sketch_circuits(model: GPT2LMHeadModel) -> None:
    """Start two heads as a faint sketch of an induction circuit; training has to finish it.

    Head 0 of layer 0 leans towards the previous position and writes what it reads there into a
    subspace of its own. Head 0 of layer 1 matches a query's own token against that subspace, so
    it leans towards tokens that followed an earlier copy, and passes them on.
    """
    width, size = model.config.n_embd, model.config.n_embd // model.config.n_head
    basis = torch.linalg.qr(torch.randn(width, 3 * size)).Q  # (D, 3d)
    token, earlier, copied = basis.split(size, dim=1)  # (D, d) each
    # The fastest sines and cosines: as they are, and turned one position back.
    here = torch.eye(width, size)
    turned = torch.zeros(width, size)
    for pair, angle in enumerate(sinusoid_frequencies(CONTEXT, width)[: size // 2].tolist()):
        sine, cosine = 2 * pair, 2 * pair + 1
        turned[[sine, cosine, sine, cosine], [sine, cosine, cosine, sine]] = torch.tensor(
            [math.cos(angle), math.cos(angle), math.sin(angle), -math.sin(angle)]
        )

    first, second = (block.attn for block in model.transformer.h[:2])
    residual = EMBEDDING_RMS * math.sqrt(2)
    set_head(first, LOOK_BACK_GAIN * turned, LOOK_BACK_GAIN * here, token, residual * earlier.T)
    set_head(second, MATCH_GAIN * token, MATCH_GAIN * earlier, copied, residual * copied.T)


def set_head(attention: nn.Module, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
    """Overwrite head 0: query, key and value (D, d), out (d, D)."""
    width, size = query.shape
    for part, matrix in enumerate((query, key, value)):
        attention.c_attn.weight[:, part * width : part * width + size] = matrix
    attention.c_proj.weight[:size] = out


def optimizers(model: GPT2LMHeadModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for embeddings, biases and layer norms."""
    matrices, embeddings, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and ".h." in name:
            matrices.append(parameter)
        elif parameter.ndim == 2:
            embeddings.append(parameter)
        else:
            vectors.append(parameter)
    muon = torch.optim.Muon(
        matrices, lr=MUON_RATE, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    # Slower for embeddings: Adam moves rare tokens' rows as far as frequent ones', and at the
    # vectors' rate that drift drowns what tells the tokens apart.
    adamw = torch.optim.AdamW(
        [{"params": embeddings, "lr": EMBEDDING_RATE}, {"params": vectors, "lr": ADAMW_RATE}],
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    groups = [group for stepper in (muon, adamw) for group in stepper.param_groups]
    for group in groups:
        group["peak"] = group["lr"]
    return [muon, adamw]


def schedule(step: int, steps: int) -> float:
    """Warm-up, a plateau for the circuits to form, then a straight line to zero."""
    warm_up = min(1.0, (step + 1) / (steps * WARM_UP_SHARE))
    return warm_up * min(1.0, (steps - step) / (steps * DECAY_SHARE))


def loss_on_targets(model: GPT2LMHeadModel, ids: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.transformer(ids, use_cache=False).last_hidden_state  # (B, T, D)
        # Only where a target follows: the vocabulary-wide product is the dearest one.
        logits = model.lm_head(hidden[:, :-1][targets[:, 1:]])  # (N, V)
    return F.cross_entropy(logits.float(), ids[:, 1:][targets[:, 1:]])


def train(corpus: Corpus, out: Path, run: Run, every: int) -> None:
    tokenizer = train_tokenizer(corpus.train)
    stream = encode(corpus.train, tokenizer)
    held_out = windows(encode(corpus.held_out, tokenizer))[::4]
    normal_ids = ids_but_the_end(tokenizer)
    model = build_model(tokenizer, run.seed)
    steppers = optimizers(model)
    print(f"{len(stream):,} tokens, {model.num_parameters():,} parameters", flush=True)

    best = math.inf
    began = time.monotonic()
    for step, (ids, targets) in enumerate(batches(stream, normal_ids, run.steps_planned, run.seed)):
        model.train()
        loss_on_targets(model, ids, targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            for group in stepper.param_groups:
                group["lr"] = group["peak"] * schedule(step, run.steps_planned)
            stepper.step()
        model.zero_grad()

        run.steps_done = step + 1
        if run.steps_done % every == 0 or run.steps_done == run.steps_planned:
            run.seconds = round(time.monotonic() - began)
            loss = report(model, held_out, normal_ids, run)
            if loss < best:
                best = loss
                save(model, tokenizer, out, run)


def report(model: GPT2LMHeadModel, held_out: Tensor, normal_ids: np.ndarray, run: Run) -> float:
    """Print how far the run is; the held-out loss."""
    model.eval()
    loss = held_out_loss(model, held_out)
    model.set_attn_implementation("eager")
    previous = previous_token_scores(model, held_out[:16])
    induction = induction_scores(model, normal_ids, lengths=(50,), seeds=(0,))
    model.set_attn_implementation("sdpa")
    print(
        f"step {run.steps_done:6d}  {run.seconds:5d} s  held-out {loss:.3f}"
        f"  previous token {previous.max():.2f}  induction {induction.max():.2f}",
        flush=True,
    )
    return loss


def save(model: GPT2LMHeadModel, tokenizer: GPT2Tokenizer, out: Path, run: Run) -> None:
    model.save_pretrained(out)
    # safetensors leaves the file readable by its owner alone.
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(out)
    (out / "training.json").write_text(json.dumps(asdict(run), indent=2) + "\n")


# ---------------------------------------------------------------------------------------------
# Measurements


def windows(stream: np.ndarray) -> Tensor:
    """The stream cut into whole contexts, one after another.  (N, T)"""
    whole = len(stream) // CONTEXT * CONTEXT
    return torch.from_numpy(stream[:whole]).view(-1, CONTEXT)


@torch.inference_mode()
def held_out_loss(model: GPT2LMHeadModel, rows: Tensor) -> float:
    """Nats per token over all but the first token of each row."""
    total = 0.0
    for ids in rows.split(BATCH):
        logits = model(ids).logits[:, :-1]  # (B, T-1, V)
        total += F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
    return total / rows[:, 1:].numel()


def bigram_loss(stream: np.ndarray, rows: Tensor, vocabulary: int) -> float:
    """Nats per token of a smoothed bigram model on the tokens that `held_out_loss` scores.

    p(b | a) = (count(a b) + k p(b)) / (count(a) + k), with p(b) smoothed by one. The k that
    does best on these very rows is taken, which favours the bigram model.
    """
    tokens = torch.from_numpy(stream)
    singles = torch.bincount(tokens, minlength=vocabulary)  # (V,)
    codes, pairs = torch.unique(tokens[:-1] * vocabulary + tokens[1:], return_counts=True)
    first, second = rows[:, :-1].flatten(), rows[:, 1:].flatten()  # (M,)
    wanted = first * vocabulary + second
    slot = torch.searchsorted(codes, wanted).clamp(max=len(codes) - 1)
    seen = torch.where(codes[slot] == wanted, pairs[slot], 0)  # (M,)
    unigram = (singles + 1) / (singles + 1).sum()
    losses = [
        -((seen + k * unigram[second]) / (singles[first] + k)).log().mean().item()
        for k in np.geomspace(1, 10_000, 41)
    ]
    return min(losses)


@torch.inference_mode()
def previous_token_scores(model: GPT2LMHeadModel, rows: Tensor) -> Tensor:
    """Mean weight on the token before, over all queries but the first.  (L, H)"""
    scores = []
    for ids in rows.split(BATCH):
        attentions = torch.stack(model(ids, output_attentions=True).attentions)  # (L, B, H, T, T)
        before = attentions.diagonal(offset=-1, dim1=-2, dim2=-1)  # (L, B, H, T-1)
        scores.append(before.mean(-1).transpose(1, 2))  # (L, H, B)
    return torch.cat(scores, dim=-1).mean(-1)


@torch.inference_mode()
def induction_scores(
    model: GPT2LMHeadModel,
    normal_ids: np.ndarray,
    lengths: tuple[int, ...] = INDUCTION_LENGTHS,
    seeds: tuple[int, ...] = INDUCTION_SEEDS,
) -> Tensor:
    """Mean weight, in the second copy of [A][A], on the token after the earlier copy.  (L, H)

    A is random tokens, each of the vocabulary equally likely. Each length and seed counts alike.
    """
    scores = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        for length in lengths:
            block = torch.from_numpy(rng.choice(normal_ids, (BATCH, length)))
            ids = torch.cat([block, block], dim=1)  # (B, 2n)
            attentions = torch.stack(model(ids, output_attentions=True).attentions)
            # Query n + i is the second copy of token i; the token after the first is i + 1.
            after = attentions.diagonal(offset=1 - length, dim1=-2, dim2=-1)  # (L, B, H, n+1)
            scores.append(after[..., 1:].mean(dim=(1, 3)))
    return torch.stack(scores).mean(0)


@torch.inference_mode()
def entropy_shares(model: GPT2LMHeadModel, rows: Tensor) -> Tensor:
    """Mean entropy of a query's weights over its maximum, log of the keys it sees.  (L, H)"""
    most = torch.arange(1, CONTEXT + 1).log()[1:]  # the first query has one key and no choice
    scores = []
    for ids in rows.split(BATCH):
        attentions = torch.stack(model(ids, output_attentions=True).attentions)
        entropy = torch.special.entr(attentions).sum(-1)[..., 1:]  # (L, B, H, T-1)
        scores.append((entropy / most).mean(-1).transpose(1, 2))
    return torch.cat(scores, dim=-1).mean(-1)


# ---------------------------------------------------------------------------------------------
# Model card


CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# The bundled model

A small GPT-2 to look at: the default of attnprobe, loaded without a network. It writes phrases of
English and knows nothing; use it to see how attention works, not for what it says. This card is
written by `scripts/train_bundled.py` from what it measured on these files.

| | |
|---|---|
| model | `GPT2LMHeadModel`, {layers} layers × {heads} heads × {head_size}, context {context} |
| parameters | {parameters:,}, float32, {megabytes:.1f} MB on disk |
| tokenizer | byte-level BPE, {vocabulary:,} tokens, trained on the same text |
| corpus | {characters:,} characters, {train_tokens:,} tokens to train on |
| held out | the last {held_out_share:.0%} of each book |
| training | {steps_done:,} of {steps_planned:,} steps of {batch} × {context} tokens |
| time | {seconds:,} s on {threads} thread(s), PyTorch {torch_version} |
| seed | {seed} |
| held-out loss | **{loss:.3f}** nats per token ({held_out_tokens:,} tokens) |
| bigram model, same tokens | {bigram:.3f} nats per token |

The bigram model is p(b after a) = (count(a b) + k·p(b)) / (count(a) + k), counted on the training
tokens, with the k that does best on the held-out tokens themselves, which favours it.
Every fourth held-out window was also used to choose among checkpoints; the one of step
{steps_done:,} was kept.

Books, all in the public domain: {titles}.

## How it was trained

    python scripts/train_bundled.py CORPUS --out FOLDER --seed {seed} --steps {steps_planned} \\
        --threads {threads}

{text_rows} of {batch} rows in a batch are windows of the books. In the other {repeat_rows}, a block
of {shortest_block} to {longest_block} tokens comes back again and again: random tokens, or a piece
of a book in {text_block_share:.0%} of them. The first copy starts anywhere and 0 to {longest_gap}
random tokens lie between copies; only tokens that can be copied count in the loss. Muon for the
matrices in the blocks, AdamW for the rest, dropout {dropout} in training only.

**The start is not random everywhere.** Trials of some minutes from a random start formed no
induction head, so the run begins from a faint sketch of one. Position embeddings start as sines
and cosines. Head 0 of layer 0 starts leaning towards the previous position, and head 0 of layer 1
towards tokens that followed an earlier copy of the present one. All weights are trained from
there. So these two heads are where they are because they were placed there, and how they arise
from nothing is not to be studied on this model; the other {other_heads} heads start random.
The highest scores before and after training:

| | before | after |
|---|---|---|
| weight on the previous token | {previous_before:.2f} | {previous_after:.2f} |
| induction | {induction_before:.2f} | {induction_after:.2f} |

## Heads

Layers and heads count from 0.

{head_table}

- **previous token**: mean weight on the token before, over held-out windows of {context} tokens,
  all queries but the first of each.
- **induction**: sequences [A][A], A random tokens, each token of the vocabulary but the end equally
  likely; mean weight from each token of the second copy to the token after its earlier copy.
  Lengths of A {induction_lengths}, {induction_sequences} sequences each ({induction_seeds} seeds);
  in single lengths and seeds the highest head scores {induction_low:.2f} to {induction_high:.2f}.
- **entropy**: mean over the same windows of a query's entropy over log(keys it sees), the most it
  can be; the first query left out.

## A sample

Prompt in bold; temperature 0.8, the 40 likeliest tokens, seed {seed}:

> {sample}
"""


def write_card(corpus: Corpus, out: Path) -> None:
    run = Run(**json.loads((out / "training.json").read_text()))
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = GPT2LMHeadModel.from_pretrained(out, attn_implementation="eager").eval()
    stream = encode(corpus.train, tokenizer)
    rows = windows(encode(corpus.held_out, tokenizer))
    shape = model.config
    facts = {
        **asdict(run),
        "layers": shape.n_layer,
        "heads": shape.n_head,
        "head_size": shape.n_embd // shape.n_head,
        "other_heads": shape.n_layer * shape.n_head - 2,
        "context": CONTEXT,
        "parameters": model.num_parameters(),
        "megabytes": sum(p.stat().st_size for p in out.iterdir() if p.name != "README.md") / 1e6,
        "vocabulary": len(tokenizer),
        "characters": sum(map(len, corpus.train + corpus.held_out)),
        "train_tokens": len(stream),
        "held_out_share": HELD_OUT_SHARE,
        "held_out_tokens": rows[:, 1:].numel(),
        "loss": held_out_loss(model, rows),
        "bigram": bigram_loss(stream, rows, len(tokenizer)),
        "titles": ", ".join(corpus.titles),
        "batch": BATCH,
        "text_rows": BATCH - REPEAT_ROWS,
        "repeat_rows": REPEAT_ROWS,
        "text_block_share": TEXT_BLOCK_SHARE,
        "shortest_block": SHORTEST_BLOCK,
        "longest_block": CONTEXT // 2,
        "longest_gap": LONGEST_GAP,
        "dropout": DROPOUT,
        **head_facts(model, tokenizer, rows, run.seed),
        "sample": sample(model, tokenizer, run.seed),
    }
    (out / "README.md").write_text(CARD.format(**facts), encoding="utf-8")


def head_facts(
    model: GPT2LMHeadModel, tokenizer: GPT2Tokenizer, rows: Tensor, seed: int
) -> dict[str, object]:
    """The card's table of heads, and what it says of the highest."""
    normal_ids = ids_but_the_end(tokenizer)
    start = build_model(tokenizer, seed).eval()
    start.set_attn_implementation("eager")
    previous = previous_token_scores(model, rows)
    induction = induction_scores(model, normal_ids)
    # The head that is highest overall, in each length and seed by itself.
    layer, head = divmod(int(induction.argmax()), model.config.n_head)
    singles = [
        induction_scores(model, normal_ids, (length,), (one,))[layer, head].item()
        for length in INDUCTION_LENGTHS
        for one in INDUCTION_SEEDS
    ]
    return {
        "head_table": head_table(previous, induction, entropy_shares(model, rows)),
        "previous_before": previous_token_scores(start, rows).max().item(),
        "previous_after": previous.max().item(),
        "induction_before": induction_scores(start, normal_ids).max().item(),
        "induction_after": induction.max().item(),
        "induction_low": min(singles),
        "induction_high": max(singles),
        "induction_lengths": ", ".join(map(str, INDUCTION_LENGTHS)),
        "induction_sequences": BATCH * len(INDUCTION_SEEDS),
        "induction_seeds": len(INDUCTION_SEEDS),
    }


def head_table(previous: Tensor, induction: Tensor, entropy: Tensor) -> str:
    lines = ["| layer | head | previous token | induction | entropy |", "|---|---|---|---|---|"]
    for layer in range(previous.shape[0]):
        for head in range(previous.shape[1]):
            scores = (table[layer, head].item() for table in (previous, induction, entropy))
            cells = [str(layer), str(head), *(f"{score:.2f}" for score in scores)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def sample(model: GPT2LMHeadModel, tokenizer: GPT2Tokenizer, seed: int) -> str:
    torch.manual_seed(seed)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    written = model.generate(
        **inputs,
        max_new_tokens=SAMPLE_TOKENS,
        do_sample=True,
        temperature=0.8,
        top_k=40,
        pad_token_id=tokenizer.eos_token_id,
    )
    text = tokenizer.decode(written[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return f"**{PROMPT}**{text}".replace("\n", "\n>\n> ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("corpus", type=Path, help="folder of .txt files")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument("--every", type=int, default=250, help="steps between checkpoints")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--card-only", action="store_true", help="measure again, do not train")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    corpus = read_corpus(options.corpus)
    if not options.card_only:
        options.out.mkdir(parents=True, exist_ok=True)
        train(corpus, options.out, Run(options.seed, options.steps), options.every)
    write_card(corpus, options.out)


if __name__ == "__main__":
    main()
