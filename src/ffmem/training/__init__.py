"""Training language models whose memories are of one kind or another."""
