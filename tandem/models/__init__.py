"""Published networks, stated by their layers, and recipes to train them.

Each module holds the networks of one paper, for ``network: tandem.models.resnet:ResNet50``. Each
``.yaml`` file beside them is a recipe, for ``--config resnet50``: the published settings of a run.
"""
