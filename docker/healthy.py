"""Exit 0 if a service answers: `healthy.py URL [SECRET]`. SECRET names the file of /run/secrets with the password of
`ans`, for an address that looks into the service's database.
"""

from __future__ import annotations

import base64
import sys
import urllib.request
from pathlib import Path


def main(url: str, secret: str = "") -> None:
    request = urllib.request.Request(url)
    if secret:
        password = Path("/run/secrets", secret).read_text(encoding="utf-8").strip()
        account = base64.b64encode(f"ans:{password}".encode()).decode()
        request.add_header("Authorization", f"Basic {account}")
    with urllib.request.urlopen(
        request, timeout=20
    ):  # raises for a status of 400 and above, so the exit status is 1
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
