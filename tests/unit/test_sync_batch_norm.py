import copy
import functools
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.trainer_process import call, ranks
from trainer.distributed import comm
from trainer.distributed.sync_batch_norm import synchronise

CPU = torch.device("cpu")
assert_close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)


def differentiate(norm, x, upstream):
    x = x.clone().requires_grad_()
    norm.zero_grad()
    y = norm(x)
    (y * upstream).sum().backward()
    return y.detach(), x.grad, norm.weight.grad.clone(), norm.bias.grad.clone()


def compare_with_one_process() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 4, 6, 5)
    x[5:] = x[5:] * 3 + 10
    upstream = torch.randn_like(x)
    norm = nn.BatchNorm2d(4, momentum=0.03)
    nn.init.uniform_(norm.weight)
    whole_norm = copy.deepcopy(norm)
    whole = differentiate(whole_norm, x, upstream)

    world = comm.world_of(os.environ)
    comm.join(world, CPU)
    mine = slice(0, 5) if world.rank == 0 else slice(5, 8)
    synchronise(norm, CPU)
    y, of_x, of_weight, of_bias = differentiate(norm, x[mine], upstream[mine])
    assert_close(y, whole[0][mine])
    assert_close(of_x, whole[1][mine])
    for part, expected in ((of_weight, whole[2]), (of_bias, whole[3])):
        comm.wait(comm.start_sum(part))
        assert_close(part, expected)
    for name, value in norm.state_dict().items():
        assert_close(value, whole_norm.state_dict()[name])
    comm.leave()


def test_outputs_and_gradients_of_uneven_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    """Five images on one rank and three, far brighter, on the other. test_verify.py compares whole detectors."""
    for result in call(compare_with_one_process, tmp_path, ranks(2)):
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_batch_norm_in_one_process_and_in_evaluation(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 4, dtype=dtype)
    plain, synchronised = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    before = {name: tensor.data_ptr() for name, tensor in synchronised.state_dict().items()}
    synchronise(synchronised, CPU)
    assert {name: tensor.data_ptr() for name, tensor in synchronised.state_dict().items()} == before
    assert type(synchronised) is not nn.BatchNorm2d
    assert torch.equal(plain(x), synchronised(x))
    assert torch.equal(plain.eval()(x), synchronised.eval()(x))
