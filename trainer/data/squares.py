"""Batches of pictures that are brought to one square side: what classification and segmentation have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from trainer.data.stream import (
    PICTURE,
    Batches,
    BatchType,
    EpochLoader,
    Maker,
    Named,
    Plan,
    Share,
    steps_of,
)


@contextlib.contextmanager
def drawing(seed: int, epoch: int, index: int) -> Iterator[None]:
    """Inside, what torchvision draws for a picture follows from (seed, epoch, picture) alone."""
    drawn = np.random.SeedSequence([PICTURE, seed, epoch, index]).generate_state(1)[0]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(drawn))
        yield


class SquareLoader(EpochLoader[BatchType]):
    """Training batches, each a share of one permutation of the whole set."""

    def __init__(
        self,
        dataset: Named,
        maker: Maker[BatchType],
        *,
        imgsz: int,
        batch: int,
        seed: int,
        epochs: float,
        rank: int,
        world: int,
        local_size: int,
        workers: int,
        stride: int,
        channels: int = 3,
        lent: int = 0,
    ) -> None:
        """`batch` counts the pictures of a step on all ranks together; a rank takes `lent` more along.

        `channels` bytes a pixel are what a batch takes of the memory that workers share.
        """
        plan = Plan(
            count=len(dataset),
            steps=steps_of(len(dataset), batch, world),
            rank=rank,
            world=world,
            seed=seed,
            epochs=epochs,
            sides=range(imgsz, imgsz + 1),
            stride=stride,
        )
        largest = (-(-batch // world) + lent) * imgsz**2 * channels
        super().__init__(dataset, maker, plan, workers, largest, local_size)


class SquareValLoader(Batches[BatchType]):
    """Validation pictures in their order, every one on exactly one rank."""

    def __init__(
        self,
        dataset: Named,
        maker: Maker[BatchType],
        *,
        imgsz: int,
        batch: int,
        rank: int,
        world: int,
        local_size: int,
        workers: int,
        stride: int,
        channels: int = 3,
    ) -> None:
        """`batch` pictures at a time."""
        mine = np.array_split(np.arange(len(dataset)), world)[rank]
        shares = [Share(mine[k : k + batch], (imgsz, imgsz)) for k in range(0, len(mine), batch)]
        super().__init__(maker, shares, workers, batch * imgsz**2 * channels, local_size)
