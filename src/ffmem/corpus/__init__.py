"""A corpus, read as sentences."""
