"""Shapes are checked in functions that are defined from now on: before ffmem is imported."""

from tests import checking

checking.install()
