"""Two indexes of one architecture over one corpus, memory by memory."""
