"""Traces of runs: what each process did when, in Chrome's trace event format."""
