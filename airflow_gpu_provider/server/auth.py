"""Who is calling: broker tokens for programs, lease secrets for holders.

A broker token is a JWT signed with the broker's key; it names a role and a subject and expires. A lease
secret is derived from the lease and its epoch, so the database keeps no secret and every replica can check
it. People do not come this way: the routes for them use Airflow's own login, see `ui_api`.
"""

from __future__ import annotations

import hmac
import time
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import jwt

from airflow_gpu_provider.exceptions import IdentityRefused, InvalidRequest

_ALGORITHM = "HS256"
_AUDIENCE = "airflow-gpu-broker"
_RECHECK_S = 5  # a token is used for at most this long after it expired
_LONGEST_SUBJECT = 250  # it is stored with what it asks


class Role(str, Enum):
    """What a broker token allows."""

    TASK = "task"
    """Tasks and triggers: claims and leases, and looking at the fleet."""
    AGENT = "agent"
    """Agents: reports of nodes."""
    ADMIN = "admin"
    """People at the command line: everything."""

    @classmethod
    def parse(cls, name: str) -> Role:
        """Return the role called `name`; raise InvalidRequest that lists the roles."""
        try:
            return cls(name)
        except ValueError:
            known = ", ".join(role.value for role in cls)
            raise InvalidRequest(
                f"Unknown role {name!r}; the roles are {known}.", reason="unknown_role"
            ) from None


@dataclass(frozen=True, slots=True)
class Identity:
    """A verified caller."""

    role: Role
    subject: str
    node: str | None = None


def mint_token(secret: str, *, role: str, subject: str, ttl_s: float, node: str | None = None) -> str:
    """Return a signed broker token; an agent's may be bound to the `node` it speaks for."""
    if ttl_s <= 0:
        raise InvalidRequest(f"A token must live for some time, asked {ttl_s:g} s; give ttl > 0.")
    if len(subject) > _LONGEST_SUBJECT:
        raise InvalidRequest(
            f"The subject of a token has at most {_LONGEST_SUBJECT} characters, asked {len(subject)}; give "
            "a shorter one."
        )
    now = int(time.time())
    claims = {
        "aud": _AUDIENCE,
        "iat": now,
        "exp": now + int(ttl_s),
        "role": Role.parse(role).value,
        "sub": subject,
    }
    if node is not None:
        claims["node"] = node
    return jwt.encode(claims, secret, algorithm=_ALGORITHM)


def verify_token(secret: str, token: str) -> Identity:
    """Return who carries `token`; raise IdentityRefused that says what is wrong with it."""
    try:
        claims = jwt.decode(
            token,
            secret,
            algorithms=[_ALGORITHM],
            audience=_AUDIENCE,
            options={"require": ["exp", "sub", "role", "aud"]},
        )
        return Identity(Role(claims["role"]), _subject(claims["sub"]), claims.get("node"))
    except jwt.ExpiredSignatureError:
        raise IdentityRefused(
            "The broker token has expired; mint another with `airflow gpu token`.", reason="token_expired"
        ) from None
    except (jwt.InvalidTokenError, ValueError) as error:
        raise IdentityRefused(
            f"The broker token is not valid ({error}); mint one with `airflow gpu token` where the broker "
            "runs, with the same [gpu] token_secret.",
            reason="token_invalid",
        ) from None


def _subject(subject: str) -> str:
    """Return who carries a token; raise ValueError for one that the tables have no room for."""
    if len(subject) > _LONGEST_SUBJECT or "\0" in subject:
        raise ValueError(f"its subject is longer than {_LONGEST_SUBJECT} characters or contains NUL")
    return subject


def lease_secret(key: str, lease_id: str, epoch: int) -> str:
    """Return the secret that renew and release of this epoch of a lease must present."""
    return hmac.digest(key.encode(), f"lease:{lease_id}:{epoch}".encode(), "sha256").hex()


def echo_key(key: str) -> str:
    """Return the key of the questions by which agents measure the latency to one another."""
    return hmac.digest(key.encode(), b"echo", "sha256").hex()


def check_lease_secret(key: str, lease_id: str, epoch: int, presented: str) -> None:
    """Raise IdentityRefused unless `presented` is the secret of this epoch of the lease."""
    if not hmac.compare_digest(lease_secret(key, lease_id, epoch).encode(), presented.encode()):
        raise IdentityRefused(
            f"The secret presented for lease {lease_id} is not that of epoch {epoch}.", reason="lease_secret"
        )


def identify(key: str, authorization: str) -> Identity:
    """Return who sent this Authorization header; raise IdentityRefused that says what is wrong with it."""
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise IdentityRefused("A broker token is required.", reason="no_token")
    return _verified(key, token.strip(), int(time.time()) // _RECHECK_S)


@lru_cache(maxsize=4096)
def _verified(key: str, token: str, _period: int) -> Identity:
    """Verify a token; a caller's thousands of calls with the same one are checked once in a while."""
    return verify_token(key, token)
