"""Data-parallel functions for PyTensor programs."""
