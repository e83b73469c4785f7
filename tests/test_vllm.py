# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin: each real release in a process of its own (vllm_inside.py), what needs none, and docs/vllm.md.

The Makefile puts the releases' Python files under the virtual environment (``make test``).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pages import prints_what_is_shown
from sparsemla.integrations.vllm.plugin import NAME
from sparsemla.integrations.vllm.versions import TESTED, UnsupportedVllmError, release_of

TESTS = Path(__file__).parent
PACKAGES = Path(sys.prefix) / "vllm"
PROJECT = tomllib.loads((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

releases = pytest.mark.parametrize("version", TESTED)


def python(version: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs our interpreter with one vLLM release on its path; skips where that is not there."""
    paths = [PACKAGES / version, PACKAGES / "common"]
    missing = [path for path in paths if not path.is_dir()]
    if missing:
        pytest.skip(f"vLLM {version} is not at {missing[0]}; `make test` puts it there where the index has it")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "VLLM_LOGGING_LEVEL": "WARNING"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=TESTS.parent, timeout=280
    )


@releases
def test_plugin_and_release(version: str) -> None:
    """Registration, signatures, capabilities, metadata and the forward against float64: see vllm_inside.py."""
    inside = str(TESTS / "vllm_inside.py")
    done = python(version, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", inside)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 80, done.stdout[-2000:]
    assert len(re.findall("^SKIPPED", done.stdout, re.MULTILINE)) <= 1, done.stdout[-2000:]


LOAD = """
import logging, sys
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
import vllm
vllm.__version__ = {version!r}
from vllm.v1.attention.backends.registry import AttentionBackendEnum
before = set(AttentionBackendEnum.__members__), AttentionBackendEnum.CUSTOM.is_overridden()
from vllm.plugins import load_general_plugins
load_general_plugins()
print("before", before[1], "SPARSEMLA" in before[0])
print("heavy", sorted(name for name in sys.modules if name.startswith("sparsemla.") and "integrations" not in name))
from vllm.config import AttentionConfig
chosen = AttentionConfig(backend={flag!r}).backend
try:
    print("class", chosen.get_class().__qualname__)
except ImportError as error:
    print("hidden by vLLM:", error)
except RuntimeError as error:
    print("refused", type(error).__name__, error)
"""


@releases
def test_vllm_finds_the_plugin_by_its_entry_point(version: str) -> None:
    """What vLLM runs in each process; nothing of ours but the plugin's own files is imported by it."""
    done = python(version, "-c", LOAD.format(version=version + "+cu130", flag=TESTED[version].flag))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert "before False False" in lines and "heavy []" in lines and "class SparseMLABackend" in lines, done.stdout


@releases
def test_other_releases_are_refused_by_name_when_asked_for(version: str) -> None:
    """Having the plugin installed does no harm there: it warns. Asking for the backend says why not."""
    done = python(version, "-c", LOAD.format(version="0.30.1", flag=TESTED[version].flag))
    assert done.returncode == 0, done.stderr[-3000:]
    message = "sparsemla: got vLLM 0.30.1, accepted are 0.26.0 and 0.33.0"
    assert f"refused UnsupportedVllmError {message}" in done.stdout, done.stdout
    assert f"WARNING:sparsemla.integrations.vllm.plugin:{message}" in done.stdout


@pytest.mark.parametrize("version", ["0.25.1", "0.26.1", "0.27.0", "0.33.1", "0.34.0", "0.33.0rc1", "1.0.0", "dev"])
def test_no_other_release_is_served(version: str) -> None:
    with pytest.raises(UnsupportedVllmError, match=re.escape(f"got vLLM {version}, accepted are 0.26.0 and 0.33.0")):
        release_of(version)


@releases
def test_builds_of_a_release_are_that_release(version: str) -> None:
    assert release_of(version) is release_of(f"{version}+cu130") is TESTED[version]


def test_the_extra_allows_the_tested_releases() -> None:
    (extra,) = (Requirement(line) for line in PROJECT["optional-dependencies"]["vllm"])
    assert extra.name == "vllm" and all(version in extra.specifier for version in TESTED)
    assert not any(version in extra.specifier for version in ("0.25.9", "0.27.0", "0.29.1", "0.32.9", "0.33.1", "1.0"))


def test_the_entry_point_names_the_function() -> None:
    assert PROJECT["entry-points"]["vllm.general_plugins"] == {
        "sparsemla": "sparsemla.integrations.vllm.plugin:register"
    }


def test_the_package_imports_no_vllm() -> None:
    modules = "sparsemla.integrations.vllm.plugin, sparsemla.integrations.vllm.versions"
    code = f"import sys, {modules}; print('vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


PAGE = (TESTS.parent / "docs" / "vllm.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_three_deployments_are_shown() -> None:
    assert len(COMMANDS) == 3 and all("--compare flashmla,sparsemla" in block for block in COMMANDS)


@pytest.mark.parametrize("block", COMMANDS, ids=lambda block: block.split(" --max-model-len")[0][17:])
def test_commands_print_what_the_page_shows(
    block: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prints_what_is_shown(block, capsys, monkeypatch)


def test_the_page_names_releases_flags_and_the_refusal() -> None:
    for release in TESTED.values():
        assert release.version in PAGE and f'{{"backend": "{release.flag}"}}' in PAGE
    assert NAME in PAGE
    with pytest.raises(UnsupportedVllmError) as refusal:
        release_of("0.30.1")
    assert f"```\n{refusal.value}\n```" in PAGE
