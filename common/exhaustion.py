"""Running out of descriptors or memory while connections are accepted or opened."""

from __future__ import annotations

import errno

# A listening socket stays readable after these errors: without a pause a loop would spin.
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
RETRY_SECONDS = 1.0  # until the next attempt to accept


def shortage(error: OSError) -> str:
    """Return the predicate of a sentence about a process that such an error has met, with the remedy."""
    remedy = {
        errno.EMFILE: "raise the limit of open files of its process (ulimit -Hn)",
        errno.ENFILE: "raise the limit of open files of its host (fs.file-max)",
    }.get(error.errno or 0, "let its host have more memory")
    return f"has too few resources now ({error.strerror}): {remedy}; the next request tries again"
