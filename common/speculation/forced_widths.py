"""The numbers of forced tokens per request that wide steps verify, widest first.

Grammars force these tokens. A key of a JSON object and the punctuation around it are 4 to 25 tokens.
"""

from __future__ import annotations

from typing import Final

# on nodes without a draft model
PLAIN_WIDTHS: Final = (7, 3)
# on nodes with one
DRAFTED_WIDTHS: Final = (15, 7)
