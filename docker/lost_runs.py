"""Mark the flow runs that the last worker of a pool left at work as crashed: `lost_runs.py POOL`, before the pool's one
worker starts. Prefect would show them as running for ever.
"""

from __future__ import annotations

import sys

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import StateType
from prefect.states import Crashed


def main(pool: str) -> None:
    types = FlowRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING, StateType.CANCELLING])
    with get_client(sync_client=True) as client:
        for run in client.read_flow_runs(
            flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=types)),
            work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
        ):
            client.set_flow_run_state(run.id, Crashed(message="its worker ended"), force=True)
            print(f"{run.name}: its worker ended; start it again, it goes on from what is done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
