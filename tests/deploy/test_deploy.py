"""What lies in deploy/ can be parsed, names what exists, and configures workers without an error."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any  # Parsed YAML has no types.

import msgspec
import pytest
import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.manifest_schemas import schema_errors
from tidekv import CachePeerOptions
from tidekv.engine.cli.main import app
from tidekv.engine.config import gather
from tidekv.engine.decode.status_server import HandOverRequest, StoreAllRequest
from tidekv.engine.integrations.sglang.handover.settings import BACKEND, VARIABLE, read_settings
from tidekv.engine.integrations.vllm.handover.settings import HandoverSettings
from tidekv.transports.control.addresses import Dials
from tools import image_requirements

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
COMMANDS = set(typer.main.get_command(app).commands)


def manifests() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def pods() -> list[tuple[str, dict[str, Any]]]:
    """The pod templates by kind of what owns them."""
    return [(each["kind"], each["spec"]["template"]) for each in manifests() if each["kind"] in ("Deployment", "Job")]


def test_the_manifests_are_a_pair_with_a_service_a_secret_and_a_wall() -> None:
    kinds = [each["kind"] for each in manifests()]
    assert kinds == ["ConfigMap", "Service", "Deployment", "Job", "NetworkPolicy"]
    sides = {}
    for kind, template in pods():
        spec = template["spec"]
        (container,) = spec["containers"]
        sides[container["args"][0]] = kind
        assert container["args"][0] in COMMANDS
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}
        assert spec["enableServiceLinks"] is False
        assert template["metadata"]["labels"]["app"] == "tidekv"
    assert sides == {"prefill": "Deployment", "decode": "Job"}


def test_a_container_has_no_more_rights_than_a_worker_needs() -> None:
    image = (DEPLOY / "Dockerfile").read_text()
    for _, template in pods():
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert f"--uid {context['runAsUser']} " in image
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
        (secret,) = [volume["secret"] for volume in spec["volumes"] if "secret" in volume]
        assert secret["defaultMode"] == 0o400


def test_workers_reach_workers_and_names_of_one_namespace_only() -> None:
    (policy,) = [each["spec"] for each in manifests() if each["kind"] == "NetworkPolicy"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    peers = [peer for rule in policy["ingress"] for peer in rule["from"]]
    peers += [peer for rule in policy["egress"] for peer in rule["to"]]
    for peer in peers:
        # A label of a pod alone would be that of a pod in the same namespace, whichever one that is.
        assert peer["namespaceSelector"]["matchLabels"].keys() == {"kubernetes.io/metadata.name"}
        assert peer["podSelector"]["matchLabels"]
    assert {port["port"] for rule in policy["egress"] for port in rule.get("ports", ())} == {53}


def test_the_port_that_is_probed_is_the_one_that_is_listened_at() -> None:
    (prefill,) = [template for kind, template in pods() if kind == "Deployment"]
    (container,) = prefill["spec"]["containers"]
    (port,) = container["ports"]
    assert f":{port['containerPort']:04X} " in container["readinessProbe"]["exec"]["command"][2]


@pytest.mark.parametrize("file", sorted(path.name for path in DEPLOY.glob("*.yaml")))
def test_manifests_are_valid_by_the_published_schemas(file: str) -> None:
    yaml = pytest.importorskip("yaml")
    documents = [one for one in yaml.safe_load_all((DEPLOY / file).read_text()) if one]
    assert documents
    assert [error for one in documents for error in schema_errors(one)] == []


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("spec.template.spec.containers.0.readynessProbe", {}, "readynessProbe is no field"),
        ("spec.template.spec.terminationGracePeriodSeconds", "120", "'120' is no integer"),
        ("spec.template.spec.enableServiceLinks", 1, "1 is no boolean"),
        ("spec.template.spec.containers.0.ports.0.containerPort", True, "True is no integer"),
        ("spec.template.spec.containers.0", {"image": "x"}, "name is missing"),
        ("apiVersion", "apps/v1beta1", "no kind that is known"),
    ],
)
def test_an_error_in_a_manifest_is_found(field: str, value: object, error: str) -> None:
    yaml = pytest.importorskip("yaml")
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes-vllm.yaml").read_text()))
    (broken, _) = [one for one in documents if one["kind"] == "StatefulSet"]
    *path, last = field.split(".")
    place: Any = broken
    for part in path:
        place = place[int(part) if part.isdecimal() else part]
    place[int(last) if last.isdecimal() else last] = value
    (found,) = schema_errors(broken)
    assert error in found


def test_bounds_of_custom_resources_are_checked() -> None:
    yaml = pytest.importorskip("yaml")
    pool = list(yaml.safe_load_all((DEPLOY / "kubernetes-vllm.yaml").read_text()))[-1]
    assert pool["kind"] == "InferencePool"
    pool["spec"]["targetPorts"][0]["number"] = 70_000
    pool["spec"]["endpointPickerRef"]["failureMode"] = "Sometimes"
    assert [error.partition(": ")[0] for error in schema_errors(pool)] == [
        "InferencePool.spec.targetPorts[0].number",
        "InferencePool.spec.endpointPickerRef.failureMode",
    ]


def servers(engine: str) -> dict[str, dict[str, Any]]:
    """The pod templates of an engine's servers by their role."""
    yaml = pytest.importorskip("yaml")
    documents = list(yaml.safe_load_all((DEPLOY / f"kubernetes-{engine}.yaml").read_text()))
    found = {one["metadata"]["name"]: one["spec"]["template"] for one in documents if one["kind"] == "StatefulSet"}
    return {name.removeprefix(f"{engine}-"): template for name, template in found.items()}


def value_of(container: Mapping[str, Any], option: str) -> str:
    """The value behind an option of a container, with the pod's address filled in."""
    arguments = container["args"]
    return str(arguments[arguments.index(option) + 1]).replace("$(POD_IP)", "10.1.2.3")


def paths_are_mounted(container: Mapping[str, Any], secret: str | None, uri: str) -> bool:
    """Whether what the settings name lies in a volume."""
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    paths = [secret, *([uri.removeprefix("file:")] if uri else [])]
    return all(path and any(path.startswith(mount) for mount in mounts) for path in paths)


@pytest.mark.parametrize(("name", "role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_servers_of_vllm_have_settings_that_the_connector_takes(name: str, role: str) -> None:
    (container,) = servers("vllm")[name]["spec"]["containers"]
    transfer = json.loads(value_of(container, "--kv-transfer-config"))
    assert transfer["kv_role"] == role
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert importlib.util.find_spec(transfer["kv_connector_module_path"]) is not None
    handover = msgspec.convert(transfer["kv_connector_extra_config"]["handover"], HandoverSettings)
    assert bool(handover.listen) is (role == "kv_producer")
    if handover.dials:
        assert Dials.parse(handover.dials).allows("10.1.2.3:7000")
    assert paths_are_mounted(container, handover.secret_file, handover.uri)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_servers_of_sglang_have_settings_that_the_backend_takes(name: str) -> None:
    (container,) = servers("sglang")[name]["spec"]["containers"]
    variables = {each["name"]: each.get("value", "10.1.2.3") for each in container["env"]}
    text = re.sub(r"\$\((\w+)\)", lambda found: str(variables[found[1]]), variables[VARIABLE])
    settings = read_settings({VARIABLE: text})
    options = dict(each.removeprefix("--").split("=") for each in container["args"] if each.count("=") == 1)
    assert options["disaggregation-mode"] == name
    assert options["disaggregation-transfer-backend"] == BACKEND
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert str(ports["http"]) == options["port"]
    if name == "prefill":
        assert settings.listen == f"10.1.2.3:{ports['control']}"
        annotations = servers("sglang")[name]["metadata"]["annotations"]
        assert annotations == {"sglang.ai/bootstrap-port": options["disaggregation-bootstrap-port"]}
        assert str(ports["bootstrap"]) == options["disaggregation-bootstrap-port"]
    else:
        prefill = {
            each["name"]: each["containerPort"]
            for each in servers("sglang")["prefill"]["spec"]["containers"][0]["ports"]
        }
        for port in (prefill["bootstrap"], prefill["control"]):
            assert Dials.parse(settings.dials).allows(f"10.1.2.3:{port}")
        events = settings.engine_of(0, 1).kv_events
        assert events.endpoint == f"tcp://10.1.2.3:{ports['tidekv-events']}"
        assert events.topic.startswith("kv@10.1.2.3@")
        theirs = json.loads(value_of(container, "--kv-events-config"))
        assert theirs["endpoint"] == f"tcp://*:{ports['kv-events']}"
    assert paths_are_mounted(container, settings.secret_file, settings.uri)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_a_server_leaves_in_order_and_has_no_more_rights_than_it_needs(engine: str, name: str) -> None:
    template = servers(engine)[name]
    spec = template["spec"]
    (container,) = spec["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"
    command = " ".join(container["lifecycle"]["preStop"]["exec"]["command"])
    (wait_s,) = re.findall(r"sleep[ (](\d+)", command)
    # The rest is for the requests that are live then.
    assert 0 < int(wait_s) < 0.5 * spec["terminationGracePeriodSeconds"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    # Of all servers: llm-d's endpoint picker tells roles and engines apart by these labels.
    assert template["metadata"]["labels"] == {"app": "tidekv", "llm-d.ai/role": name, "llm-d.ai/engine-type": engine}


@contextmanager
def status_server(left: dict[str, int]) -> Iterator[tuple[str, list[tuple[str, HandOverRequest | StoreAllRequest]]]]:
    """The address of a status server, and what it is asked. `left`: pages that a worker at an address does not take, of
    workers that do not refuse.
    """
    asked: list[tuple[str, HandOverRequest | StoreAllRequest]] = []

    class Status(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            kind = HandOverRequest if self.path == "/hand_over" else StoreAllRequest
            request = msgspec.json.decode(body, type=kind)
            asked.append((self.path, request))
            to = getattr(request, "to", None)
            self.send_response(200 if to is None or to in left else 400)
            self.end_headers()
            self.wfile.write(json.dumps({"left": left.get(str(to), 0)}).encode())

    with HTTPServer(("127.0.0.1", 0), Status) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            serving.join()


@pytest.mark.parametrize(
    ("pod", "there", "left", "asked"),
    [
        # An update: the next pod is new, and takes all of it.
        (1, (0, 1, 2), {2: 0}, ["/hand_over 2"]),
        (0, (0, 1), {1: 0}, ["/hand_over 1"]),
        # The last pod has the first one for it, which keeps what it uses more.
        (2, (0, 1, 2), {0: 5}, ["/hand_over 0", "/store"]),
        # The next one refuses, or has gone.
        (1, (0, 1, 2), {0: 0}, ["/hand_over 2", "/hand_over 0"]),
        (1, (0, 1, 2), {2: 9, 0: 0}, ["/hand_over 2", "/hand_over 0"]),
        (1, (0, 1, 2), {}, ["/hand_over 2", "/hand_over 0", "/store"]),
        (0, (0,), {}, ["/store"]),
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_decode_server_hands_its_host_memory_over_before_it_is_stopped_or_stores_it(
    engine: str, pod: int, there: tuple[int, ...], left: dict[int, int], asked: list[str]
) -> None:
    template = servers(engine)["decode"]["spec"]
    (container,) = template["containers"]
    variables = {each["name"]: each.get("value", "") for each in container["env"]}
    if engine == "vllm":
        transfer = json.loads(value_of(container, "--kv-transfer-config"))
        options = transfer["kv_connector_extra_config"]["handover"]["engine"]
    else:
        options = json.loads(variables[VARIABLE].replace("$(POD_IP)", "10.1.2.3"))["engine"]
    peers, grace_s = msgspec.convert(options["cache_peers"], CachePeerOptions), int(variables["GRACE_S"])
    assert grace_s == template["terminationGracePeriodSeconds"]
    addresses = {f"{engine}-decode-{number}.{engine}-decode": f"10.1.2.{number}" for number in there}
    assert peers.listen == "10.1.2.3:7100" and Dials.parse(peers.allow).allows("10.1.2.3:7100")
    python, flag, script = container["lifecycle"]["preStop"]["exec"]["command"]
    resolved = f"import socket\ndef gethostbyname(name, found={addresses}):\n    if name in found:\n"
    resolved += "        return found[name]\n    raise socket.gaierror(name)\nsocket.gethostbyname = gethostbyname\n"
    with status_server({f"10.1.2.{number}:7100": pages for number, pages in left.items()}) as (address, found):
        at_once = resolved + script.replace("time.sleep(15)", "pass").replace(options["status"]["listen"], address)
        environment = {**os.environ, "POD_NAME": f"{engine}-decode-{pod}", "GRACE_S": str(grace_s)}
        assert python == "python3"
        subprocess.run([sys.executable, flag, at_once], check=True, timeout=60, env=environment)
    places = [path if path == "/store" else f"{path} {request.to[7:-5]}" for path, request in found]
    assert places == asked
    # Each has a part of the time that is left, and what comes last has all of it.
    for path, request in found:
        assert 0 < request.within_s <= grace_s / (2 if path == "/store" else 4)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_routers_and_monitors_reach_is_open_to_them_and_nothing_else(engine: str) -> None:
    yaml = pytest.importorskip("yaml")
    documents = list(yaml.safe_load_all((DEPLOY / f"kubernetes-{engine}.yaml").read_text()))
    (policy,) = [one["spec"] for one in documents if one["kind"] == "NetworkPolicy"]
    (pool,) = [one["spec"] for one in documents if one["kind"] == "InferencePool"]
    workers, others = policy["ingress"]
    assert "ports" not in workers
    opened = {each["port"] for each in others["ports"]}
    named = {
        each["containerPort"]
        for template in servers(engine).values()
        for each in template["spec"]["containers"][0]["ports"]
        if each["name"] not in ("control", "peers")
    }
    assert opened == named
    assert {each["number"] for each in pool["targetPorts"]} <= opened
    assert pool["selector"]["matchLabels"] == {"app": "tidekv"}, "the endpoint picker chooses both roles from it"


@pytest.mark.parametrize("source", ["kubernetes.yaml", "worker.toml"])
def test_the_configuration_has_no_error(tmp_path: Path, source: str) -> None:
    text = (DEPLOY / "worker.toml").read_text()
    if source == "kubernetes.yaml":
        text = manifests()[0]["data"]["worker.toml"]
    variables = {}
    for _, template in pods() if source == "kubernetes.yaml" else []:
        for container in template["spec"]["containers"]:
            variables |= {each["name"]: each["value"] for each in container["env"]}
    file = tmp_path / "worker.toml"
    file.write_text(text)
    loaded, errors = gather(str(file), environment=variables)
    assert errors == []
    assert loaded.configuration.prefill.listen == "0.0.0.0:7000"
    assert tuple(loaded.configuration.decode.prefill) == ("tidekv-prefill:7000",)


def test_the_unit_names_options_and_commands_that_exist(tmp_path: Path) -> None:
    text = (DEPLOY / "tidekv-prefill.service").read_text()
    for command in re.findall(r"^ExecStart(?:Pre)?=/usr/bin/env tidekv (\w+)", text, re.MULTILINE):
        assert command in COMMANDS
    environment = dict(re.findall(r"^Environment=(\w+)=(.*)$", text, re.MULTILINE))
    file = tmp_path / "worker.toml"
    file.write_text((DEPLOY / "worker.toml").read_text())
    loaded, errors = gather(environment={**environment, "TIDEKV_CONFIG": str(file)})
    assert errors == []
    assert loaded.configuration.transport.secret_file == "%d/secret"
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed; only what is above was checked")
    unit = DEPLOY / "tidekv-prefill.service"
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_unit_is_confined() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=30", str(DEPLOY / "tidekv-prefill.service")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout[-500:]


def test_the_image_is_built_of_what_is_there() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
    assert re.search(r'^ENTRYPOINT \["tidekv"\]$', text, re.MULTILINE)
    (command,) = re.findall(r'^CMD \["(\w+)"\]$', text, re.MULTILINE)
    assert command in COMMANDS


def test_the_image_has_what_prefill_and_decode_need(tmp_path: Path) -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    folders = [line.split()[0] for line in re.findall(r"^COPY (\w+ \w+)$", text, re.MULTILINE)]
    for folder in folders:
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    script = (
        "from tidekv.engine.cli.main import app, run_app\n"
        "print(run_app(app, ['prefill', '--help']), run_app(app, ['simulate']))\n"
        "import demo, tidekv.engine.cli.main as main\n"
        "print(demo.__file__, main.__file__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        cwd=tmp_path.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"0 2\n{tmp_path}/demo/__init__.py {tmp_path}/src/" in done.stdout
    assert "run it in a checkout" in done.stderr


def test_the_image_installs_by_hash_all_but_torch() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["${BASE}"], "a digest can be given"
    # Whatever pip takes from an index is checked, but for torch's build, which the user names.
    for command in re.findall(r"pip (?:install|wheel) ([^&\n]+)", text.split("FROM", 1)[1]):
        assert "--require-hashes" in command or "/torch.txt" in command or "--no-deps" in command.split(), command
    lines = [line for line in (DEPLOY / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {}
    for line in lines:
        parts = re.fullmatch(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line)
        assert parts is not None, line
        pinned[parts[1]] = parts[2]
    assert not [name for name in pinned if image_requirements.OF_TORCH.fullmatch(name)]
    for requirement in map(Requirement, image_requirements.wanted()):
        if requirement.name != "torch":
            assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), (
                "python3 -m tools.image_requirements writes deploy/requirements.txt"
            )


def test_hashes_come_from_the_report_of_pip() -> None:
    report = {
        "install": [
            {
                "metadata": {"name": name, "version": "1.0"},
                "download_info": {"archive_info": {"hashes": {"sha256": "ab"}}},
            }
            for name in ("torch", "nvidia-nccl-cu13", "Jinja2", "huggingface_hub")
        ]
    }
    assert image_requirements.lines_of(report) == [
        "huggingface-hub==1.0 --hash=sha256:ab\n",
        "jinja2==1.0 --hash=sha256:ab\n",
    ]


def test_the_version_is_semantic_and_the_package_is_typed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|(a|b|rc)\d+)?", project["project"]["version"])
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["tidekv"]
