"""Real object-store servers for tests: SeaweedFS and moto for S3, Azurite for Azure."""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from werkzeug.serving import make_server

ACCESS_KEY = "penstock-test"
SECRET_KEY = "penstock-test-secret"
AZURE_ACCOUNT = "devstoreaccount1"
# Azurite's published, well-known key: it protects nothing.
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
START_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server:
    """Where an S3 server listens and how to log in."""

    endpoint: str
    access_key: str = ACCESS_KEY
    secret_key: str = field(default=SECRET_KEY, repr=False)

    def options(self) -> dict[str, str]:
        return {
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
            "region": "us-east-1",
            "endpoint": self.endpoint,
            "allow_http": "true",
        }

    def make_bucket(self, name: str) -> None:
        import boto3
        from botocore.config import Config

        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
            config=Config(retries={"max_attempts": 1}),
        )
        client.create_bucket(Bucket=name)
        client.close()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on right now, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _weed() -> str:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    assert found, "the weed program is missing: install the dev extra"
    return found


def _wait_for(process: subprocess.Popen[bytes], log: Path, url: str) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended at once:\n{log.read_text()[-3000:]}"
        try:
            urllib.request.urlopen(url, timeout=1).close()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code < 500:
                return
        except OSError:
            pass
        else:
            return
        time.sleep(0.05)
    raise AssertionError(f"the server did not answer at {url}:\n{log.read_text()[-3000:]}")


@contextlib.contextmanager
def _running(command: Sequence[str], directory: Path, url: str, env: Mapping[str, str]) -> Iterator[None]:
    log = directory / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=directory, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **env}
        )
    try:
        _wait_for(process, log, url)
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def seaweedfs(directory: Path) -> Iterator[S3Server]:
    """A SeaweedFS server with its data below `directory`, ended with the context."""
    directory.mkdir(parents=True, exist_ok=True)
    master, master_rpc, volume, volume_rpc, filer, filer_rpc, s3, s3_rpc = free_ports(8)
    config = directory / "s3.json"
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    reader = {
        "name": "reader",
        "credentials": [{"accessKey": "reader", "secretKey": SECRET_KEY}],
        "actions": ["Read", "List"],
    }
    config.write_text(json.dumps({"identities": [identity, reader]}))
    command = [
        _weed(), "server", "-s3", "-filer", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        f"-master.port={master}", f"-master.port.grpc={master_rpc}", "-master.volumeSizeLimitMB=64",
        f"-volume.port={volume}", f"-volume.port.grpc={volume_rpc}", "-volume.max=100",
        f"-filer.port={filer}", f"-filer.port.grpc={filer_rpc}",
        f"-s3.port={s3}", f"-s3.port.grpc={s3_rpc}", "-s3.port.iceberg=0", "-s3.port.lance=0",
        "-s3.autoCreateBucket=false", f"-s3.config={config}",
    ]  # fmt: skip
    server = S3Server(endpoint=f"http://127.0.0.1:{s3}")
    with _running(command, directory, f"{server.endpoint}/", {"WEED_LEVELDB2_DIR": str(directory / "filer")}):
        _until_writable(server)
        yield server


def _until_writable(server: S3Server) -> None:
    """The S3 door opens before the volumes behind it do."""
    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        try:
            server.make_bucket("ready")
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


@contextlib.contextmanager
def moto() -> Iterator[S3Server]:
    """Moto in this process. One thread, so that its conditional writes are atomic."""
    from moto.server import DomainDispatcherApplication, create_backend_app

    app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, app, threaded=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield S3Server(endpoint=f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def azurite(directory: Path) -> Iterator[str]:
    """The blob endpoint of an Azurite server; PENSTOCK_AZURITE is the path of `azurite-blob`."""
    directory.mkdir(parents=True, exist_ok=True)
    program = os.environ["PENSTOCK_AZURITE"]
    (port,) = free_ports(1)
    command = [
        program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence",
        "--skipApiVersionCheck", "--silent", "--disableTelemetry",
    ]  # fmt: skip
    with _running(command, directory, f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}", {}):
        yield f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"


def azure_options(endpoint: str) -> dict[str, str]:
    """How to log in to Azurite."""
    return {
        "account_name": AZURE_ACCOUNT,
        "account_key": AZURE_KEY,
        "endpoint": endpoint,
        "allow_http": "true",
    }


def make_azure_container(endpoint: str, name: str) -> None:
    """Create a container by a request signed with the shared key."""
    now = email.utils.formatdate(usegmt=True)
    headers = {"x-ms-date": now, "x-ms-version": "2021-08-06"}
    signed = "\n".join(f"{header}:{value}" for header, value in sorted(headers.items()))
    resource = f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{name}\nrestype:container"
    text = f"PUT\n\n\n\n\n\n\n\n\n\n\n\n{signed}\n{resource}"
    digest = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"
    request = urllib.request.Request(f"{endpoint}/{name}?restype=container", method="PUT", headers=headers)
    urllib.request.urlopen(request, timeout=10).close()
