"""URLs (s3://, gs://, https://, hf://) -> the bytes behind them, read by ranges through fsspec. Ranges are cached on
this machine, and requested again where the store fails."""

from __future__ import annotations

import functools
import io
import os
import tempfile
import time
from pathlib import Path
from typing import Any

ATTEMPTS = 5
WAIT_S = 0.5
"""Before the second attempt; doubled before each further one."""
LONGEST_S = 60.0
"""Of one attempt."""
CACHE_GB = "ANS_MEDIA_CACHE_GB"
BUFFER = 8 << 20
"""Bytes that `opened` requests at a time."""
OPTIONS: dict[str, dict[str, Any]] = {
    # botocore's own attempts would multiply ours
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"total_max_attempts": 1}}}
}


def is_url(name: str) -> bool:
    return "://" in name


def read(url: str, start: int, length: int | None) -> bytes:
    """Return `length` bytes from byte `start` on; None: to the end. Raises OSError if the store gives none."""
    cache, key = _cache(), f"{url} {start} {length}"
    content: bytes | None = cache.get(key) if cache is not None else None
    if content is None:
        content = _requested(url, start, length)
        if cache is not None:
            cache.set(key, content)
    return content


def opened(url: str) -> io.BufferedReader:
    """Open a file to read it from its start to its end, or parts of it; nothing is cached."""
    return io.BufferedReader(_Ranges(url), BUFFER)


def matching(pattern: str) -> list[str]:
    """Return the URLs that fit, as `s3://bucket/set/*.tar`, in the order of their names."""
    import fsspec

    names = _patiently(pattern, "glob")
    return [fsspec.url_to_fs(pattern)[0].unstrip_protocol(name) for name in sorted(names)]


class _Ranges(io.RawIOBase):
    def __init__(self, url: str) -> None:
        self.url, self._place = url, 0
        self.size = int(_patiently(url, "info")["size"])

    def readable(self) -> bool:
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + (0, self._place, self.size)[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        length = max(0, min(len(buffer), self.size - self._place))
        buffer[:length] = _requested(self.url, self._place, length) if length else b""
        self._place += length
        return length


def _requested(url: str, start: int, length: int | None) -> bytes:
    content: bytes = _patiently(
        url, "cat_file", start=start or None, end=None if length is None else start + length
    )
    if length is not None and len(content) != length:
        raise OSError(
            f"its store gave {len(content)} bytes in place of {length} from byte {start} on: it is another file "
            "now, or its server gives no ranges"
        )
    return content


def _patiently(url: str, method: str, **options: Any) -> Any:
    """Call a method of the URL's file system. What is missing or forbidden, and a library that is not installed, is
    an error at once; any other failure once ATTEMPTS have failed."""
    import fsspec  # loads asyncio's loop and the store's library
    from fsspec.asyn import AsyncFileSystem, sync

    reason: Exception | None = None
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(WAIT_S * 2 ** (attempt - 1))
        try:
            # of this process and thread: fsspec's connections are shared by neither
            system, path = fsspec.url_to_fs(url, **OPTIONS.get(url.partition("://")[0], {}))
            if isinstance(system, AsyncFileSystem):
                return sync(system.loop, getattr(system, f"_{method}"), path, timeout=LONGEST_S, **options)
            return getattr(system, method)(path, **options)
        except (FileNotFoundError, PermissionError):
            raise
        except (ImportError, ValueError) as error:
            raise OSError(f"{error} (docs/your-data.md#pictures-behind-urls)") from error
        except Exception as error:  # noqa: BLE001  # each store's library has its own
            reason = error
    raise OSError(
        f"its store failed {ATTEMPTS} times, last with {type(reason).__name__}: {reason}"
    ) from reason


@functools.cache
def _cache() -> Any:
    """Return the machine's cache of ranges, which processes share; None where it may hold nothing. (fsspec's own
    caches know an age, but no size.)"""
    import diskcache

    limit = round(float(os.environ.get(CACHE_GB, "20")) * 1e9)
    if not limit:
        return None
    folder = Path(tempfile.gettempdir(), f"ans-media-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise OSError(f"{folder} belongs to somebody else; set TMPDIR to a folder of yours")
    return diskcache.Cache(str(folder), size_limit=limit)
