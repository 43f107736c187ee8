"""Reading a file of JSON lines while another process writes it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def rows(path: Path, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """The objects with a `step`, in order; half a line, a damaged one and a missing file are passed over.

    Args:
        last_bytes: only lines that begin in so many bytes at the end of the file.
    """
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        size = os.fstat(file.fileno()).st_size
        if last_bytes is not None and size > last_bytes:
            file.seek(size - last_bytes)
            file.readline()  # begun before
        for line in file:
            try:
                row = json.loads(line)
                int(row["step"])
            except (ValueError, KeyError, TypeError):
                continue
            yield row
