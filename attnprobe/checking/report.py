"""What `verify` returns: a row per check, layer and head, and the verdict they add up to."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from attnprobe.records import counted

if TYPE_CHECKING:
    import pandas as pd

Verdict = Literal["verified", "mismatch", "not_checked"]

COLUMNS = ["check", "layer", "head", "error", "bound", "ratio", "verdict", "reason"]


@dataclass(frozen=True)
class Row:
    """One comparison.

    `error` is the absolute difference at the number that stands worst against its own bound,
    `bound` the bound at that number, and `ratio` error / bound: above 1 is a mismatch. `head` is
    None where the comparison is of a whole layer, `layer` too where it is of the whole model. An
    error without a bound is not_checked: there is a difference, and whether it is right is not
    known.
    """

    check: str
    layer: int | None
    head: int | None
    error: float = math.nan
    bound: float = math.nan
    reason: str = ""
    part: str = ""
    """Of an encoder-decoder: encoder, decoder or cross, each with its own layers from 0."""

    @property
    def ratio(self) -> float:
        """error / bound; 0 where there is no error, infinite where there is no room for one."""
        if self.error == 0:
            return 0.0
        if math.isnan(self.error) or math.isnan(self.bound):
            return math.nan if self.verdict == "not_checked" else math.inf
        return self.error / self.bound if self.bound > 0 else math.inf

    @property
    def verdict(self) -> Verdict:
        """verified where error ≤ bound; a row without numbers is not_checked, for its reason."""
        if math.isnan(self.bound):
            return "not_checked"
        return "verified" if self.error <= self.bound else "mismatch"


@dataclass(frozen=True, eq=False)
class VerificationReport:
    """The rows of a verification, and what they mean.

    Attributes:
        rows: a `Row` per check, layer and head.
        model: what the model was loaded as.
        kernel: transformers' name of the kernel that ran.
        dtype: the dtype it ran in.
        texts: how many texts were given.
        tokens: how many tokens they hold together, without padding.
        model_layers: how many layers the model's config speaks of, if it does.
        steps: how many forwards they are of: a generation has several.
        rows_left_out: query rows that may attend to no key (padding on the left), summed over
            layers: they have no meaning, and are not compared.
    """

    rows: tuple[Row, ...]
    model: str
    kernel: str
    dtype: str
    texts: int
    tokens: int
    rows_left_out: int
    model_layers: int | None = None
    steps: int = 1

    @property
    def verdict(self) -> Verdict:
        """mismatch, if any row is; verified, if every layer's `output` is; else not_checked."""
        if any(row.verdict == "mismatch" for row in self.rows):
            return "mismatch"
        outputs = [row.verdict for row in self.rows if row.check == "output"]
        return "verified" if outputs and set(outputs) == {"verified"} else "not_checked"

    @property
    def passed(self) -> bool:
        """Whether every layer's `output` is verified and nothing mismatches."""
        return self.verdict == "verified"

    @property
    def worst(self) -> Row | None:
        """The row that stands worst against its bound; None where nothing was compared."""
        compared = [row for row in self.rows if row.verdict != "not_checked"]
        return max(compared, key=lambda row: row.ratio, default=None)

    @property
    def summary(self) -> str:
        """The verdict in one line."""
        if self.worst is None:
            return f"NOT CHECKED: {'; '.join(dict.fromkeys(row.reason for row in self.rows))}"
        if self.verdict == "mismatch":
            count = sum(row.verdict == "mismatch" for row in self.rows)
            return (
                f"MISMATCH: the model did not compute softmax(QKᵀ/√d_k + M)V; {count} of "
                f"{len(self.rows)} comparisons exceed their bound, most of all "
                f"{_place(self.worst)}: error {self.worst.error:.1e}, bound {self.worst.bound:.1e}"
            )
        if self.verdict == "not_checked":
            reasons = dict.fromkeys(
                row.reason
                for row in self.rows
                if row.check == "output" and row.verdict == "not_checked"
            )
            why = "; ".join(reasons) or "the check was not asked for"
            return f"NOT CHECKED: output: {why}{self._rest()}"
        return (
            f"VERIFIED: the model computed softmax(QKᵀ/√d_k + M)V in {self._extent()}; the worst "
            f"comparison stands at {ratio_text(self.worst.ratio)} of its bound "
            f"({_place(self.worst)}){self._gaps()}"
        )

    def _rest(self) -> str:
        """Of a report that is not verified as a whole: what was found where it was checked."""
        checked = [row for row in self.rows if row.check == "output" and row.verdict == "verified"]
        if not checked or self.worst is None:
            return ""
        layers = len({(row.part, row.layer) for row in checked})
        return (
            f". Of the others, {len(checked)} heads in {counted(layers, 'layer')}, the worst "
            f"comparison stands at {ratio_text(self.worst.ratio)} of its bound "
            f"({_place(self.worst)})"
        )

    def _extent(self) -> str:
        heads = sum(row.check == "output" for row in self.rows)
        layers = len({(row.part, row.layer) for row in self.rows if row.check == "output"})
        if self.steps > 1:
            return f"{layers} layers over {self.steps} forwards ({heads} heads in all)"
        several = any(row.part for row in self.rows)  # each with its own number of layers
        if several or self.model_layers == layers:
            return f"all {layers} layers and {heads} heads"
        seen = f"{counted(layers, 'attention layer')} and {heads} heads"
        has = "" if self.model_layers is None else f" (the model has {self.model_layers} layers)"
        return seen + has

    def _gaps(self) -> str:
        """The checks of which nothing was compared, or not in every layer; with the reason where
        there is a difference."""
        by_check: dict[str, list[Row]] = {}
        for row in self.rows:
            by_check.setdefault(row.check, []).append(row)
        gaps = []
        for check, found in by_check.items():
            missing = [row for row in found if row.verdict == "not_checked"]
            if not missing:
                continue
            count = "" if len(missing) == len(found) else f" in {len(missing)} of {len(found)}"
            differing = [row.reason for row in missing if not math.isnan(row.error)]
            gaps.append(f"{check}{count}{f' ({differing[0]})' if differing else ''}")
        return f"; not checked: {', '.join(gaps)}" if gaps else ""

    def to_frame(self) -> pd.DataFrame:
        """A row per comparison: check, layer, head, error, bound, ratio, verdict, reason.

        `layer` and `head` are nullable Int64, `error`, `bound` and `ratio` float64. Of an
        encoder-decoder, part stands before layer.
        """
        import pandas as pd

        records = [asdict(row) | {"ratio": row.ratio, "verdict": row.verdict} for row in self.rows]
        parts = ["part"] if any(row.part for row in self.rows) else []
        frame = pd.DataFrame(records, columns=[COLUMNS[0], *parts, *COLUMNS[1:]])
        return frame.astype({"layer": "Int64", "head": "Int64"})

    def by_layer(self) -> VerificationReport:
        """Only the row of each check and layer that stands worst against its bound."""
        return self._worst_of(lambda row: (row.check, row.part, row.layer))

    def by_check(self) -> VerificationReport:
        """Only the row of each check that stands worst against its bound."""
        return self._worst_of(lambda row: row.check)

    def _worst_of(self, place: Callable[[Row], Hashable]) -> VerificationReport:
        worst: dict[Hashable, Row] = {}
        for row in self.rows:
            best = worst.get(place(row))
            if best is None or _badness(row) > _badness(best):
                worst[place(row)] = row
        return replace(self, rows=tuple(worst.values()))

    def to_dict(self) -> dict[str, Any]:
        """The report for JSON: plain numbers, strings and None; no NaN, no infinity."""
        rows = [
            {
                **asdict(row),
                "error": _finite(row.error),
                "bound": _finite(row.bound),
                "ratio": _finite(row.ratio),
                "verdict": row.verdict,
            }
            for row in self.rows
        ]
        names = ("model", "kernel", "dtype", "texts", "tokens", "rows_left_out", "model_layers")
        return {
            "verdict": self.verdict,
            "passed": self.passed,
            "summary": self.summary,
            **{name: getattr(self, name) for name in names},
            "rows": rows,
        }

    def __repr__(self) -> str:
        table = _readable(self.by_check().to_frame()).to_string(index=False)
        return f"{self._heading()}\n{table}\n{self.summary}"

    def _repr_html_(self) -> str:
        import pandas as pd

        with pd.option_context("display.max_colwidth", None):  # else pandas cuts the reasons
            table = _readable(self.by_check().to_frame()).to_html(index=False, border=0)
        heading, summary = html.escape(self._heading()), html.escape(self.summary)
        return f"<p>{heading}</p>{table}<p><strong>{summary}</strong></p>"

    def _heading(self) -> str:
        left_out = (
            f", {self.rows_left_out} rows without a key left out" if self.rows_left_out else ""
        )
        return (
            f"{self.model}: {counted(self.texts, 'text')}, {self.tokens} tokens, "
            f"{self.kernel} kernel in {self.dtype}{left_out}; the worst of each check:"
        )


def _badness(row: Row) -> float:
    """Worst is what exceeds its bound, then a difference that has none, then the near ones."""
    if row.verdict == "not_checked":
        return -1.0 if math.isnan(row.error) else 1.0
    return row.ratio


def _place(row: Row) -> str:
    layer = "" if row.layer is None else f", {row.part} layer {row.layer}".replace("  ", " ")
    head = "" if row.head is None else f", head {row.head}"
    return f"{row.check}{layer}{head}"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _readable(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame as text: errors to two digits, the ratio as a percentage, nothing for no number."""
    import pandas as pd

    formats: dict[str, Callable[[Any], str]] = {
        "error": "{:.1e}".format,
        "bound": "{:.1e}".format,
        "ratio": ratio_text,
        "layer": str,
        "head": str,
    }
    text = {
        name: ["" if pd.isna(value) else form(value) for value in frame[name]]
        for name, form in formats.items()
    }
    return frame.assign(**text)


def ratio_text(ratio: float) -> str:
    """A ratio as a person reads it: 2.6%, 140%, 3.6e+03 ×, ∞."""
    if math.isinf(ratio):
        return "∞"
    return f"{ratio:.1%}" if ratio < 10 else f"{ratio:.2g} ×"
