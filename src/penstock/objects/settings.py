"""The address and the settings of an object store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit

from penstock.config import closest
from penstock.errors import ConfigError, PenstockError
from penstock.objects.keys import check_prefix
from penstock.units import DurationLike, convert_units, seconds_of

REMOTE_SCHEMES: Final = ("az", "gs", "s3")
SCHEMES: Final = ("az", "file", "gs", "memory", "s3")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """The address of a store, and the settings that an address cannot express.

    `options` are the settings of the backend (for S3: `access_key_id`, `secret_access_key`, `region`,
    `endpoint`, `allow_http`, ...). They override the environment and are masked in `repr`.
    """

    url: str
    options: Mapping[str, str] = field(default_factory=dict)
    request_timeout: DurationLike = 30.0
    """Limit of one request, from connecting to the last byte: enough for a large batch on a slow network."""
    retries: int = 5
    """The number of retries of a read or an unconditional write. Conditional writes are not retried, because
    their outcome may be unknown."""
    threads: int = 16
    """The number of concurrent requests."""

    request_timeout_s = seconds_of("request_timeout")

    def __post_init__(self) -> None:
        StoreAddress.parse(self.url)  # refuses a password, which `repr` would show
        convert_units(self)
        if not self.request_timeout_s > 0:
            raise ConfigError(f"request_timeout: expected more than zero, found {self.request_timeout!r}")
        if self.retries < 0:
            raise ConfigError(f"retries: expected 0 or more, found {self.retries}")
        if self.threads < 1:
            raise ConfigError(f"threads: expected 1 or more, found {self.threads}")

    def __repr__(self) -> str:
        masked = ", ".join(f"{name}=***" for name in sorted(self.options))
        return (
            f"StoreConfig(url={self.url!r}, options={{{masked}}}, request_timeout={self.request_timeout!r}, "
            f"retries={self.retries}, threads={self.threads})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """The parts of a store's URL: a bucket (or the name of a memory store) and a folder in it, or a path."""

    scheme: str
    bucket: str
    path: str

    @property
    def url(self) -> str:
        """The address in its normal form."""
        return f"{self.scheme}://{self.bucket}{'/' if self.bucket and self.path else ''}{self.path}"

    @classmethod
    def parse(cls, url: str) -> StoreAddress:
        """Parse a URL or a path. Raise `ConfigError` with the error and the expected form."""
        if "://" not in url:
            if not url:
                raise ConfigError("store: expected a url or a path, found nothing")
            return cls(scheme="file", bucket="", path=url)
        try:
            parts = urlsplit(url)
        except ValueError:
            raise ConfigError("store: expected a url such as s3://bucket/folder") from None
        _check_scheme(parts.scheme)
        if "@" in parts.netloc:
            raise ConfigError(f"store: {parts.scheme}:// urls take no user or password; pass them as options")
        if parts.query or parts.fragment:
            raise ConfigError(
                f"store: {parts.scheme}://{parts.netloc}{parts.path} must not have '?' or '#' in it; "
                "pass settings as StoreConfig(options={...})"
            )
        if parts.scheme == "file":
            return _file_address(parts.netloc, parts.path)
        if parts.scheme == "memory":
            return cls(scheme="memory", bucket=parts.netloc + parts.path.rstrip("/"), path="")
        return _bucket_address(parts.scheme, parts.netloc, parts.path)


def _check_scheme(scheme: str) -> None:
    if scheme in SCHEMES:
        return
    near = closest(scheme, SCHEMES)
    hint = f"; did you mean {near}://?" if near else ""
    known = ", ".join(f"{name}://" for name in SCHEMES)
    raise ConfigError(f"store: unknown scheme {scheme}://, expected one of {known} or a path{hint}")


def _file_address(host: str, path: str) -> StoreAddress:
    if host not in ("", "localhost"):
        raise ConfigError(f"store: file:// takes an absolute path; write file:///{host}{path}")
    if not path:
        raise ConfigError("store: file:// takes an absolute path, such as file:///var/penstock")
    return StoreAddress(scheme="file", bucket="", path=unquote(path))


def _bucket_address(scheme: str, bucket: str, path: str) -> StoreAddress:
    if not bucket:
        raise ConfigError(f"store: {scheme}:// needs a bucket, such as {scheme}://my-bucket/folder")
    try:
        return StoreAddress(scheme=scheme, bucket=bucket, path=check_prefix(path))
    except PenstockError as error:
        raise ConfigError(f"store: the folder in {scheme}://{bucket}{path} is not valid: {error}") from error
