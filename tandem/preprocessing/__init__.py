"""Pictures to batch files, mean image and labels: the core of the three programs.

``settings`` reads paths.yaml and the command line, ``sources`` knows the layouts in which people
have pictures, ``listing`` lists them, ``pool`` decodes them in processes, ``batches`` writes batch
files in the order of the list, ``progress`` records what a stopped run has done, ``report`` shows
how far a run is, ``prepare`` is the whole of make_hkl.py, ``derive`` writes text and label files
from the manifest, ``program`` is what the three programs share.
"""
