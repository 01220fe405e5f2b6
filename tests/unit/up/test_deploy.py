"""The deployment files, as far as they can be checked without a container engine or a cluster."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from tests.process.cli_runner import penstock

from penstock.cli.up import find_file
from penstock.spark.pipeline.spec import load_spec
from penstock.up import prepare
from penstock.up.settings import UpSettings

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
HOW_TO = (ROOT / "docs" / "how-to" / "deploy.md").read_text()
ENTRYPOINT = (DEPLOY / "container" / "entrypoint.sh").read_text()
SECRETS = {
    name: value
    for document in yaml.safe_load_all((KUBERNETES / "secrets.example.yaml").read_text())
    for name, value in document["stringData"].items()
}
Object = dict[str, dict[str, object]]


def objects() -> list[Object]:
    listed = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    return [found for name in listed for found in yaml.safe_load_all((KUBERNETES / name).read_text())]


def of_kind(kind: str) -> dict[str, Object]:
    return {str(one["metadata"]["name"]): one for one in objects() if str(one["kind"]) == kind}


def pod(name: str) -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = of_kind("StatefulSet")[name]["spec"]["template"]["spec"]  # type: ignore[index]
    return found


def container(name: str) -> dict[str, list[dict[str, object]]]:
    (only,) = pod(name)["containers"]
    return only  # type: ignore[return-value]


SETS = {"penstock": "machine.up.yaml", "penstock-driver": "driver.up.yaml"}


def settings_of(file: str) -> UpSettings:
    prepared, faults = prepare(find_file(KUBERNETES / file, [], None, SECRETS))
    assert faults == []
    assert prepared is not None
    return prepared.plan.settings


@pytest.mark.parametrize("name", SETS)
def test_the_up_files_for_kubernetes_have_no_fault(name: str) -> None:
    settings = settings_of(SETS[name])
    own = pod(name)
    assert int(str(own["terminationGracePeriodSeconds"])) > 4 * settings.stop_timeout_s
    mounts = {str(mount["mountPath"]) for mount in container(name)["volumeMounts"]}
    assert settings.data_dir in mounts
    assert {"/etc/penstock", "/tmp"} <= mounts


@pytest.mark.parametrize("name", SETS)
def test_services_reach_the_ports_of_their_pods_and_probes_answer(name: str) -> None:
    service = of_kind("Service")[name]["spec"]
    labels = of_kind("StatefulSet")[name]["spec"]["template"]["metadata"]["labels"]  # type: ignore[index]
    assert service["selector"] == labels == of_kind("StatefulSet")[name]["spec"]["selector"]["matchLabels"]  # type: ignore[index]
    ports = {str(port["name"]): port["containerPort"] for port in container(name)["ports"]}
    for port in service["ports"]:  # type: ignore[attr-defined]
        assert ports[port["targetPort"]] == port["port"]
    settings = settings_of(SETS[name])
    for probe in ("livenessProbe", "readinessProbe"):
        asked = container(name)[probe]["httpGet"]  # type: ignore[call-overload]
        assert ports[asked["port"]] == settings.console.port


def test_the_ports_of_the_machine_are_those_of_its_parts() -> None:
    prepared, _ = prepare(find_file(KUBERNETES / "machine.up.yaml", [], None, SECRETS))
    assert prepared is not None
    wanted = {
        port for part in prepared.plan.parts for host, port in part.ports.values() if host != "127.0.0.1"
    }
    assert {port["containerPort"] for port in container("penstock")["ports"]} == wanted | {4600}


def test_without_secrets_the_machine_refuses_to_listen() -> None:
    _, faults = prepare(find_file(KUBERNETES / "machine.up.yaml", [], None, {}))
    assert len(faults) == 4
    assert all("there are no keys" in fault for fault in faults)


def test_the_driver_and_its_pipeline_fit_the_manifests() -> None:
    (pipeline,) = settings_of("driver.up.yaml").pipelines
    assert Path(pipeline.file).name == "events.yaml"
    conf = pipeline.conf
    service, own = of_kind("Service")["penstock-driver"]["spec"], "penstock-driver"
    assert conf["spark.driver.host"].startswith(f"{conf['spark.kubernetes.driver.pod.name']}.{own}.")
    ports = {port["name"]: str(port["port"]) for port in service["ports"]}  # type: ignore[attr-defined]
    assert conf["spark.driver.port"] == ports["driver"]
    assert conf["spark.driver.blockManager.port"] == ports["blocks"]
    for key, value in conf.items():
        if "secretKeyRef" in key:
            assert value == f"penstock-store:{key.rpartition('.')[2]}"
            assert key.rpartition(".")[2] in SECRETS
    spec = load_spec(KUBERNETES / "events.yaml", environ={})
    assert spec.checkpoint_path.startswith("/data/")
    queue = settings_of("machine.up.yaml").queues["events"]
    assert spec.source.buffer.store == queue.store
    image = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["images"][0]
    assert conf["spark.kubernetes.container.image"] == f"{image['newName']}:{image['newTag']}"


def test_the_driver_may_make_and_remove_executors() -> None:
    account = str(pod("penstock-driver")["serviceAccountName"])
    assert account in of_kind("ServiceAccount")
    (binding,) = of_kind("RoleBinding").values()
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    (rule,) = of_kind("Role")[str(binding["roleRef"]["name"])]["rules"]
    assert {"pods", "configmaps"} <= set(rule["resources"])  # type: ignore[index]
    assert {"create", "delete", "watch"} <= set(rule["verbs"])  # type: ignore[index]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_renders_the_manifests() -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", KUBERNETES], capture_output=True, timeout=60, check=False, text=True
    )
    assert done.returncode == 0, done.stderr
    rendered = list(yaml.safe_load_all(done.stdout))
    assert {one["metadata"].get("namespace", "penstock") for one in rendered} == {"penstock"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "penstock.service").read_text()
    unit = tmp_path / "penstock.service"
    unit.write_text(text.replace("/opt/penstock/bin/penstock", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", unit],
        capture_output=True,
        timeout=60,
        check=False,
        text=True,
        env=os.environ | {"SYSTEMD_LOG_LEVEL": "warning"},
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_allows_enough_time_for_a_stop() -> None:
    text = (DEPLOY / "systemd" / "penstock.service").read_text()
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert int(seconds) > 4 * UpSettings().stop_timeout_s
    assert "KillMode=mixed" in text


def test_the_unit_runs_the_files_of_init_with_all_data_in_its_state_directory(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "penstock.service").read_text()
    (file, data_dir) = re.findall(r"^ExecStart=\S+ up (\S+) --data-dir (\S+)$", text, re.MULTILINE)[0]
    assert (file, data_dir) == ("/etc/penstock/penstock.yaml", "/var/lib/penstock")
    assert "StateDirectory=penstock\n" in text
    penstock("init", tmp_path)
    prepared, faults = prepare(find_file(tmp_path / "penstock.yaml", [], data_dir, {}))
    assert prepared is not None
    assert (faults, prepared.faults) == ([], {})
    assert {queue.store for queue in prepared.plan.map.queues} == {f"{data_dir}/queues"}
    spec = load_spec(tmp_path / "events.yaml", prepared.plan.part("pipeline-events").environment)
    places = [spec.checkpoint_path, spec.ledger_store, *(sink.place for sink in spec.outputs.values())]
    assert all(place.startswith(f"{data_dir}/") for place in places)
    assert "penstock init /etc/penstock" in HOW_TO


def test_the_settings_to_change_for_kubernetes_are_marked() -> None:
    note = (KUBERNETES / "kustomization.yaml").read_text().partition("apiVersion")[0]
    steps = HOW_TO.partition("## Kubernetes")[2]
    texts = {file.name: file.read_text() for file in KUBERNETES.glob("*.yaml")}
    buckets = {name for name, text in texts.items() if "s3://change-me" in text}
    assert buckets == {"machine.up.yaml", "events.yaml"}
    images = {name for name, text in texts.items() if "registry.example.org/penstock" in text}
    assert images == {"kustomization.yaml", "driver.up.yaml"}
    for name in buckets | images | {"secrets.example.yaml"}:
        assert f"`{name}`" in steps
        assert name in note or name == "kustomization.yaml"
    assert "secrets.example.yaml" not in yaml.safe_load(texts["kustomization.yaml"])["resources"]


def test_the_image_copies_what_exists_and_installs_extras_that_do() -> None:
    text = (DEPLOY / "container" / "Containerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        for name in line.split():
            assert (ROOT / name).exists(), name
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = re.findall(r"'\.\[(.*)\]'", text)
    assert set(wanted.split(",")) <= set(extras)
    assert os.access(DEPLOY / "container" / "entrypoint.sh", os.X_OK)


def test_the_entrypoint_accepts_the_arguments_of_sparks_kubernetes_module() -> None:
    import pyspark

    (jar,) = (Path(pyspark.__file__).parent / "jars").glob("spark-kubernetes_*.jar")
    with zipfile.ZipFile(jar) as archive:
        names = [
            name
            for name in archive.namelist()
            if re.search(r"/(Constants|KubernetesExecutorBackend)\$", name)
        ]
        known = b"\n".join(archive.read(name) for name in names).decode("latin-1")
        assert "org/apache/spark/scheduler/cluster/k8s/KubernetesExecutorBackend.class" in archive.namelist()
    variables = set(re.findall(r"\bSPARK_(?:EXECUTOR|DRIVER|APPLICATION|RESOURCE|JAVA_OPT)_\w*", ENTRYPOINT))
    assert len(variables) > 8
    for variable in variables:
        assert re.sub(r"\d+$", "", variable) in known, variable
    for flag in re.findall(r"^    (--[A-Za-z-]+) ", ENTRYPOINT, re.MULTILINE):
        assert flag in known, flag


def test_the_entrypoint_runs_penstock() -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", DEPLOY / "container" / "entrypoint.sh", "--version"],
        capture_output=True,
        timeout=60,
        check=True,
        text=True,
        env=os.environ | {"PATH": path},
    )
    assert done.stdout.startswith("penstock ")
