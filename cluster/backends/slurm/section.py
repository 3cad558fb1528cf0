"""The section `slurm` of cluster.yaml: options of sbatch by their long names."""

from typing import Annotated

from pydantic import AfterValidator, Field

from cluster.backends.slurm import options
from cluster.spec.schema import Text

Section = Annotated[
    dict[str, Text],
    AfterValidator(options.checked),
    Field(description="Options of sbatch for every job, by their long names: `{partition: gpu, mem: 64G}`."),
]
