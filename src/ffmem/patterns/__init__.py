"""What recurs in the triggers of memories: found by programs, described, scored, kept."""
