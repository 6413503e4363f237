"""Indexing: the pass over a corpus, and the index folder it writes."""
