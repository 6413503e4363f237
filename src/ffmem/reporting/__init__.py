"""Figures and the report, made from the rows of the experiments alone."""
