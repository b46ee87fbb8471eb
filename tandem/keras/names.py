"""What parameters are called in our files, and their kinds, by Keras's names."""

from tandem.layers.parameter import Kind

PARAMETERS: dict[str, tuple[str, Kind]] = {
    "kernel": ("weight", "weight"),
    "embeddings": ("weight", "weight"),
    "gamma": ("weight", "scale"),
    "beta": ("bias", "shift"),
    "moving_mean": ("running_mean", "average"),
    "moving_variance": ("running_var", "average"),
}
