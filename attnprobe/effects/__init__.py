"""What terms, heads, positions and parts of a model do: changes, and their effects in numbers."""
