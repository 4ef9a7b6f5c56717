"""A tile of weights, laid out so that the keys of one distance stand below each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnprobe.outputs import Buffers

buffers = Buffers()
"""What tiles are written into, one after another."""


@dataclass(frozen=True, eq=False)
class Skewed:
    """A tile of weights (b, H, t, K) in rows with t - 1 zeros between them: read with a step of one
    more than a row, it has the keys of one distance below each other."""

    flat: Tensor
    weights: Tensor  # (b, H, t, K)
    by_distance: Tensor  # (b·H, t, W): column c holds the keys j = i + c - (stop - 1)
    start: int

    @classmethod
    def of(cls, scores: Tensor, start: int, causal: bool) -> Skewed:
        """Memory for weights of the shape of these scores."""
        count, heads, rows, keys = scores.shape
        gap, width = rows - 1, keys + rows - 1
        size = count * heads * rows * width
        flat = buffers.take("weights", (size + gap,), scores.dtype, scores)
        whole = flat[:size].view(count, heads, rows, width)
        whole[..., :gap] = 0.0
        flat[size:] = 0.0
        columns = keys if causal else width
        steps = (rows * width, width + 1, 1)
        by_distance = flat.as_strided((count * heads, rows, columns), steps)
        return cls(flat, whole[..., gap:], by_distance, start)

    @property
    def stop(self) -> int:
        """The row after the last."""
        return self.start + self.weights.shape[2]

    def flagged(self, flags: Tensor) -> Tensor:
        """Each row's sums over the keys with each flag: flags (b, S, F) -> (b, H, t, F)."""
        count, heads, rows, keys = self.weights.shape
        flat = self.weights.as_strided(
            (count, heads * rows, keys),
            (self.weights.stride(0), self.weights.stride(2), 1),
            self.weights.storage_offset(),
        )
        return torch.bmm(flat, flags[:, :keys]).view(count, heads, rows, -1)

    def moved(self) -> Tensor:
        """Σ weight·|i - j| of each row over all keys but the first, (b, H, t)."""
        first = self.weights[..., 0].clone()
        self.weights[..., 0] = 0.0
        columns = self.by_distance.shape[-1]
        far = torch.arange(1 - self.stop, columns + 1 - self.stop, device=first.device).abs_()
        shape = tuple(self.by_distance.shape)
        product = buffers.take("product", shape, first.dtype, first)
        found = torch.mul(self.by_distance, far.to(first), out=product).sum(-1).view(first.shape)
        self.weights[..., 0] = first
        return found

    def add_distances(self, by_row: Tensor, sums: Tensor, limit: int) -> None:
        """Add the weights, divided by rows, to the sums by distance, (H, 2N - 1)."""
        count, heads, rows, _ = self.weights.shape
        found = torch.bmm(by_row.reshape(count * heads, 1, rows), self.by_distance)
        found = found.view(count, heads, -1).double().sum(0)
        begin = limit - self.stop
        sums[:, begin : begin + found.shape[1]] += found

    def diagonal(self, back: int) -> Tensor:
        """Each row's weight on the key so many tokens before it, (b, H, t); 0 where none is."""
        column = self.stop - 1 - back
        if not 0 <= column < self.by_distance.shape[-1]:
            return torch.zeros_like(self.weights[..., 0])
        return self.by_distance[:, :, column].view(self.weights.shape[:3])

    def at(self, places: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The weights at some texts, rows and keys, (pairs,) each: (pairs, H)."""
        text, row, key = places
        return self.weights[text, :, row, key]
