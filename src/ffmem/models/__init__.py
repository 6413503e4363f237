"""Load a language model and read its layers as key-value memories."""
