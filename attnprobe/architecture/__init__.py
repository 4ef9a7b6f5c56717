"""What is known of models: facts from their configs, types, layers, rotary positions, biases."""
