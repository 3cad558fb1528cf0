"""The section `slurm` of cluster.yaml: options of sbatch by their long names."""

from typing import Annotated

from pydantic import AfterValidator

from cluster.spec import slurm
from cluster.spec.schema import Text

Section = Annotated[dict[str, Text], AfterValidator(slurm.checked)]
