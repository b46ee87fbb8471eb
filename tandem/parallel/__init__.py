"""Data-parallel functions for any PyTensor program."""
