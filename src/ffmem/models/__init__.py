"""A model, read as layers of key-value memories."""
