"""Conversion between checkpoints and weight files of other programs.

``theano_folder`` reads and writes the files of the original program, ``caffe`` reads those of Caffe
by ``wire``, ``fetch`` downloads the published weights, and ``cli`` is the command line of the
programs in ``pretrained/``.
"""
