"""Rewrites of batch normalisation: into weights where statistics are given."""

from pytensor.compile.mode import optdb
from pytensor.graph.rewriting.basic import dfs_rewriter

from tandem.ops.batch_norm_folding import fold_batch_norm

NORMALIZATION = "batch_normalization"
"""Tag of these rewrites, which work in the graph that the general ones have left."""

optdb.register(str(fold_batch_norm), dfs_rewriter(fold_batch_norm), NORMALIZATION, position=39)
