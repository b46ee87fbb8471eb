"""What is in a picture, by the weights that a run has left or that were converted.

``classifier.py`` is the library call, ``program.py`` what ``classify.py`` does.
"""
