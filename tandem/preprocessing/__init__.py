"""ImageNet's JPEGs -> batch files, mean image and labels: the core under the three programs.

``settings`` paths.yaml and the command line, ``listing`` which pictures there are and of which
class, ``pool`` the processes that do it, ``batches``
batch files in the order of the list, ``progress`` what a stopped run has done, ``prepare`` the
whole of make_hkl.py, ``derive`` text and label files from the manifest, ``program`` what the three
programs share.
"""
