"""Pictures to batch files, mean image and labels: the core of the three programs.

``settings`` reads paths.yaml and the command line, ``sources`` knows the layouts in which people
have pictures, with ``tars`` and ``ground_truth`` for archives and ILSVRC's development kit, and
``unsupported`` for other forms; ``listed`` is the list of a split, ``listing`` that of all
pictures, ``output`` checks where they go, ``index`` keeps what was read of archives, ``pool``
decodes pictures in processes, ``batches`` writes batch files in the order of the list, ``progress``
records what a stopped run has done, ``npz`` is the form of the files of both, ``report`` shows how
far a run is, ``prepare`` is the whole of make_hkl.py, ``derive`` writes text and label files from
the manifest, ``program`` is what the three programs share.
"""
