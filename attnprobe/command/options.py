"""The command's arguments and options, as Typer reads them, that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attnprobe.command.targets import Format

SENTENCE = "The children were playing in the green park"


class Part(StrEnum):
    """Which attention of an encoder-decoder's."""

    ENCODER = "encoder"
    DECODER = "decoder"
    CROSS = "cross"


Text = Annotated[str, typer.Argument(help="The text to run the model on.")]
Model = Annotated[str, typer.Option(help="bundled, a folder, a .gguf file, or an id on the hub.")]
Dtype = Annotated[str, typer.Option(help="float32, float16, bfloat16, float64 or auto.")]
Attn = Annotated[
    str | None, typer.Option(help="The attention kernel: sdpa, eager, … If not given, the model's.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, …")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
Target = Annotated[
    str | None, typer.Option(help="For an encoder-decoder: the text that its decoder is given.")
]
PartOption = Annotated[
    Part | None,
    typer.Option("--part", help="Of an encoder-decoder. If not given, the decoder."),
]
Layer = Annotated[int | None, typer.Option(help="Counted from 0; all if not given.")]
Head = Annotated[int | None, typer.Option(help="Counted from 0; all if not given.")]
ByWord = Annotated[bool, typer.Option("--by-word", help="By word, not by token.")]
FormatOption = Annotated[
    Format | None,
    typer.Option("--format", help="How to write the table; else as the name in --out ends."),
]
Out = Annotated[Path | None, typer.Option(help="Write to this file instead of the terminal.")]
TableOrPicture = Annotated[
    Path | None,
    typer.Option("--out", help="Write to this file: a table, or a picture (.svg, .png, .pdf)."),
]
Page = Annotated[Path | None, typer.Option("--out", help="Write to this file.")]
Open = Annotated[bool, typer.Option("--open", help="Open it in the browser.")]
