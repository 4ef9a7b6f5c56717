"""What attnprobe raises: one base class, and a child for what a caller may tell apart."""


class AttnprobeError(Exception):
    """Something attnprobe refuses to do; the message says what it got, expected, and what to do."""


class InputError(AttnprobeError, ValueError):
    """A text, word, layer, head or option that cannot be used as given."""


class ModelError(AttnprobeError):
    """A model that cannot be found, loaded or observed."""


class NonFiniteError(ModelError):
    """NaN or infinity in a model's weights or in what it computed."""
