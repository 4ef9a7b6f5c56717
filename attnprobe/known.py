"""The model types for which the facts are known to hold: see `attnprobe.facts`.

Of these, a scale or mask that is not as the facts say is a mismatch. Of others it may as well be
that the facts are not all, and what departs from them is said not to be checked.
"""

_NAMES = """
gpt2 llama mistral mixtral qwen2 qwen3 phi gpt_neox gemma gemma2 gpt_oss opt t5
bert distilbert albert roberta
"""

KNOWN_TYPES = frozenset(_NAMES.split())
"""Verified in `mask` and `output` by the sweep whose table is docs/architectures.md."""
