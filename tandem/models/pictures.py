"""By what networks divide their pictures.

A network whose first convolution is normalised does not depend on the scale of its pictures; it
divides them where there are published weights, so that fine-tuning has the same rates.
"""

IMAGENET_STD = (58.395, 57.12, 57.375)
"""Standard deviation of each colour of ImageNet, of 0 to 255: 0.229, 0.224 and 0.225 of it."""

CIFAR_STD = (62.99, 62.09, 66.70)
"""Standard deviation of each colour of CIFAR-10, of 0 to 255."""
