"""How the pictures of published weights were scaled."""

IMAGENET_STD = (58.395, 57.12, 57.375)
"""Standard deviation of each colour of ImageNet, of 0 to 255: 0.229, 0.224 and 0.225 of it."""

CIFAR_STD = (62.99, 62.09, 66.70)
"""Standard deviation of each colour of CIFAR-10, of 0 to 255."""
