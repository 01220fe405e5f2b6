"""Several cores on one port: a process and a directory each, and no loss when one of them dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
from tests.collector_process import FILE, FarEnd, free_port

from penstock.collector.receiver_grpc import METHODS
from penstock.otlp.schema import Signal
from penstock.testing.otlp_kit import telemetry

METHOD = next(path for path, found in METHODS.items() if found is Signal.LOGS)


def ready(process: subprocess.Popen[bytes]) -> dict[str, int]:
    assert process.stdout is not None
    event = json.loads(process.stdout.readline())
    assert event["event"] == "ready"
    return {"core": event["core"], "pid": event["pid"]}


def test_two_cores_share_a_port_and_a_killed_one_is_restarted(tmp_path: Path) -> None:
    file = tmp_path / "collector.yaml"
    file.write_text(FILE + "cores: 2\n")
    port = free_port()
    with FarEnd() as far_end:
        variables = {"dir": tmp_path, "grpc_port": port, "http_port": free_port(), "far_port": far_end.port}
        command = [sys.executable, "-m", "penstock.cli", "collector", "run", str(file), "--json"]
        command += [part for name, value in variables.items() for part in ("--set", f"{name}={value}")]
        command += ["--set", "handling=pass_through"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            cores = [ready(process), ready(process)]
            assert {core["core"] for core in cores} == {0, 1}
            sent = 0
            for _ in range(24):
                # Each channel is a connection, and the system distributes them.
                options = [("grpc.use_local_subchannel_pool", 1)]
                with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
                    channel.unary_unary(METHOD)(
                        telemetry(Signal.LOGS, items=1, seed=sent), wait_for_ready=True
                    )
                    sent += 1
                if sent == 12:
                    time.sleep(1.1)  # a core that dies in its first second is not restarted
                    os.kill(cores[0]["pid"], signal.SIGKILL)
                    assert ready(process)["core"] == cores[0]["core"]
            process.terminate()
            assert process.wait(40) == 0
        # Concurrent requests arrive as one joined request that contains each of them unchanged.
        came = [data for _, data in far_end.requests]
        bodies = [telemetry(Signal.LOGS, items=1, seed=seed) for seed in range(sent)]
        assert all(any(body in data for data in came) for body in bodies)
    assert (tmp_path / "quiver" / "core_0").is_dir()
    assert (tmp_path / "quiver" / "core_1").is_dir()
