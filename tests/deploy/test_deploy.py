"""What recipes/deploy says is true of the code: images and chart start the hub, alerts fire, every figure exists.

Prometheus (Debian: `apt install prometheus`) and helm (`make test-deploy` fetches it) are used where they are.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hub_scenarios import Scenario

from recipes.ranks import free_port
from tensorhub_plugins.core import Client, HubLimits, start_server
from tensorhub_plugins.core.hub import exposition
from tensorhub_plugins.core.hub.metrics import metrics
from tensorhub_plugins.core.protocol import messages as m
from tensorhub_plugins.core.security import secret

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "recipes" / "deploy"
RULES = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]
PANELS = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
WAIT_S = 60.0


def tool(name: str, remedy: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name} here: {remedy}")
    return path


def prometheus_tool(name: str) -> str:
    return tool(name, "apt install prometheus")


def run(*command: str, cwd: Path | None = None, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env={**os.environ, **environment}, timeout=300
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# --- figures ---


def figures() -> set[str]:
    """Return the names of all figures that a hub has."""
    with start_server() as server:
        return {figure.name for figure in server.figures()} | {exposition.UP[0]}


def expressions() -> list[str]:
    return [rule["expr"] for rule in RULES] + [series["expr"] for panel in PANELS for series in panel["targets"]]


def unknown_names(expressions: list[str], known: set[str]) -> set[str]:
    return {name for text in expressions for name in re.findall(r"\btensorhub_\w+", text)} - known


def test_alerts_and_panels_ask_for_figures_that_exist() -> None:
    assert not unknown_names(expressions(), figures())
    assert unknown_names(["tensorhub_newest_stop > 1"], figures()) == {"tensorhub_newest_stop"}  # the control


def test_every_figure_is_in_an_alert_or_a_panel() -> None:
    shown = set(re.findall(r"\btensorhub_\w+", " ".join(expressions())))
    # How many there are, what `newest_step` shows, and what `follower_install_age_seconds_max` does.
    others = {"tensorhub_hub_models", "tensorhub_newest_attempt", "tensorhub_follower_behind_seconds_max"}
    assert figures() - shown == others


def test_a_worker_that_is_frozen_or_cut_off_fires_an_alert() -> None:
    """It is silent for some seconds and then lost, of which a Prometheus that looks each minute sees the second."""
    story = Scenario(limits=HubLimits())
    story.join_all("trainer/0", "a/0")
    story.publish("trainer/0", 1)
    story.say("a/0", m.Target, installed=1, timeout_s=30.0)
    rule = next(rule for rule in RULES if rule["alert"] == "TensorHubSilentWorkers")
    assert rule["for"] == "1m" and not is_true_for_s(story, rule["expr"], 60.0)  # it goes on
    story.silent = ("a/0",)
    assert is_true_for_s(story, rule["expr"], 120.0) > 60.0
    story.silent = ()
    story.join("a/0")
    assert not is_true_for_s(story, rule["expr"], 60.0)
    story.silent = ("a/0",)
    assert is_true_for_s(story, "tensorhub_silent_workers > 0", 120.0) < 60.0  # the control


def is_true_for_s(story: Scenario, expression: str, seconds: float) -> float:
    """Return for how many of these seconds an expression of figures is true."""
    true_s = 0.0
    for _ in range(int(seconds / 5)):
        story.wait(5.0)
        found = metrics(story.hub.registry, story.now)
        true_s += 5.0 * eval(expression, {figure.name: value for figure in found for _, value in figure.values})
    return true_s


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    for rule in RULES:
        assert set(rule["annotations"]) == {"summary", "command"}, rule["alert"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")


# --- alerts ---

# Each alert: series (as promtool writes them, a sample a minute) under which it fires after 20 minutes (a pin: 80), and
# under which it does not.
OF = '{run="r",model="m"}'
COMPILED = '{run="r",model="m.compiled-0123456789abcdef"}'
STUCK = [f"tensorhub_followers{OF} 8x20", f"tensorhub_follower_install_age_seconds_max{OF} 0+60x20"]
ONE_COPY = [f"tensorhub_newest_replicas{OF} 1x20", f"tensorhub_newest_age_seconds{OF} 0+60x20"]
CASES: dict[str, tuple[list[str], list[str]]] = {
    "TensorHubDown": (['up{job="tensorhub",instance="h"} 1 0x20'], ['up{job="tensorhub",instance="h"} 1x20']),
    "TensorHubRestarted": (
        ['tensorhub_hub_up_seconds{instance="h"} 0+60x10 0+60x10'],
        ['tensorhub_hub_up_seconds{instance="h"} 0+60x20'],
    ),
    "TensorHubFleetStuck": (
        [*STUCK, f"tensorhub_followers_behind{OF} 8x20"],
        [*STUCK, f"tensorhub_followers_behind{OF} 7x20"],
    ),
    "TensorHubFollowerStuck": (
        [*STUCK, f"tensorhub_followers_behind{OF} 1x20"],
        [*STUCK, f"tensorhub_followers_behind{OF} 0x20"],
    ),
    "TensorHubVersionRefused": ([f"tensorhub_followers_refusing{OF} 1x20"], [f"tensorhub_followers_refusing{OF} 0x20"]),
    "TensorHubLastCopy": (
        [
            f"tensorhub_newest_replicas{OF} 1x20",
            f"tensorhub_newest_age_seconds{OF} 0+60x20",
            f"tensorhub_followers{OF} 2x20",
        ],
        [
            f"tensorhub_newest_replicas{OF} 1x20",
            f"tensorhub_newest_age_seconds{OF} 0+60x20",
            f"tensorhub_followers{OF} 0x20",
        ],
    ),
    "TensorHubMissingCopies": ([f"tensorhub_missing_copies{OF} 1x20"], [f"tensorhub_missing_copies{OF} 1x17 0x4"]),
    "TensorHubCorruptSource": (
        [f"tensorhub_corrupt_segments_total{OF} 0x10 3x10"],
        [f"tensorhub_corrupt_segments_total{OF} 3x20"],
    ),
    "TensorHubSilentWorkers": (
        [f"tensorhub_silent_workers{OF} 0 1 0x18", f"tensorhub_lost_workers{OF} 0 0 1x18"],
        [f"tensorhub_silent_workers{OF} 0 1 0x18", f"tensorhub_lost_workers{OF} 0x20"],
    ),
    "TensorHubWorkersLack": ([f"tensorhub_lacking_workers{OF} 1x20"], [f"tensorhub_lacking_workers{OF} 0x20"]),
    "TensorHubRefusedHandshakes": (["tensorhub_hub_refused_hosts 1x20"], ["tensorhub_hub_refused_hosts 0x20"]),
    "TensorHubUnreachedSources": ([f"tensorhub_unreached_sources{OF} 1x20"], [f"tensorhub_unreached_sources{OF} 0x20"]),
    "TensorHubTrainerStill": (
        [f"tensorhub_trainers{OF} 1x20", f"tensorhub_newest_age_seconds{OF} 7000+60x20"],
        [
            f"tensorhub_trainers{OF} 0x20",
            f"tensorhub_newest_age_seconds{OF} 7000+60x20",
            f"tensorhub_trainers{COMPILED} 1x20",
            f"tensorhub_newest_age_seconds{COMPILED} 7000+60x20",
        ],
    ),
    "TensorHubOverBudget": ([f"tensorhub_over_budget{OF} 1x20"], [f"tensorhub_over_budget{OF} 0x20"]),
    "TensorHubPinned": ([f"tensorhub_pinned{OF} 1x80"], [f"tensorhub_pinned{OF} 0x30 1x50"]),
    "TensorHubHubFull": (["tensorhub_hub_connections_left 99x20"], ["tensorhub_hub_connections_left 5000x20"]),
}


def test_each_alert_fires_when_it_should_and_else_not(tmp_path: Path) -> None:
    promtool = prometheus_tool("promtool")
    assert set(CASES) == {rule["alert"] for rule in RULES}
    assert not wrong_alerts(promtool, tmp_path, fires=(True, False))
    # The control: all that fire are found where it is said that they do not, and the other way round.
    wrong = wrong_alerts(promtool, tmp_path, fires=(False, True))
    assert wrong == sorted(f"{alert} {fires}" for alert in CASES for fires in (True, False))


def wrong_alerts(promtool: str, folder: Path, *, fires: tuple[bool, bool]) -> list[str]:
    """Return "alert expectation" of the cases that end otherwise than expected of the first and the second of each."""
    shutil.copy(DEPLOY / "alerts.yaml", folder)
    tests = []
    for alert, both in CASES.items():
        for series, expected in zip(both, fires, strict=True):
            minutes = 80 if alert == "TensorHubPinned" else 20
            inputs = [dict(zip(("series", "values"), line.split(" ", 1), strict=True)) for line in series]
            # ALERTS is Prometheus's own series of what fires.
            firing = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'
            samples = [{"labels": "{}", "value": float(expected)}]
            query = {"expr": firing, "eval_time": f"{minutes}m", "exp_samples": samples}
            tests.append({"interval": "1m", "input_series": inputs, "promql_expr_test": [query]})
    (folder / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["alerts.yaml"], "tests": tests}))
    done = subprocess.run([promtool, "test", "rules", "test.yaml"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 or "FAILED" in done.stderr, done.stderr
    found = re.findall(r'alertname=\\?"(\w+).*?exp:\s*\{\} ([01])', done.stdout + done.stderr, re.DOTALL)
    return sorted(f"{alert} {bool(int(expected))}" for alert, expected in found)


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Any]:
    """Start a Prometheus with our rules that scrapes a port each second; yield that port, and how to ask it."""
    program, hub_port, port = prometheus_tool("prometheus"), free_port(), free_port()
    settings = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    settings["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    settings["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{hub_port}"]
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(settings))
    shutil.copy(DEPLOY / "alerts.yaml", tmp_path)
    options = ["--config.file=prometheus.yaml", "--storage.tsdb.path=data", f"--web.listen-address=127.0.0.1:{port}"]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([program, *options], cwd=tmp_path, stdout=log, stderr=log)
    try:

        def ask(path: str, **query: str) -> Any:
            url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]

        yield hub_port, ask
    finally:
        process.terminate()
        process.wait()


def eventually(check: Any) -> Any:
    """Return what the check returns once it is something; an error of the connection counts as nothing."""
    until = time.monotonic() + WAIT_S
    while True:
        try:
            found = check()
        except OSError:
            found = None
        if found:
            return found
        assert time.monotonic() < until, "it has not come"
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_prometheus_reads_a_hub_and_says_that_it_was_restarted(prometheus: Any) -> None:
    port, ask = prometheus
    worker = {"run": "r", "model": "m", "replica": "trainer"}
    for life in range(2):
        with (
            start_server() as server,
            exposition.served(server, "127.0.0.1", port),
            Client(server.address, **worker),
        ):
            up = eventually(lambda: ask("query", query="tensorhub_hub_up_seconds > 1")["result"])
            assert up[0]["metric"]["job"] == "tensorhub"
            if life == 0:
                assert not ask("alerts")["alerts"]  # the control
                continue
            firing = eventually(lambda: ask("alerts")["alerts"])
            assert [alert["labels"]["alertname"] for alert in firing] == ["TensorHubRestarted"]
            assert "started again 1 times" in firing[0]["annotations"]["summary"]
            panels = [series["expr"] for panel in PANELS for series in panel["targets"] if panel["title"] != "Read"]
            queries = [text.replace("$run", "r").replace("$model", "m") for text in panels]  # nobody has read
            assert [text for text in queries if not ask("query", query=text)["result"]] == []
    rules = ask("rules")["groups"][0]["rules"]
    assert {rule["health"] for rule in rules} == {"ok"} and len(rules) == len(RULES)


# --- the chart ---


def rendered(*settings: str) -> dict[str, Any]:
    helm = tool("helm", "make test-deploy")
    chosen = [word for setting in settings for word in ("--set", setting)]
    documents = yaml.safe_load_all(run(helm, "template", "release", str(DEPLOY / "helm"), *chosen))
    return {document["kind"]: document for document in documents if document}


def test_the_chart_is_well_formed_and_wants_a_secret() -> None:
    helm = tool("helm", "make test-deploy")
    assert "0 chart(s) failed" in run(helm, "lint", str(DEPLOY / "helm"), "--set", "secretName=s")
    without = subprocess.run([helm, "template", "r", str(DEPLOY / "helm")], capture_output=True, text=True)
    assert without.returncode != 0 and "name a Secret" in without.stderr


def test_the_charts_ports_probes_and_service_agree() -> None:
    for settings in (["port=8000"], ["metrics.enabled=false"], ["metrics.serviceMonitor=true"]):
        made = rendered("secretName=s", *settings)
        container = made["Deployment"]["spec"]["template"]["spec"]["containers"][0]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert {port["targetPort"] for port in made["Service"]["spec"]["ports"]} == set(ports)
        assert all(
            container[probe]["tcpSocket"]["port"] in ports
            for probe in ("startupProbe", "readinessProbe", "livenessProbe")
        )
        labels = made["Deployment"]["spec"]["template"]["metadata"]["labels"]
        assert made["Service"]["spec"]["selector"] == made["Deployment"]["spec"]["selector"]["matchLabels"] == labels
        assert ("metrics" in ports) == ("metrics.enabled=false" not in settings)
        assert ("ServiceMonitor" in made) == ("metrics.serviceMonitor=true" in settings)


@pytest.mark.slow
def test_the_charts_command_starts_a_hub_that_its_secret_opens(tmp_path: Path) -> None:
    port, metrics_port, keys = free_port(), free_port(), secret.generate()
    made = rendered("secretName=s", f"port={port}", f"metrics.port={metrics_port}")
    container = made["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert [(line["name"], "secretKeyRef" in line["valueFrom"]) for line in container["env"]] == [
        ("TENSORHUB_SECRET", True)
    ]
    cli = [sys.executable, "-m", "tensorhub_plugins.core.cli"]
    program, command = container["command"]
    assert program == "tensorhub"
    known = {**os.environ, "TENSORHUB_SECRET": keys.text()}
    hub = subprocess.Popen([*cli, command, *container["args"]], env=known, stdout=subprocess.PIPE, text=True)
    try:
        assert hub.stdout is not None and f":{port}" in hub.stdout.readline()
        address = f"tcp://127.0.0.1:{port}"
        run(*cli, "status", "--hub", address, TENSORHUB_SECRET=keys.text())
        stranger = {**os.environ, "TENSORHUB_SECRET": secret.generate().text()}
        asked = [*cli, "status", "--hub", address, "--timeout", "1"]
        assert subprocess.run(asked, env=stranger, capture_output=True).returncode != 0  # the control
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as page:
            assert b"tensorhub_hub_answers 1.0" in page.read()
    finally:
        hub.terminate()
        assert hub.wait(30) == 0
        hub.stdout.close()


# --- what is shipped ---


def version() -> str:
    return re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]


def test_one_version_is_everywhere() -> None:
    chart = yaml.safe_load((DEPLOY / "helm" / "Chart.yaml").read_text())
    image = f"tensorhub:{version()}"
    values = yaml.safe_load((DEPLOY / "helm" / "values.yaml").read_text())
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert chart["version"] == chart["appVersion"] == version()
    assert values["image"] == compose["hub"]["image"] == image
    assert f"-t {image}" in (DEPLOY / "Dockerfile").read_text()


@pytest.mark.slow
def test_the_wheel_has_all_of_the_package_and_runs_without_the_checkout(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    run(sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path), cwd=ROOT)
    sdist, wheel = next(tmp_path.glob("*.tar.gz")), next(tmp_path.glob("*.whl"))
    shutil.unpack_archive(sdist, tmp_path / "source")
    source = next((tmp_path / "source").iterdir())
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "again"), cwd=source)
    for made in (wheel, tmp_path / "again" / wheel.name):
        target = tmp_path / f"installed-{made.parent.name}"
        run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target), str(made))
        tracked = run("git", "ls-files", "tensorhub_plugins", cwd=ROOT).split() if (ROOT / ".git").exists() else []
        assert not [name for name in tracked if not (target / name).exists()]
        words = "import tensorhub_plugins.core as core; print(core.__file__)"
        path = {"PYTHONPATH": str(target), "PYTHONSAFEPATH": "1"}
        assert run(sys.executable, "-c", words, cwd=tmp_path, **path).startswith(str(target))
        assert "hub" in run(str(target / "bin" / "tensorhub"), "--help", cwd=tmp_path, **path)
