"""Verify a small random model of every attention architecture in transformers; write what came of it.

`python scripts/architectures.py` makes docs/architectures.md anew: for each model type of
transformers' causal, masked and sequence-to-sequence language models, what `ap.capture` and
`ap.verify` say of it, under sdpa and under eager.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import math
import multiprocessing
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from small_configs import FIRST_WORD, LAST_WORD, small_model
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

import attnprobe as ap
from attnprobe.checks import BY_CALL

TASKS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
KERNELS = ("sdpa", "eager")
SECONDS, BYTES = 60, 8 << 30
"""What one type may take."""


def texts() -> list[list[int]]:
    """Two texts of 11 and 7 words."""
    words = LAST_WORD - FIRST_WORD + 1
    return [[FIRST_WORD + (17 * at + 5 * long) % words for at in range(long)] for long in (11, 7)]


def run(task: str, kind: str) -> dict[str, Any]:
    return {kernel: attempt(task, kind, kernel) for kernel in KERNELS}


def attempt(task: str, kind: str, kernel: str) -> dict[str, Any]:
    """What came of one model under one kernel."""
    try:
        model = small_model(kind, getattr(transformers, TASKS[task][kind]), kernel)
    except Exception as error:  # noqa: BLE001
        return {"state": "crash", "stage": "build", "reason": told(error)}
    found: dict[str, Any] = {"class": type(model).__name__}
    try:
        with quiet_attention(model) as quiet:
            cap = ap.capture(model, texts())
        found |= judged(cap) | {"quiet": sorted(set(quiet) - seen_by(cap.calls))}
    except ap.AttnprobeError as error:
        found |= {"state": "refused", "stage": "capture", "reason": told(error)}
    except Exception as error:  # noqa: BLE001
        found |= {"state": "crash", "stage": "capture", "reason": told(error)}
    if found["state"] in ("refused", "crash"):
        found["probe"] = probed(model)
    found["softmax"] = sorted(softmax_in(model))
    return found


def told(error: Exception) -> str:
    import traceback

    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{'/'.join(Path(last.filename).parts[-2:])}:{last.lineno}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} [{place}]"


def judged(cap: ap.Capture) -> dict[str, Any]:
    report = ap.verify(cap)
    checks: dict[str, Any] = {}
    for row in report.rows:
        entry = checks.setdefault(row.check, {"verdicts": Counter(), "reasons": Counter(), "worst": 0.0})
        entry["verdicts"][row.verdict] += 1
        if row.reason:
            entry["reasons"][row.reason] += 1
        if row.verdict != "not_checked":
            entry["worst"] = max(entry["worst"], row.ratio)
    return {
        "state": report.verdict,
        "summary": report.summary,
        "checks": checks,
        "terms": terms(cap.calls),
        "entropy": entropy(cap.calls),
        "unseen": [f"{one.layer} {one.name}" for one in cap.unseen],
        "calls": describe(cap.calls),
    }


def describe(calls: Any) -> list[dict[str, Any]]:
    return [
        {
            "name": c.name, "module": type(c.module).__name__, "kind": c.kind, "kernel": c.kernel,
            "q": list(c.query.shape), "k": list(c.key.shape), "v": list(c.value.shape),
            "scaling": c.scaling, "expected": c.expected_scaling,
            "mask": None if c.mask is None else [str(c.mask.dtype), list(c.mask.shape)],
            "causal": c.is_causal, "terms": list(c.terms),
            "rule": None if c.expected_mask is None else [c.expected_mask.causal, c.expected_mask.window],
        }
        for c in calls
    ]


def terms(calls: Any) -> list[str]:
    found = set()
    for c in calls:
        if c.key.shape[1] < c.heads:
            found.add("MQA" if c.key.shape[1] == 1 else "GQA")
        if c.value.shape[-1] != c.query.shape[-1]:
            found.add("value size ≠ key size")
        if c.kind == "cross":
            found.add("cross attention")
        if c.expected_mask is not None and c.expected_mask.window:
            found.add("window")
        if c.mask is not None and c.mask.dtype != torch.bool:
            if bool(((c.mask > -1e4) & (c.mask != 0)).any()):
                found.add("bias in the mask")
        found |= set(c.terms)
    names = Counter(c.name for c in calls)
    if any(n > 1 for n in names.values()):
        found.add("module runs several times")
    return sorted(found)


def entropy(calls: Any) -> float | None:
    shares = []
    for c in calls:
        w = c.weights_model
        if w is None or w.dim() != 4:
            continue
        w = w.double()
        n = (w > 0).sum(-1)
        h = -torch.special.xlogy(w, w).sum(-1)
        keep = n > 1
        shares += (h[keep] / n[keep].double().log()).tolist()
    return round(sum(shares) / len(shares), 3) if shares else None


def seen_by(calls: Any) -> set[str]:
    return set()


@contextlib.contextmanager
def quiet_attention(model: nn.Module) -> Iterator[list[str]]:
    """Names the modules called attention that ran (all; the caller compares)."""
    ran: list[str] = []
    hooks = []
    for name, module in model.named_modules():
        if "Attention" in type(module).__name__ or "Attn" in type(module).__name__:
            hooks.append(
                module.register_forward_hook(
                    lambda m, a, o, n=name: ran.append(f"{n} {type(m).__name__}")
                )
            )
    try:
        yield ran
    finally:
        for hook in hooks:
            hook.remove()


def softmax_in(model: nn.Module) -> set[str]:
    found = set()
    for module in model.modules():
        cls = type(module)
        if cls.__module__.startswith("transformers"):
            try:
                code = inspect.getsource(cls)
            except (OSError, TypeError):
                continue
            if "softmax(" in code:
                found.add(cls.__name__)
    return found


def probed(model: nn.Module) -> dict[str, Any]:
    ids = torch.tensor([texts()[0], texts()[0][::-1]])
    inputs: dict[str, Tensor] = {"input_ids": ids}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs |= {"attention_mask": torch.ones_like(ids), "decoder_input_ids": ids[:, :8]}
    try:
        with torch.no_grad(), quiet_attention(model) as quiet, ap.probe(model) as calls:
            model(**inputs)
    except Exception as error:  # noqa: BLE001
        return {"error": told(error)}
    verdicts: dict[str, Any] = {}
    for call in calls:
        for check, rows in BY_CALL.items():
            try:
                for row in rows(call):
                    verdicts.setdefault(check, Counter())[
                        row.verdict + (": " + row.reason if row.verdict != "verified" else "")
                    ] += 1
            except Exception as error:  # noqa: BLE001
                verdicts.setdefault(check, Counter())["crash: " + told(error)] += 1
    return {"calls": describe(calls), "verdicts": verdicts, "quiet": quiet, "terms": terms(calls), "entropy": entropy(calls)}


def worker(pipe: Connection, task: str, kind: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    warnings.simplefilter("ignore")
    import os

    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    pipe.send(run(task, kind))


def in_a_process(task: str, kind: str) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=worker, args=(theirs, task, kind))
    process.start()
    theirs.close()
    try:
        if mine.poll(SECONDS):
            return mine.recv()
        return {"dead": f"took over {SECONDS} s"}
    except EOFError:
        process.join()
        return {"dead": f"died with exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", default="")
    parser.add_argument("--tasks", default="causal,masked,seq2seq")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    import time

    results: dict[str, Any] = {}
    wanted = options.types.split(",") if options.types else None
    for task in options.tasks.split(","):
        for kind in sorted(TASKS[task]):
            if wanted and kind not in wanted:
                continue
            t = time.time()
            one = results[f"{task}/{kind}"] = in_a_process(task, kind)
            line = one.get("dead") or " | ".join(f"{k} {one[k]['state']} {one[k].get('reason','') if one[k]['state']!='verified' else ''}" for k in KERNELS)
            print(f"{task}/{kind} {time.time()-t:.1f}s: {line}", file=sys.stderr, flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
