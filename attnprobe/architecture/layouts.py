"""Which linear layer of an attention module gives query, key and value, and which one is W_O.

Known by the names of the submodules alone. What a model does between them, such as rotary
positions, is told in `attnprobe.projections`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Layout:
    """The names of one attention module's linear layers.

    Attributes:
        inputs: the layers that give query, key and value; or the one that gives all three.
        output: the layer W_O: the module's own, or its parent's.
        by_head: the one layer gives query, key and value of head 0, then those of head 1, and so
            on; else all queries, all keys, all values.
        apart: the module does not return what W_O gives: W_O is its parent's, or a norm follows.
    """

    inputs: tuple[str, ...]
    output: str
    by_head: bool = False
    apart: bool = False

    def output_layer(self, module: nn.Module, parent: nn.Module | None) -> nn.Module | None:
        """W_O of an attention module; None if neither it nor its parent has such a layer."""
        for owner in (module, parent):
            layer: object = owner
            for part in self.output.split("."):
                layer = getattr(layer, part, None)
            if isinstance(layer, nn.Module):
                return layer
        return None


LAYOUTS = (
    *(
        Layout(("q_proj", "k_proj", "v_proj"), output)  # Llama and most since; OPT, BART; Phi
        for output in ("o_proj", "out_proj", "dense")
    ),
    Layout(("query", "key", "value"), "dense", apart=True),  # ALBERT
    Layout(("query", "key", "value"), "output.dense", apart=True),  # BERT
    Layout(("q_lin", "k_lin", "v_lin"), "out_lin"),  # DistilBERT
    Layout(("q", "k", "v"), "o"),  # T5
    Layout(("c_attn",), "c_proj"),  # GPT-2
    Layout(("qkv_proj",), "o_proj"),  # Phi-3
    Layout(("query_key_value",), "dense", by_head=True),  # GPT-NeoX
)


def layout_of(module: nn.Module | None, parent: nn.Module | None) -> Layout | None:
    """The layout whose layers an attention module has; None if it has those of none."""
    if module is None:
        return None
    names = {name for name, _ in module.named_children()}
    for layout in LAYOUTS:
        if names.issuperset(layout.inputs) and layout.output_layer(module, parent) is not None:
            return layout
    return None
