"""Sharded and replicated tensors in a graph, with the conversions between them inferred."""
