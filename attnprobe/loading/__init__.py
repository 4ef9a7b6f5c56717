"""From a name to files, and from a text to a batch of token ids."""
