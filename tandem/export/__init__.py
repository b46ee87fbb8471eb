"""Saved weights as an ONNX file, so that what was trained here runs anywhere.

``graph.py`` says which ONNX nodes each Op becomes, ``program.py`` makes a model of a checkpoint and
is ``python -m tandem.export``.
"""
