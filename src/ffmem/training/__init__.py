"""Train language models with one kind of memory."""
