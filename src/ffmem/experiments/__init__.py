"""Every figure and table of the paper, as rows measured on a model."""
