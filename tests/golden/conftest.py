"""Without torch, deselect the test that runs the trainer: packaging/test.sh runs the others on another Python."""

from importlib.util import find_spec


def pytest_collection_modifyitems(config, items):
    if find_spec("torch") is None:
        omitted = [item for item in items if item.name == "test_wrong_trainer_commands"]
        items[:] = [item for item in items if item not in omitted]
        config.hook.pytest_deselected(items=omitted)
