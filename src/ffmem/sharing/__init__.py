"""Indexes as datasets on the Hugging Face Hub."""
