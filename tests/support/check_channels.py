"""What each rank checks of its channel, under mpirun or torchrun: functions against NumPy.

Prints "checked" on rank 0 when all is well; a failed check ends the job with its traceback.
"""

import sys
import traceback
from types import SimpleNamespace
from typing import Any

from tandem.distributed import make_channel
from tandem.distributed.channel import GroupChannel
from tandem.launch.ranks import join
from tests.support.collectives import SHAPES, check_channel


def main() -> None:
    """Run every conversion twice, of two types."""
    group = join()
    memory: Any = SimpleNamespace()
    try:
        channel = make_channel(memory, group)
        assert isinstance(channel, GroupChannel)
        for shape in SHAPES:
            check_channel(channel, shape)
        check_channel(channel, SHAPES[0], "int64")
        check_channel(channel, SHAPES[0], "bool")
        channel.close()
    except BaseException:
        sys.stderr.write(f"rank {group.rank}: {traceback.format_exc()}\n")
        sys.stderr.flush()
        group.abort(1)
    group.barrier()
    if group.rank == 0:
        print("checked", group.size)


if __name__ == "__main__":
    main()
