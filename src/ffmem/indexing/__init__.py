"""The index: the pass over a corpus, and the folder that keeps what it found."""
