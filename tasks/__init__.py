"""What dvc.yaml calls: one module per stage, each wrapping one function of ans_core.stages. No Prefect and no
DVC in here."""

import importlib.util
import os
import sys

if importlib.util.find_spec("torch") is None:
    sys.exit(
        f"ans: {sys.executable} lacks the project's packages: `source .venv/bin/activate` first (`make "
        "setup` makes .venv)"
    )

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def bypass_proxy() -> None:
    """Let this process and its children reach this machine's own servers (Prefect, MLflow, a judge, the
    demo's page) without the proxy that HTTP_PROXY names."""
    names = {name.lower() for name, value in os.environ.items() if value}
    # without one, macOS would take the variable for all that there is to know
    if names & {"http_proxy", "https_proxy", "all_proxy"}:
        excepted = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
        hosts = [host.strip() for host in excepted.split(",") if host.strip()]
        excepted = ",".join(hosts + [host for host in LOOPBACK if host not in hosts])
        # libraries differ in which one they read first
        os.environ |= {"no_proxy": excepted, "NO_PROXY": excepted}


bypass_proxy()
