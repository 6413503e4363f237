"""Language models of our own, whose layers hold memories of several kinds."""
