"""The command `attnprobe`.

Exit codes: 0 verified, or what was asked for was given; 1 mismatch; 2 bad input, an unusable model,
or a verification that could not check what it must; 70 a bug in attnprobe; 130 interrupted; 141 the
reader of a pipe went away. Whatever imports torch is imported inside the commands: `--help` must
not wait for it.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnprobe.command.exits import (
    BUG,
    INTERRUPTED,
    VERDICTS,
    exits,
    interrupted,
    warnings_as_notes,
)
from attnprobe.command.kinds import KINDS, effect_picture, kind_of, span_of
from attnprobe.command.options import (
    SENTENCE,
    Attn,
    ByWord,
    Device,
    Dtype,
    FormatOption,
    Head,
    Layer,
    Model,
    Open,
    Out,
    Page,
    Part,
    PartOption,
    Revision,
    TableOrPicture,
    Target,
    Text,
)
from attnprobe.command.sweeps import Engine, every_of, going_on, sweep_progress, sweep_text
from attnprobe.command.targets import (
    PAGE,
    PICTURES,
    Format,
    check_file,
    check_shown,
    check_table,
    check_table_or_picture,
    give_shown,
    give_table,
    progress,
    terminal_width,
)
from attnprobe.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from attnprobe.records import Capture, LanguageModel

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from attnprobe import __version__

        print(f"attnprobe {__version__}")
        raise typer.Exit


@app.callback()
def attnprobe(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Say which.")
    ] = False,
) -> None:
    """See, and prove, what the attention of a Hugging Face model computes."""


@app.command()
def verify(
    text: Text = SENTENCE,
    target: Target = None,
    model: Model = "bundled",
    dtype: Dtype = "float32",
    attn: Attn = None,
    device: Device = "cpu",
    revision: Revision = None,
    checks: Annotated[str | None, typer.Option(help="Some checks: output,mask,…")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, nothing else.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write an HTML page of the report.")] = None,
) -> None:
    """Check that the model computed softmax(QKᵀ/√d_k + M)V, layer by layer and head by head.

    Exit code 0: verified. 1: mismatch. 2: bad input, or it could not be checked.
    """
    with exits():
        check_file(out)
        names = _checks(checks)
        cap = _capture(text, target, model, revision, dtype, attn, device)
        from attnprobe.command import printing
        from attnprobe.verification import verify

        with progress() as show:
            report = verify(cap, checks=names, progress=show)
        if out is not None:
            printing.write(out, printing.report_page(report, text, target))
        if as_json:
            print(printing.report_json(report, text, target))
        else:
            print(printing.report_text(report, text, terminal_width(), target))
    raise typer.Exit(VERDICTS[report.verdict])


@app.command()
def table(
    text: Text = SENTENCE,
    layer: Layer = None,
    head: Head = None,
    by_word: ByWord = False,
    format: FormatOption = None,
    out: Out = None,
    target: Target = None,
    part: PartOption = None,
    model: Model = "bundled",
    dtype: Dtype = "float32",
    attn: Attn = None,
    device: Device = "cpu",
    revision: Revision = None,
) -> None:
    """Show score and weight of every query and each key that it may attend to."""
    with exits():
        format = check_table(out, format)
        cap = _part(_capture(text, target, model, revision, dtype, attn, device), part)
        from attnprobe.tables import table

        give_table(table(cap, layer, head, by="word" if by_word else "token"), format, out)


@app.command()
def words(
    text: Text = SENTENCE,
    word: Annotated[
        str | None, typer.Option(help="One word of the text; all if not given.")
    ] = None,
    layer: Layer = None,
    head: Head = None,
    top: Annotated[int, typer.Option(help="How many words each looks at.")] = 5,
    nth: Annotated[int, typer.Option(help="Which of the word's occurrences, from 0.")] = 0,
    how: Annotated[str, typer.Option(help="Over heads: mean, max or rollout.")] = "mean",
    weigh: Annotated[
        str, typer.Option(help="By weight, or by value: weight × ‖v·W_O‖.")
    ] = "weight",
    skip_first: Annotated[bool, typer.Option(help="Leave out the first word's share.")] = False,
    reverse: Annotated[bool, typer.Option(help="Instead, the words that look at it.")] = False,
    format: FormatOption = None,
    out: Out = None,
    target: Target = None,
    part: PartOption = None,
    model: Model = "bundled",
    dtype: Dtype = "float32",
    attn: Attn = None,
    device: Device = "cpu",
    revision: Revision = None,
) -> None:
    """Show which past words a word looks at, strongest first: in one head, or over many."""
    with exits():
        if word is None and nth:
            raise InputError("--nth goes with --word: it says which of the word's occurrences")
        if reverse and skip_first:
            raise InputError("--skip-first does not go with --reverse")
        format = check_table(out, format)
        cap = _part(_capture(text, target, model, revision, dtype, attn, device), part)
        from attnprobe.looking import attended, attended_by

        options: dict[str, Any] = {"top": top, "layer": layer, "head": head, "nth": nth}
        options |= {"how": how, "weigh": weigh}
        if reverse:
            frame = attended_by(cap, word, **options)
        else:
            frame = attended(cap, word, skip_first=skip_first, **options)
        give_table(frame, format, out)


@app.command()
def walk(
    word: Annotated[str, typer.Option(help="A word of the text.")],
    layer: Annotated[int, typer.Option(help="Counted from 0.")],
    head: Annotated[int, typer.Option(help="Counted from 0.")],
    text: Text = SENTENCE,
    nth: Annotated[int, typer.Option(help="Which of the word's occurrences, from 0.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write an HTML page instead.")] = None,
    target: Target = None,
    part: PartOption = None,
    model: Model = "bundled",
    dtype: Dtype = "float32",
    attn: Attn = None,
    device: Device = "cpu",
    revision: Revision = None,
) -> None:
    """Walk through the formula for one word in one head, step by step."""
    with exits():
        check_file(out)
        cap = _part(_capture(text, target, model, revision, dtype, attn, device), part)
        from attnprobe.command import printing
        from attnprobe.walking import walkthrough

        walked = walkthrough(cap, word, layer, head, nth=nth)
        if out is None:
            print(walked)
        else:
            printing.write(out, printing.page(f"attnprobe walk: {word}", walked._repr_html_()))


@app.command()
def terms(
    text: Text = SENTENCE,
    format: FormatOption = None,
    out: Out = None,
    model: Model = "bundled",
    dtype: Dtype = "float32",
    attn: Attn = None,
    device: Device = "cpu",
    revision: Revision = None,
) -> None:
    """Take each term of the formula away, and show what becomes of the model's predictions."""
    with exits():
        format = check_table(out, format)
        lm = _load(model, revision, dtype, attn, device)
        from attnprobe.command.printing import effects_text
        from attnprobe.effects.formulas import term_effects

        with progress("as it is") as show:
            frame = term_effects(lm, text, progress=show)
        give_table(frame, format, out, effects_text)


@app.command()
def view(
    kind: Annotated[str, typer.Option(help=f"What to draw: {', '.join(KINDS)}.")],
    text: Text = SENTENCE,
    layer: Layer = None,
    head: Head = None,
    by_word: ByWord = False,
    word: Annotated[str | None, typer.Option(help="One word of the text.")] = None,
    nth: Annotated[int | None, typer.Option(help="Which of its occurrences, from 0.")] = None,
    span: Annotated[
        str | None, typer.Option(help="Some words of a long text: START:STOP, from 0.")
    ] = None,
    lang: Annotated[
        str | None, typer.Option(help="The labels' language: en, zh-Hant or ja.")
    ] = None,
    out: Page = None,
    look: Open = False,
    target: Target = None,
    part: PartOption = None,
    model: Model = "bundled",
    dtype: Dtype = "float32",
    attn: Attn = None,
    device: Device = "cpu",
    revision: Revision = None,
) -> None:
    """Draw attention: a page that stands alone, or with --kind heatmap an .svg, .png or .pdf.

    Each kind takes some of --layer, --head, --by-word, --span, --word, --nth and --lang, and
    refuses the others.
    """
    with exits():
        chosen = kind_of(kind)
        asked: dict[str, Any] = {"layer": layer, "head": head, "by": "word" if by_word else None}
        asked |= {"word": word, "nth": nth, "lang": lang}
        asked["span"] = None if span is None else span_of(span)
        given: dict[str, Any] = {name: one for name, one in asked.items() if one is not None}
        chosen.refuse_others(kind, given)
        if nth is not None and word is None:
            raise InputError("--nth goes with --word: it says which of the word's occurrences")
        check_shown(out, look, chosen.suffixes)
        if lang is not None:
            from attnprobe.views.messages import messages_in

            messages_in(lang)  # refused before a model is loaded in vain
        cap = _part(_capture(text, target, model, revision, dtype, attn, device), part)
        suffix = chosen.suffixes[0] if out is None else out.suffix.lower()
        with warnings_as_notes():
            content = chosen.draw(cap, {"layer": None, "head": None} | given, suffix)
        give_shown(content, out, look, suffix)


@app.command()
def ablate(
    text: Text = SENTENCE,
    metric: Annotated[str, typer.Option(help="loss, logit or logit_difference.")] = "loss",
    target: Annotated[str | None, typer.Option(help="A next word, whose logit counts.")] = None,
    against: Annotated[
        str | None, typer.Option(help="Another: the difference of their logits counts.")
    ] = None,
    how: Annotated[str, typer.Option(help="The head's output: zero, mean or resample.")] = "zero",
    format: FormatOption = None,
    out: TableOrPicture = None,
    model: Model = "bundled",
    dtype: Dtype = "float32",
    attn: Attn = None,
    device: Device = "cpu",
    revision: Revision = None,
) -> None:
    """Silence each head in turn, and show what becomes of the loss, or of a next word's logit."""
    with exits():
        format = check_table_or_picture(out, format)
        options: dict[str, Any] = {"metric": metric, "target": target, "against": against}
        options |= {"how": how}
        from attnprobe.effects.ablation import head_effects, refuse_unknown

        refuse_unknown(**options)  # before a model is loaded in vain
        lm = _load(model, revision, dtype, attn, device)
        with progress("silencing heads") as show:
            frame = head_effects(lm, text, **options, progress=show)
        _give_table_or_picture(frame, format, out)


@app.command()
def heads(
    text: Annotated[
        str | None, typer.Argument(help="Of which text. If not given, repeated random tokens.")
    ] = None,
    value: Annotated[str | None, typer.Option(help="The column that a picture shows.")] = None,
    format: FormatOption = None,
    out: TableOrPicture = None,
    model: Model = "bundled",
    dtype: Dtype = "float32",
    attn: Attn = None,
    device: Device = "cpu",
    revision: Revision = None,
) -> None:
    """What each head does: statistics of a text, or, without one, its known role.

    Roles are previous, duplicate and induction, by scores from 0.4 on, on random tokens that come
    twice. A picture, --out heads.svg, shows one column, --value induction.
    """
    with exits():
        format = check_table_or_picture(out, format)
        drawn = out is not None and out.suffix.lower() in PICTURES
        if drawn is (value is None):
            raise InputError(
                "a picture shows one column: give both --value COLUMN and --out with a name in "
                f"{', '.join(PICTURES)}, or neither"
            )
        if text is None:
            from attnprobe.roles import head_roles

            frame = head_roles(_load(model, revision, dtype, attn, device))
        else:
            from attnprobe.heads import head_stats

            frame = head_stats(_capture(text, None, model, revision, dtype, attn, device))
        from attnprobe.command.printing import frame_text, stats_text

        as_text = frame_text if text is None else stats_text
        _give_table_or_picture(frame, format, out, value, as_text)


@app.command()
def report(
    text: Text = SENTENCE,
    out: Page = None,
    look: Open = False,
    target: Target = None,
    part: PartOption = None,
    model: Model = "bundled",
    dtype: Dtype = "float32",
    attn: Attn = None,
    device: Device = "cpu",
    revision: Revision = None,
) -> None:
    """Verify, and write all there is to see of a text on one page: checks, words, heads, pictures.

    Exit code 0: verified. 1: mismatch. 2: bad input, or it could not be checked.
    """
    with exits():
        check_shown(out, look)
        cap = _capture(text, target, model, revision, dtype, attn, device)
        shown = _part(cap, part)
        from attnprobe.verification import verify
        from attnprobe.views.overview import report_view

        with progress() as show:
            verification = verify(cap, progress=show)
        with warnings_as_notes():
            page = report_view(shown, verification)
        give_shown(page.html, out, look, PAGE[0])
        print(verification.summary)
    raise typer.Exit(VERDICTS[verification.verdict])


@app.command()
def sweep(
    corpus: Annotated[
        str,
        typer.Argument(help="A .txt, .jsonl or .parquet file, a folder of them, or - for stdin."),
    ],
    out: Annotated[Path, typer.Option(help="A new folder; or one to go on with.")],
    tokens: Annotated[
        int | None, typer.Option(help="The most of a text; 256 or the model's limit if not given.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Texts at a time.")] = 16,
    field: Annotated[str, typer.Option(help="Where in a row the text is.")] = "text",
    value: Annotated[bool, typer.Option("--value", help="Masses by weight × ‖v·W_O‖ too.")] = False,
    pairs: Annotated[int, typer.Option(help="Word pairs of each head to keep.")] = 100,
    verify: Annotated[
        str | None, typer.Option(help="every=100: verify one text in 100 as it goes.")
    ] = None,
    engine: Annotated[Engine, typer.Option(help="local, or ray for several workers.")] = (
        Engine.LOCAL
    ),
    workers: Annotated[int, typer.Option(help="With --engine ray.")] = 1,
    model: Model = "bundled",
    dtype: Dtype = "float32",
    attn: Attn = None,
    device: Device = "cpu",
    revision: Revision = None,
) -> None:
    """Gather what each head does over a corpus, as Parquet files; killed, the same goes on.

    Exit code 0: done. 1: done, and a text that was verified is a mismatch. 2: bad input, a full
    disk, an unusable model.
    """
    with exits():
        every = every_of(verify)
        lm = _load(model, revision, dtype, attn, device)
        from attnprobe.sweeping.corpora import sweep

        with warnings_as_notes(), going_on(out), sweep_progress() as show:
            found = sweep(
                lm,
                corpus,
                out,
                tokens=tokens,
                batch_size=batch_size,
                field=field,
                value=value,
                pairs=pairs,
                verify=every,
                engine=engine.value,
                workers=workers,
                progress=show,
            )
        print(sweep_text(found.manifest, out))
    raise typer.Exit(VERDICTS["mismatch"] if found.manifest["verification"]["mismatch"] else 0)


def main() -> None:
    """Run the command line; the entry point of the script `attnprobe`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller: print into nothing
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 (open to the end)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # tokens on an ASCII terminal
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        app()
    except Exception as error:  # noqa: BLE001  (a crash must not leave with 1: that is a mismatch)
        if interrupted(error):
            sys.exit(INTERRUPTED)
        traceback.print_exc()
        sys.exit(BUG)


def _checks(names: str | None) -> list[str] | None:
    """The names in `--checks`, looked at before a model is loaded in vain."""
    if names is None:
        return None
    from attnprobe.verification import CHECKS

    chosen = [name.strip() for name in names.split(",")]
    unknown = [name for name in chosen if name not in CHECKS]
    if unknown:
        raise InputError(f"unknown check {unknown[0]!r}; the checks are {', '.join(CHECKS)}")
    return chosen


def _capture(
    text: str,
    target: str | None,
    model: str,
    revision: str | None,
    dtype: str,
    attn: str | None,
    device: str,
) -> Capture:
    from attnprobe.capturing import capture

    lm = _load(model, revision, dtype, attn, device)
    config = getattr(lm.model, "config", None)
    if target is None and getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"{type(lm.model).__name__} is an encoder-decoder: give --target, the text that its "
            "decoder is given"
        )
    return capture(lm, text, target=target)


def _load(
    model: str, revision: str | None, dtype: str, attn: str | None, device: str
) -> LanguageModel:
    from attnprobe.models import load

    return load(model, revision=revision, dtype=dtype, attn=attn, device=device)


def _give_table_or_picture(
    frame: pd.DataFrame,
    format: Format | None,
    out: Path | None,
    value: str | None = None,
    as_text: Callable[[pd.DataFrame, int | None], str] | None = None,
) -> None:
    """Draw a frame of heads where the file's name is that of a picture; else as `give_table`."""
    if out is not None and out.suffix.lower() in PICTURES:
        with warnings_as_notes():
            content = effect_picture(frame, out.suffix.lower(), value)
        give_shown(content, out, False, out.suffix)
    else:
        give_table(frame, format, out, as_text)


def _part(cap: Capture, part: Part | None) -> Capture:
    """What is to be shown of a capture: of an encoder-decoder's, one part."""
    if cap.target is not None:
        shown: Capture = getattr(cap, part or Part.DECODER)
        return shown
    if part is not None:
        raise InputError(f"--part {part} is for encoder-decoders, and this model is none")
    return cap
