"""Running out of descriptors or memory while connections are accepted."""

from __future__ import annotations

import errno

# A listening socket stays readable after these errors: without a pause a loop would spin.
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
RETRY_SECONDS = 1.0  # until the next attempt to accept
