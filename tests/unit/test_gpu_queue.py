"""`launch --wait`: which machines a job gets."""

from dataclasses import replace

import pytest

from cluster.spec.model import Job, Machine
from cluster.supervisor.gpu_queue import machines_for


def machines(*counts):
    return [
        Machine(name, "10.0.0.1", tuple(range(count))) for name, count in zip("abcd", counts, strict=False)
    ]


@pytest.mark.parametrize(
    ("procs", "spares", "free", "names"),
    [
        (2, 0, (2, 1, 2), "ac"),
        (2, 1, (2, 1, 2), None),
        (1, 1, (2, 1, 2), "abc"),
        ((2, 1), 0, (1, 2, 4), "ba"),
        ((2, 1), 0, (2, 2, 4), "ab"),
        ((1, 2), 0, (2, 1, 0), "ba"),
        ((1, 2), 0, (1, 1, 0), None),
        ((2, 1), 1, (1, 2, 4), "bac"),
        ((2, 1), 1, (1, 2, 1), None),
        ("all", 0, (2, 4, 4), "ab"),
        ("all", 0, (1, 4, 4), "bc"),
        ("all", 0, (1, 3, 4), None),
        ("all", 1, (2, 4, 4), "abc"),
    ],
)
def test_a_waiting_job_gets_machines_for_each_of_its_nodes(procs, spares, free, names):
    every = machines(2, 4, 4)
    job = Job("job", ("x.py",), 2, procs, "/r", hosts=tuple(every[:2]), spares=tuple(every[2 : 2 + spares]))
    found = machines_for(job, every, machines(*free))
    assert names == (None if found is None else "".join(each.name for each in found))


def test_a_machine_that_does_not_answer_is_not_chosen():
    every = machines(2, 2, 2)
    job = Job("job", ("x.py",), 2, "all", "/r", hosts=tuple(every[:2]))
    assert machines_for(job, every, every[1:]) == every[1:]
    assert machines_for(replace(job, procs_per_node=(2, 1)), every, every[2:]) is None
