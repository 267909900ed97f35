"""What is shipped for containers and Kubernetes, held against the tools that know their formats; nothing is started."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import kubeflow_trainer_api.models as kubeflow
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCKER, KUBERNETES = ROOT / "docker", ROOT / "launch" / "kubernetes"
PLAIN, GPU = ("compose.yaml",), ("compose.yaml", "compose.gpu.yaml")
YAML = sorted(path.relative_to(ROOT) for path in (*DOCKER.glob("*.y*ml"), *KUBERNETES.iterdir()))
# The project's line length, and no "---" at the top; the rest are yamllint's own defaults.
YAMLLINT = (
    "{extends: default, rules: {line-length: {max: 128}, document-start: disable, comments: {min-spaces-from-content: 1},"
    " braces: {max-spaces-inside: 0}}}"
)


def tool(name: str, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A program of the `test` extra, with the variables given and no others that Compose would put into the files."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    command = [str(Path(sysconfig.get_path("scripts"), name)), *map(str, arguments)]
    return subprocess.run(
        command, env={**environment, **variables}, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )


def compose(files: tuple[str, ...], **variables: str) -> dict[str, Any]:
    """What Compose makes of the files, with every default filled in."""
    named = [word for file in files for word in ("--file", DOCKER / file)]
    done = tool("docker-compose", "--env-file", "/dev/null", *named, "config", "--format", "json", **variables)
    assert done.returncode == 0, done.stderr
    assert "level=warning" not in done.stderr, done.stderr
    return json.loads(done.stdout)


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    template = document["spec"]["template"]
    if document["kind"] == "TrainingRuntime":
        template = template["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    return template["spec"]


def seconds(text: str) -> int:
    minutes, _, rest = text.rpartition("m")
    return 60 * int(minutes or 0) + int(rest.removesuffix("s"))


# -- the image


def test_the_dockerfile_is_clean_for_hadolint() -> None:
    done = tool("hadolint", DOCKER / "Dockerfile")
    assert done.returncode == 0, done.stdout


def test_everything_that_the_dockerfile_copies_is_let_through_by_its_ignore_file() -> None:
    """The list begins with "all is ignored"; BuildKit reads it by this name, beside the Dockerfile."""
    lines = [
        line for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] not in ("", "#")
    ]
    assert lines[0] == "*"
    allowed = {line[1:] for line in lines if line.startswith("!")}
    copied = [
        line.split()[1:-1] for line in (DOCKER / "Dockerfile").read_text().splitlines() if line.startswith("COPY ")
    ]
    names = {name for names in copied for name in names if not names[0].startswith("--from")}
    assert names == allowed
    assert all((ROOT / name).exists() for name in names)


# -- Compose


@pytest.mark.parametrize("files", [PLAIN, GPU])
def test_compose_takes_the_files_without_a_variable_set(files: tuple[str, ...]) -> None:
    assert set(compose(files)["services"]) == {"store", "node0", "node1"}


def test_the_plain_cluster_is_closed_and_asks_for_nothing_special() -> None:
    """It runs on any CPU: no device, no capability, no port to the outside, no network with a way out."""
    found = compose(PLAIN)
    assert found["networks"]["cluster"]["internal"] is True
    for service in found["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert set(service["networks"]) == {"cluster"}
        assert not {"ports", "devices", "privileged", "network_mode", "deploy", "cap_add"} & set(service)


@pytest.mark.parametrize("files", [PLAIN, GPU])
def test_docker_waits_longer_than_torchrun_and_stops_by_the_exec_form(files: tuple[str, ...]) -> None:
    """pytorch/pytorch#119856: a checkpoint was cut short by SIGKILL; a shell as first process swallows SIGTERM."""
    for name in ("node0", "node1"):
        node = compose(files)["services"][name]
        (timeout,) = [word for word in node["command"] if word.startswith("--shutdown-timeout=")]
        assert seconds(node["stop_grace_period"]) > int(timeout.partition("=")[2])
        assert node["command"][:2] == ["shardmp", "launch"]
        assert int(node["shm_size"]) >= 2**30


def test_the_gpu_override_reserves_gpus_and_lets_memory_be_pinned() -> None:
    """basujindal/stable-diffusion#217: in the base file the reservation would make it useless on a machine without the
    toolkit. NVIDIA/nccl-tests#206: memlock."""
    found = compose(GPU, INFINIBAND_DEVICE="/dev/infiniband", NCCL_IB_HCA="mlx5")["services"]
    for name in ("node0", "node1"):
        (device,) = found[name]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", -1, ["gpu"])
        assert found[name]["ulimits"]["memlock"] == -1
        assert found[name]["devices"][0]["source"] == "/dev/infiniband"
        assert found[name]["environment"]["NCCL_IB_HCA"] == "mlx5"
        assert found[name]["environment"]["NCCL_SOCKET_IFNAME"] is None  # absent in the container unless it is set
        assert found[name]["network_mode"] == "host"
        assert "cuda" in found[name]["build"]["args"]["BASE_IMAGE"]


def test_the_example_of_variables_has_the_defaults_of_the_file() -> None:
    """Whoever copies it as it is changes nothing, and every variable of the file is in it."""
    lines = (DOCKER / ".env.example").read_text().splitlines()
    given = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert compose(PLAIN, **given) == compose(PLAIN)
    text = (DOCKER / "compose.yaml").read_text() + (DOCKER / "compose.gpu.yaml").read_text()
    used = {part.split(":-")[0].split("}")[0] for part in text.split("${")[1:]}
    commented = {line[2:].split("=")[0] for line in lines if line.startswith("# ") and "=" in line.split(" ")[1]}
    assert used <= given.keys() | commented


# -- Kubernetes


def test_the_jobs_resources_have_kubernetes_own_schema() -> None:
    """Strictly: a misspelt field is an error. What has no schema would be a warning, and is not accepted here."""
    done = tool("kubernetes-validate", "--strict", KUBERNETES / "job.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARN" not in done.stdout + done.stderr
    assert [document["kind"] for document in documents("job.yaml")] == ["Service", "PersistentVolumeClaim", "Job"]


@pytest.mark.parametrize("document", documents("trainjob.yaml"), ids=lambda document: document["kind"])
def test_the_trainjobs_resources_have_kubeflows_models(document: dict[str, Any]) -> None:
    """kubernetes-validate has no schema for custom resources. Kubeflow's own models drop what they do not know, so each
    field must come back as it was."""
    model = getattr(kubeflow, f"TrainerV1alpha1{document['kind']}")
    assert document["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert lost(document, model.from_dict(document).to_dict()) == []


def lost(given: Any, kept: Any, where: str = "") -> list[str]:
    """The paths of fields that are not in `kept`, or are there with another value."""
    if isinstance(given, dict) and isinstance(kept, dict):
        parts = [lost(value, kept.get(key), f"{where}.{key}") for key, value in given.items()]
        return [path for part in parts for path in part]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = enumerate(zip(given, kept, strict=True))
        return [path for index, (a, b) in pairs for path in lost(a, b, f"{where}[{index}]")]
    return [] if given == kept else [where]


def test_a_misspelt_field_of_a_trainjob_is_found() -> None:
    """What the test above stands on."""
    (runtime, job) = documents("trainjob.yaml")
    job["spec"]["trainer"]["numProcsPerNode"] = 8
    pod_of(runtime)["containers"][0]["volumeMount"] = []
    for document, path in ((runtime, "containers[0].volumeMount"), (job, "trainer.numProcsPerNode")):
        model = getattr(kubeflow, f"TrainerV1alpha1{document['kind']}")
        (found,) = lost(document, model.from_dict(document).to_dict())
        assert found.endswith(path)


def test_pods_have_the_time_to_save_the_shared_memory_and_the_volume() -> None:
    """pytorch/pytorch#119856 and NVIDIA/nccl#290 once more. The job finds its first pod by the service's name."""
    service, claim, job = documents("job.yaml")
    runtime, train_job = documents("trainjob.yaml")
    commands = (pod_of(job)["containers"][0]["args"], train_job["spec"]["trainer"]["args"])
    for document, command in zip((job, runtime), commands, strict=True):
        pod = pod_of(document)
        (timeout,) = [word for word in command if word.startswith("--shutdown-timeout=")]
        assert pod["terminationGracePeriodSeconds"] > int(timeout.partition("=")[2])
        mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        claimed = volumes[mounts["/checkpoints"]]["persistentVolumeClaim"]["claimName"]
        assert claimed == claim["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    name, domain = job["metadata"]["name"], pod_of(job)["subdomain"]
    assert domain == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert f"--rdzv-endpoint={name}-0.{domain}:29500" in commands[0]
    assert f"--nnodes={job['spec']['completions']}" in commands[0]
    assert job["spec"]["parallelism"] == job["spec"]["completions"]


@pytest.mark.parametrize("path", YAML, ids=str)
def test_yaml_is_clean_for_yamllint(path: Path) -> None:
    done = tool("yamllint", "--strict", "--config-data", YAMLLINT, path)
    assert done.returncode == 0, done.stdout
