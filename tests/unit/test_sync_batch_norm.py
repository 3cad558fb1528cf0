from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.test_dist import run_ranks
from tests.unit.trainer_process import ranks
from trainer.models.sync import synchronise
from trainer.models.yolo import build_yolo, load_cfg


def test_outputs_and_gradients_of_uneven_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    """Five pictures on one rank and three, far brighter, on the other, and then the whole detector so."""
    program = """
        import os, torch
        from torch import nn
        from trainer import dist
        from trainer.config import Hyp
        from trainer.models.sync import synchronise
        from trainer.models.yolo import build_yolo, load_cfg
        from trainer.tasks.detection import loss_of
        from trainer.training.timing import Clock

        cpu = torch.device("cpu")
        torch.manual_seed(0)
        x = torch.randn(8, 4, 6, 5)
        x[5:] = x[5:] * 3 + 10
        upstream = torch.randn_like(x)
        norm = nn.BatchNorm2d(4, momentum=0.03)
        nn.init.uniform_(norm.weight)

        def run(norm, x, upstream):
            x = x.clone().requires_grad_()
            norm.zero_grad()
            y = norm(x)
            (y * upstream).sum().backward()
            return y.detach(), x.grad, norm.weight.grad.clone(), norm.bias.grad.clone()

        import copy
        whole_norm = copy.deepcopy(norm)
        whole = run(whole_norm, x, upstream)

        # In float64, as an untrained network enlarges the differences of rounding.
        model = build_yolo(load_cfg("yolov5n.yaml"), nc=3).double()
        images = torch.rand(8, 3, 64, 64).double()
        targets = torch.tensor([[0, 1, .4, .4, .3, .2], [0, 2, .7, .3, .5, .5], [4, 0, .5, .6, .9, .8]])

        def losses(net, model, images, targets):
            loss = loss_of(model, Hyp(), 64)
            assigned = loss.assign(targets, len(images), 64, 64)
            dist.wait(dist.start_sum(assigned.counts))
            terms = loss(net(images), assigned, assigned.counts)
            model.zero_grad()
            (terms.sum() * assigned.counts[0].float()).backward()
            terms = terms.detach()
            dist.wait(dist.start_sum(terms))
            return terms, [p.grad.clone() for p in model.parameters()], model.state_dict()

        alone = copy.deepcopy(model)
        whole_terms, whole_gradients, whole_state = losses(alone, alone, images, targets)

        world = dist.world_of(os.environ)
        dist.join(world, cpu)
        mine = slice(0, 5) if world.rank == 0 else slice(5, 8)
        synchronise(norm, cpu)
        y, of_x, of_weight, of_bias = run(norm, x[mine], upstream[mine])
        torch.testing.assert_close(y, whole[0][mine], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(of_x, whole[1][mine], rtol=1e-5, atol=1e-5)
        for part, expected in ((of_weight, whole[2]), (of_bias, whole[3])):
            dist.wait(dist.start_sum(part))
            torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-5)
        for name, value in norm.state_dict().items():
            torch.testing.assert_close(value, whole_norm.state_dict()[name], rtol=1e-5, atol=1e-5)

        synchronise(model, cpu)
        net = dist.wrap(model, cpu, static=True)
        Clock(cpu).watch(net)  # gradients are summed, not averaged
        terms, gradients, state = losses(net, model, images[mine], targets if world.rank == 0 else targets[:0])
        torch.testing.assert_close(terms, whole_terms, rtol=1e-5, atol=1e-6)
        for (name, _), a, b in zip(model.named_parameters(), gradients, whole_gradients):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8 * float(b.abs().max()), msg=name)
        for name, value in state.items():
            torch.testing.assert_close(value, whole_state[name], rtol=1e-5, atol=1e-5)
        dist.leave()
    """
    for result in run_ranks(program, ranks(2), tmp_path):
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_batch_norm_where_there_is_one_process_or_no_training(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 4, dtype=dtype)
    plain, synchronised = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    synchronise(synchronised, torch.device("cpu"))
    assert type(synchronised) is not nn.BatchNorm2d
    assert torch.equal(plain(x), synchronised(x))
    assert torch.equal(plain.eval()(x), synchronised.eval()(x))


def test_a_model_keeps_its_names_and_tensors() -> None:
    model = build_yolo(load_cfg("yolov5n.yaml"), nc=3)
    before = {k: v.data_ptr() for k, v in model.state_dict().items()}
    synchronise(model, torch.device("cpu"))
    assert {k: v.data_ptr() for k, v in model.state_dict().items()} == before
