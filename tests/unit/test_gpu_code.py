"""The compiled step of each loss compiles for the GPUs that are in use. It needs none: ptxas is in Triton's package."""

import tempfile
from pathlib import Path

import pytest
import torch

from tests.unit.settings import settings
from tests.unit.trainer_process import call
from tests.unit.yolo_folder import squares
from trainer.config import Hyp
from trainer.distributed.comm import World
from trainer.engine.events import Events
from trainer.engine.trainer import Trainer

ONE_LEVEL = Path(__file__).with_name("one_level.yaml")
#: By compute capability: A100, L4, H100.
GPUS = (80, 89, 90)


def compile_step(cfg: str) -> None:
    """Print the graphs of a step, and for each kernel and GPU the bytes of a thread that are spilled to memory."""
    from tests import gpu_code  # replaces functions of torch

    data = squares(Path("set"), train=4)
    how = {
        "precision": "bf16",
        "noautoanchor": True,
        "compile": "graphs",
        "hyp": Hyp(nbs=1.0, warmup_epochs=0.0),
    }
    run = Trainer(settings(str(data), cfg=cfg, **how), World(), torch.device("cpu"), Events({}))
    run.start()
    run.local_model.train()
    with tempfile.TemporaryDirectory() as folder:
        for graph in gpu_code.trace(run, next(iter(run.train_loader.epoch(0)))):
            lowered = gpu_code.lower(graph)
            print("graph", graph.part, graph.is_backward, *lowered.kernels.values())
            for name, source in lowered.sources.items():
                kernel = gpu_code.kernel_of(name, source, Path(folder))
                for gpu in GPUS:
                    print("kernel", name, gpu, gpu_code.compile_kernel(kernel, gpu, Path(folder)).spilled)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["Detect, [nc, anchors]", "DetectDFL, [nc]"])
def test_every_kernel_of_a_step_compiles_for_each_gpu_without_spills(tmp_path: Path, head: str) -> None:
    """With the losses of YOLOv5 and of YOLOv8."""
    cfg = tmp_path / "net.yaml"
    cfg.write_text(ONE_LEVEL.read_text().replace("Detect, [nc, anchors]", head))
    folders = {
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    (ended,) = call(compile_step, tmp_path, [{**folders, "TRITON_INTERPRET": "0"}], str(cfg))
    print(ended.stdout)
    lines = [line.split() for line in ended.stdout.splitlines()]
    graphs = [(part, way) for word, part, way, *_ in (line for line in lines if line[:1] == ["graph"])]
    assert sorted(graphs) == [
        ("_account", "False"),
        ("_eager", "False"),
        ("_eager", "True"),
        ("_eager_loss", "False"),
        ("_eager_loss", "True"),
    ]
    kernels = [line[1:] for line in lines if line[:1] == ["kernel"]]
    assert {int(gpu) for _, gpu, _ in kernels} == set(GPUS)
    assert len(kernels) > 30 * len(GPUS)  # of a network of two convolutions, and its loss
    assert [kernel for kernel in kernels if kernel[-1] != "0"] == []
