import tasks  # noqa: F401  at its import no process here asks a proxy for this machine's own servers
