"""A capture in a folder, and back: safetensors and JSON, checked before anything is believed."""
