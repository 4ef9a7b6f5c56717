"""See, and prove, what the attention of a Hugging Face model computes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnprobe.capturing import capture
    from attnprobe.checking.report import VerificationReport
    from attnprobe.editing import edit
    from attnprobe.effects.ablation import head_effects
    from attnprobe.effects.attribution import LogitContributions, logit_contributions
    from attnprobe.effects.formulas import term_effects
    from attnprobe.effects.patching import patch_effects
    from attnprobe.effects.variance import scale_variance
    from attnprobe.errors import AttnprobeError, InputError, ModelError, NonFiniteError
    from attnprobe.heads import head_stats
    from attnprobe.hooks import probe
    from attnprobe.looking import attended, attended_by
    from attnprobe.models import load
    from attnprobe.recompute import scores, weights
    from attnprobe.records import AttentionCall, Capture, LanguageModel
    from attnprobe.roles import head_roles
    from attnprobe.saving.captures import load_capture, save
    from attnprobe.sweeping.corpora import sweep
    from attnprobe.sweeping.results import Sweep, read_sweep
    from attnprobe.tables import styled, table
    from attnprobe.verification import verify
    from attnprobe.views.attention import attention_view
    from attnprobe.views.bertviz import head_view, model_view, neuron_view
    from attnprobe.views.effects import effect_map
    from attnprobe.views.histograms import histogram_grid
    from attnprobe.views.overview import report_view
    from attnprobe.views.page import View
    from attnprobe.views.plots import heatmap, heatmap_grid
    from attnprobe.views.walk import walkthrough_view
    from attnprobe.walking import Walkthrough, walkthrough

__version__ = "0.1.0"

__all__ = [
    "AttentionCall",
    "AttnprobeError",
    "Capture",
    "InputError",
    "LanguageModel",
    "LogitContributions",
    "ModelError",
    "NonFiniteError",
    "Sweep",
    "VerificationReport",
    "View",
    "Walkthrough",
    "attended",
    "attended_by",
    "attention_view",
    "capture",
    "edit",
    "effect_map",
    "head_effects",
    "head_roles",
    "head_stats",
    "head_view",
    "heatmap",
    "heatmap_grid",
    "histogram_grid",
    "load",
    "load_capture",
    "logit_contributions",
    "model_view",
    "neuron_view",
    "patch_effects",
    "probe",
    "read_sweep",
    "report_view",
    "save",
    "scale_variance",
    "scores",
    "styled",
    "sweep",
    "table",
    "term_effects",
    "verify",
    "walkthrough",
    "walkthrough_view",
    "weights",
]

# No module may have the name of something in it: importing it would put it where that belongs.
_HOMES = {
    "effects.ablation": ("head_effects",),
    "effects.attribution": ("LogitContributions", "logit_contributions"),
    "errors": ("AttnprobeError", "InputError", "ModelError", "NonFiniteError"),
    "capturing": ("capture",),
    "editing": ("edit",),
    "effects.formulas": ("term_effects",),
    "heads": ("head_stats",),
    "hooks": ("probe",),
    "models": ("load",),
    "effects.patching": ("patch_effects",),
    "records": ("AttentionCall", "Capture", "LanguageModel"),
    "recompute": ("scores", "weights"),
    "saving.captures": ("load_capture", "save"),
    "checking.report": ("VerificationReport",),
    "roles": ("head_roles",),
    "looking": ("attended", "attended_by"),
    "sweeping.corpora": ("sweep",),
    "sweeping.results": ("Sweep", "read_sweep"),
    "tables": ("styled", "table"),
    "effects.variance": ("scale_variance",),
    "verification": ("verify",),
    "views.attention": ("attention_view",),
    "views.bertviz": ("head_view", "model_view", "neuron_view"),
    "views.effects": ("effect_map",),
    "views.histograms": ("histogram_grid",),
    "views.overview": ("report_view",),
    "views.page": ("View",),
    "views.plots": ("heatmap", "heatmap_grid"),
    "views.walk": ("walkthrough_view",),
    "walking": ("Walkthrough", "walkthrough"),
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: `attnprobe --help` must not wait for torch."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"attnprobe.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
