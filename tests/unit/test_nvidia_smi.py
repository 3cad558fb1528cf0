import pytest

from cluster.transport.nvidia_smi import visible_gpus

LISTED = """\
GPU 0: NVIDIA H200 (UUID: GPU-1111)
  MIG 1g.18gb     Device  0: (UUID: MIG-5555)
  MIG 1g.18gb     Device  1: (UUID: MIG-6666)
GPU 1: NVIDIA GeForce RTX 4090 (UUID: GPU-2222)
GPU 2: NVIDIA GeForce RTX 4090 (UUID: GPU-3333)
"""


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, ("MIG-5555", "MIG-6666", 1, 2)),
        ("", ()),
        ("2,1", (2, 1)),
        ("1, 7,2", (1,)),  # as in CUDA: an invalid entry ends the list
        ("GPU-33,0", (2, "MIG-5555")),  # as in CUDA: the first slice of the GPU
        ("MIG-66,GPU-11", ("MIG-6666", "MIG-5555")),
        ("1,1", (1,)),
        ("-1", ()),
    ],
)
def test_visible_gpus_are_those_of_cuda_visible_devices(visible, gpus):
    assert visible_gpus(LISTED, visible) == gpus
