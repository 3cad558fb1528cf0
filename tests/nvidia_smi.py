"""A fake nvidia-smi, because the tests run without a GPU. It prints the tables that the launcher and the agent read."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

BROKEN = "Failed to initialize NVML: Driver/library version mismatch"

_PROGRAM = """\
import json, sys

machine = json.loads({machine!r})
gpus, arguments = machine["gpus"], sys.argv[1:]
if machine["broken"]:
    print(machine["broken"])
    sys.exit(machine["code"])
if arguments == ["-L"]:
    for number, gpu in enumerate(gpus):
        print(f"GPU {{number}}: {{gpu['name']}} (UUID: {{gpu['uuid']}})")
        for nth, uuid in enumerate(gpu["slices"]):
            print(f"  MIG 1g.18gb     Device  {{nth}}: (UUID: {{uuid}})")
    if not gpus:
        print("No devices found.")
    sys.exit()
options = dict(argument.partition("=")[::2] for argument in arguments)
fields, style = options.pop("--query-gpu", "").split(","), options.pop("--format", "").split(",")
if options or style[:2] != ["csv", "noheader"]:
    print("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.")
    sys.exit(1)
for number, gpu in enumerate(gpus):
    use = "[N/A]" if gpu["slices"] else (gpu["use"], " %")
    values = {{
        "index": number, "uuid": gpu["uuid"], "name": gpu["name"], "driver_version": machine["driver"],
        "memory.total": (gpu["memory"], " MiB"), "memory.used": (gpu["memory_used"], " MiB"),
        "utilization.gpu": use, "temperature.gpu": 41,
    }}
    for field in fields:
        if field not in values:
            print(f'Field "{{field}}" is not a valid field to query.')
            sys.exit(2)
    cells = [values[field] if isinstance(values[field], tuple) else (values[field], "") for field in fields]
    print(", ".join(f"{{value}}{{'' if 'nounits' in style else unit}}" for value, unit in cells))
"""


@dataclass(frozen=True)
class Gpu:
    """A GPU with memory in MiB; `memory_used` and `use` (percent) by any process. `slices` are UUIDs of MIG slices."""

    uuid: str
    name: str = "NVIDIA H200"
    memory: int = 143771
    memory_used: int = 4
    use: int = 0
    slices: tuple[str, ...] = ()


def gpus(count: int) -> list[Gpu]:
    """Return idle GPUs with different UUIDs."""
    return [Gpu(f"GPU-{str(number) * 8}-3b02-0be4-1c5c-f43f06c4a1c4") for number in range(count)]


def install(
    folder: Path, found: list[Gpu], driver: str = "580.82.07", broken: str = "", code: int = 18
) -> Path:
    """Write the program into a folder for PATH, and return the folder.

    A program with a failing driver prints `broken`, and exits with `code`.
    """
    machine = json.dumps(
        {"gpus": [asdict(gpu) for gpu in found], "driver": driver, "broken": broken, "code": code}
    )
    folder.mkdir(exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(f"#!{sys.executable} -IS\n" + _PROGRAM.format(machine=machine))
    program.chmod(0o755)
    return folder
