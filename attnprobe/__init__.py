"""See, and prove, what the attention of a Hugging Face model computes."""

from attnprobe.errors import AttnprobeError, InputError, ModelError, NonFiniteError
from attnprobe.hooks import capture, probe
from attnprobe.models import load
from attnprobe.records import AttentionCall, Capture, LanguageModel
from attnprobe.report import VerificationReport
from attnprobe.tables import attended, table
from attnprobe.verification import verify
from attnprobe.weights import scores, weights

__version__ = "0.1.0"

__all__ = [
    "AttentionCall",
    "AttnprobeError",
    "Capture",
    "InputError",
    "LanguageModel",
    "ModelError",
    "NonFiniteError",
    "VerificationReport",
    "attended",
    "capture",
    "load",
    "probe",
    "scores",
    "table",
    "verify",
    "weights",
]
