"""Indexes as tools for language-model agents."""
