"""The words that tenants read in errors: the one place where paths of this machine are taken out of them."""

from __future__ import annotations

import re

#: What looks like an absolute path. Addresses of the service and of checkpoints stay; other URLs, such as a database's,
#: and quoted paths go as a whole.
_PATH = re.compile(
    r"(?P<kept>(?:tinker|logits|https?)://\S*|(?<![\w.])/api/v1(?:/\S*)?)"
    r"|[A-Za-z][\w+.-]*:/{2,}\S*"
    r"|(?P<quote>['\"`])~?/[^'\"`]*(?P=quote)"
    r"|(?<![\w/.~-])~?/[^\s'\"`,;:()\[\]{}<>|]+"
)
CHARS_MAX = 2000


def for_tenants(text: str) -> str:
    """Return the text of an error with "..." in place of absolute paths, cut to a bounded length."""
    return _PATH.sub(lambda found: found["kept"] or "...", text)[:CHARS_MAX]
