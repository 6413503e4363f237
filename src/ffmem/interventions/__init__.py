"""Interventions on a model's memories: trace, ablate, edit, compare."""
