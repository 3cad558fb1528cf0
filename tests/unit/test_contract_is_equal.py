from pathlib import Path

import cluster.contract
import trainer.contract


def test_both_halves_have_the_same_names():
    ours = {name: value for name, value in vars(cluster.contract).items() if name.isupper()}
    theirs = {name: value for name, value in vars(trainer.contract).items() if name.isupper()}
    assert ours == theirs
    assert ours


def test_every_name_is_in_the_document():
    page = Path(__file__).parents[2].joinpath("docs/reference/contract.md").read_text()
    for name, value in vars(cluster.contract).items():
        if name.isupper() and isinstance(value, str):
            assert f"`{value}`" in page, name
