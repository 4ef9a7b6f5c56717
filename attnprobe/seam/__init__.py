"""Where attention is seen: at transformers' interface, and in what computes it by itself."""
