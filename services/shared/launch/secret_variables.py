"""Which variables of an environment hold secrets: ranks, and what they start, never get them."""

from __future__ import annotations

import re

# Where our own secrets are; the addresses hold passwords, and ranks connect to nothing anyway.
_OURS = frozenset({"STILLHOUSE_DATABASE_URL", "STILLHOUSE_BROKER_URL", "STILLHOUSE_API_KEYS_FILE"})
# Words of a name, between underscores: HF_TOKEN, AWS_SECRET_ACCESS_KEY, PGPASSWORD, but not
# TOKENIZERS_PARALLELISM.
_WORD = re.compile(
    r"(PASSWORD|PASSWD|PASSPHRASE|SECRET|TOKEN|CREDENTIAL|APIKEY)S?$|^(KEY|AUTH|PAT)$"
)
_PASSWORD_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s]+@")


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable holds a secret, by its name, or by a URL with a password."""
    if name in _OURS or any(_WORD.search(word) for word in name.upper().split("_")):
        return True
    return _PASSWORD_IN_URL.search(value) is not None
