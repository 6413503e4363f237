"""Every figure and table of the paper, measured on a model: one file per experiment."""
