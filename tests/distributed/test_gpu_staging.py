"""Page-locked copies of vectors on a GPU, by a fake driver."""

import numpy as np

from tandem.distributed import local_groups
from tandem.distributed.gpu_staging import GpuVector
from tests.support.fake_cuda import FakeDriver, FakeMachine, fake_memory


def test_copies_on_the_host_share_no_page() -> None:
    driver, (group,) = FakeDriver(FakeMachine()), local_groups(1)
    vectors = []
    for number in range(3):
        memory = fake_memory(driver, 500)
        driver.write(memory.flat["gradients"], np.full(500, number))
        vectors.append(GpuVector(memory, "gradients", group))
    copies = [vector.on_host(500)[0] for vector in vectors]
    assert [set(copy.tolist()) for copy in copies] == [{0.0}, {1.0}, {2.0}]
    assert len(driver.locked) == 3
    for vector in vectors:
        vector.close()
    assert not driver.locked
