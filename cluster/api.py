"""`from cluster import launch`: a job from Python, with the words of the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.logs import Event
    from cluster.model import Inventory, Record


@dataclass(frozen=True)
class Ended:
    """How a job ended: `outcome` is done, failed or stopped, `why` one line, `exit_code` as the command line's."""

    outcome: str
    exit_code: int
    why: str
    metric: Event | None


class Launched:
    """A job that runs. Losing this object does not stop it: `clusterctl attach NAME` finds it."""

    def __init__(self, record: Record, secrets: Mapping[str, str]) -> None:
        self._record = record
        self._secrets = secrets

    @property
    def name(self) -> str:
        """The job's name."""
        return self._record.plan.job_id

    @property
    def run_dir(self) -> str:
        """The folder that has, or will have, its results and logs."""
        return self._record.plan.run_dir

    def wait(self) -> Ended:
        """Follow the job to its end, over restarts, and bring its results here."""
        from cluster import commands, report, supervise
        from cluster.records import Records

        records = Records()
        watched, refused = supervise.run(self._record, records, commands.Quiet(), secrets=self._secrets)
        outcome, _ = commands.finish(watched, records)
        why = "; ".join(text for text in (report.cause(watched.view, watched.verdict), refused) if text)
        return Ended(outcome, records.load(self.name).exit_code, why, watched.view.done or watched.view.metric)

    def state(self) -> str:
        """One word: joining, running, done, failed or stopped."""
        from cluster import commands
        from cluster.records import Records

        return commands.look(Records().load(self.name))[0]

    def stop(self) -> None:
        """End it on every node; safe to repeat."""
        from cluster import commands
        from cluster.records import Records

        commands.stop(self.name, Records())


def launch(
    arguments: Sequence[str] = (),
    *,
    nodes: int | str = "",
    gpus: int = 1,
    backend: str = "auto",
    inventory: str | Inventory | None = None,
    secrets: Mapping[str, str] | None = None,
    **options: object,
) -> Launched:
    """Start a job on all of its nodes, or on none, and return.

    `arguments` are the trainer's (`["train", "--data", "coco.yaml"]`). `inventory` is a cluster.yaml or an Inventory;
    None takes ./cluster.yaml where there is one, else this machine. `options` are the fields of `config.Request`: name,
    device, image, command, env, mounts, timeout_s, spares, max_restarts and so on. Raises ClusterError.
    """

    from cluster import commands, config, discovery
    from cluster.model import Inventory
    from cluster.records import Records

    if not isinstance(inventory, Inventory):
        found = discovery.load(inventory or "", backend=backend)
        inventory = discovery.complete(found) if found else None
    names = tuple(secrets or {})
    request = config.Request(gpus=gpus, arguments=tuple(arguments), env_names=names, **options)  # type: ignore[arg-type]
    job, chosen, _ = commands.resolve(request, str(nodes), backend, inventory)
    record = commands.launch(job, chosen, Records(), numbered=not request.name, secrets=secrets)
    return Launched(record, dict(secrets or {}))
