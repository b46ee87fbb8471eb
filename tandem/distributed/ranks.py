"""Ranks that mpirun, srun or torchrun has started together."""

from tandem.distributed import gloo, mpi
from tandem.distributed.group import RankGroup


def is_rank() -> bool:
    """Return whether this process, or one that it is a child of, has been started as a rank."""
    return gloo.is_started_by_torchrun() or mpi.is_started_by_mpi()


def join() -> RankGroup:
    """Join the ranks that were started together; raise `InputError` where that is impossible."""
    # Slurm's srun may have started torchrun, and then its variables are there too.
    return gloo.join() if gloo.is_started_by_torchrun() else mpi.join()
