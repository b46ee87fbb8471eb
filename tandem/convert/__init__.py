"""Weights that were learned elsewhere, made checkpoints, and checkpoints made files for elsewhere.

``theano_folder.py`` knows the files of the original program, ``caffe.py`` those of Caffe, which
``wire.py`` reads, ``fetch.py`` downloads the published weights, and ``program.py`` is what the
programs in ``pretrained/`` do.
"""
