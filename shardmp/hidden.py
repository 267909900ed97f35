"""What looks like a secret is not shown.

Owns:      the one rule: which names and which values look like a secret.
Takes:     a variable's name and value, or any text.
Gives:     the text without the secret.
Invariant: the rule errs to the side of hiding: a report goes into public issues.
"""

from __future__ import annotations

import re

HIDDEN = "(set, not shown)"

# A name is a secret's if one of its words is one of these (MLFLOW_PW), or if it contains one of those (MYPASSWORD).
_WORDS = frozenset(("KEY", "KEYS", "PAT", "PW", "PWD", "CRED", "CREDS", "SIG", "SID", "PIN", "OTP", "NONCE", "BEARER"))
_PARTS = re.compile(
    r"TOKEN|SECRET|(?<!BY)PASS|CREDENTIAL|PRIVATE|COOKIE|JWT|API_?KEY|ACCESS_?KEY|AUTH|SIGNATURE|SESSION_?(ID|KEY)"
)

# In values: who logs in, in an address; a header; and the forms in which services write their tokens.
_ADDRESS = re.compile(r"(://)[^\s,;\"'<>]*@")
_LOGIN = re.compile(r"(?<![\w/.-])[\w.+%-]+:[^\s@/,;\"']+@(?=[\w\[])")
_HEADER = re.compile(r"\b(Bearer|Basic|Digest)\s+(?!\(set)[^\s,;\"']+", re.IGNORECASE)
_TOKENS = re.compile(
    r"\beyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?|\b(?:gh[oprsu]|github_pat|hf|sk|pk|rk|glpat|xox[a-z]|npm|pypi|dckr_pat)[-_][\w-]{16,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{12,}|-----BEGIN[^-]+PRIVATE KEY-----.*",
    re.DOTALL,
)
# A name and what leads to its value (name=value, "name": "value"; --name value), and the value.
_NAME = re.compile(r"""([A-Za-z][\w.-]*)["']?\s*[=:](?!//)\s*|(?<!\S)-{1,2}([A-Za-z][\w-]*)\s+""")
_VALUE = re.compile(r"""(?:Bearer|Basic|Digest)\s+[^\s,;"']+|"[^"]*"|'[^']*'|[^\s&;,"']+""", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether a variable, an option or a parameter of this name holds a secret, by its name."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper()  # apiKey
    return bool(_PARTS.search(plain)) or not _WORDS.isdisjoint(re.split(r"[^A-Z0-9]+", plain))


def shown(name: str, value: str) -> str:
    """A variable's value as a report may show it."""
    return HIDDEN if value and is_secret(name) else without_secrets(value)


def without_secrets(text: str) -> str:
    """Text without the log-ins of addresses, the values of `name=value` whose name is a secret's, and services' tokens."""
    text = _ADDRESS.sub(rf"\1{HIDDEN}@", text)
    text = _LOGIN.sub(f"{HIDDEN}@", text)
    text = _TOKENS.sub(HIDDEN, text)
    return _HEADER.sub(rf"\1 {HIDDEN}", _without_values(text))


def _without_values(text: str) -> str:
    parts, done = [], 0
    for found in _NAME.finditer(text):
        if found.start() >= done and is_secret(found[1] or found[2]):
            value = _VALUE.match(text, found.end())
            if value and not text.startswith(HIDDEN, value.start()):
                parts += [text[done : value.start()], HIDDEN]
                done = value.end()
    return "".join(parts) + text[done:]
