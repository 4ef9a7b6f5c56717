"""Pages that show a capture's attention: HTML in one piece, drawn without a network."""
