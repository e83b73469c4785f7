# SPDX-License-Identifier: Apache-2.0
"""``sparsemla doctor``: which kernel serves which cache format here, why not a better one, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from sparsemla.cache import PagedKVCache
from sparsemla.formats import KVFormat, every_layout
from sparsemla.kernels import registry
from sparsemla.kernels.call import AttentionCall

PACKAGES = ("sparsemla", "torch", "triton", "nvidia-cutlass-dsl", "cuda-bindings", "transformers")
"""Whose versions are printed."""
LAYOUTS: tuple[tuple[KVFormat, int], ...] = tuple((layout.format, layout.d_qk) for layout in every_layout())
"""(format, columns of a key) of every cache layout."""
HEADS = (8, 64, 128)
"""Query heads asked about."""
NOTHING = "-"


@dataclass(frozen=True)
class Gpu:
    """One device that torch sees. Bytes where nothing else is said."""

    index: int
    name: str
    architecture: str
    processors: int
    memory: int
    shared_memory_a_block: int | None
    registers_a_processor: int | None
    l2: int | None


@dataclass(frozen=True)
class Service:
    """Who serves a layout, and for each better kernel the reason why it does not."""

    format: str
    d_qk: int
    kernel: str
    reasons: dict[str, str]


@dataclass(frozen=True)
class Shortfall:
    """Something that keeps a better kernel from serving, and the line that mends it."""

    what: str
    fix: str


@dataclass(frozen=True)
class Report:
    """All that doctor says."""

    versions: dict[str, str]
    driver: str
    device: str
    gpus: list[Gpu]
    services: list[Service]
    shortfalls: list[Shortfall]
    notes: list[str]
    blockwise: bool
    """A GPU is there and some layout runs blockwise in torch on it."""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on standard output.")] = False,
) -> int:
    """Say which kernel serves which cache format here, why not a better one, and one line to mend each shortfall.

    Exit status 1 where there is a GPU and a format runs on it blockwise in torch.
    """
    report = examine()
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
    else:
        Console().print(render(report))
    return 1 if report.blockwise else 0


def examine() -> Report:
    """Looks at this machine. Allocates a few small tensors on the GPU, if there is one; launches nothing."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    gpus = [_gpu(index) for index in range(torch.cuda.device_count())] if device.type == "cuda" else []
    services = [_service(fmt, width, device) for fmt, width in LAYOUTS]
    found = versions()
    return Report(
        versions=found,
        driver=driver_version(),
        device=str(device),
        gpus=gpus,
        services=services,
        shortfalls=shortfalls(
            services,
            architecture=gpus[device.index].architecture if gpus else None,
            accelerator=torch.version.cuda or torch.version.hip,
            environment=os.environ,
        ),
        notes=notes(gpus[device.index].architecture) if gpus else [],
        blockwise=device.type == "cuda" and any(registry.KERNELS[-1].name in s.kernel.split(", ") for s in services),
    )


def versions() -> dict[str, str]:
    """Package → version, or "not installed"; Python and torch's CUDA or HIP too."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["torch built for"] = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"HIP {torch.version.hip}"
        if torch.version.hip
        else "CPU"
    )
    return found


def driver_version() -> str:
    """What nvidia-smi calls the driver; "-" where it does not answer."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return NOTHING
    return (answer.splitlines() or [NOTHING])[0].strip()


def _gpu(index: int) -> Gpu:
    facts: Any = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        architecture = str(facts.gcnArchName).split(":")[0]
    else:
        architecture = f"sm_{facts.major}{facts.minor}"
    return Gpu(
        index=index,
        name=facts.name,
        architecture=architecture,
        processors=facts.multi_processor_count,
        memory=facts.total_memory,
        shared_memory_a_block=getattr(facts, "shared_memory_per_block_optin", None),
        registers_a_processor=getattr(facts, "regs_per_multiprocessor", None),
        l2=getattr(facts, "L2_cache_size", None),
    )


def _service(fmt: KVFormat, d_qk: int, device: torch.device) -> Service:
    """Asks the registry's kernels in turn about a small call of each number of heads."""
    names: list[str] = []
    reasons: dict[str, str] = {}
    for heads in HEADS:
        call = _call(fmt, d_qk, heads, device)
        for kernel in registry.KERNELS:
            reason = kernel.why_not(call)
            if reason is None:
                if kernel.name not in names:
                    names.append(kernel.name)
                break
            reasons.setdefault(kernel.name, reason)
    return Service(fmt.value, d_qk, ", ".join(names), reasons)


def _call(fmt: KVFormat, d_qk: int, heads: int, device: torch.device) -> AttentionCall:
    cache = PagedKVCache.allocate(1, 64, fmt, device=device, d_qk=d_qk)
    q = torch.zeros((1, heads, cache.layout.d_qk), dtype=torch.bfloat16, device=device)
    return AttentionCall.plain(q, cache, torch.zeros((1, 64), dtype=torch.int32, device=device))


def shortfalls(
    services: list[Service],
    *,
    architecture: str | None,
    accelerator: str | None,
    environment: Mapping[str, str],
) -> list[Shortfall]:
    """What keeps better kernels from serving, each once.

    Args:
        services: what the registry said.
        architecture: of the GPU that was asked, "sm_90" or "gfx942"; None without one.
        accelerator: version of CUDA or HIP that torch is built for; None: a CPU build.
        environment: environment variables.
    """
    if architecture is None:
        if accelerator is None:
            return [
                Shortfall("torch is a CPU build", "install the CUDA or ROCm build of torch on a machine with a GPU")
            ]
        fix = f"check that nvidia-smi or rocm-smi lists a GPU and that its driver serves {accelerator}"
        return [Shortfall("torch sees no GPU", fix)]
    found: dict[str, Shortfall] = {}
    for service in services:
        for kernel, reason in service.reasons.items():
            mend = _MENDING.get(kernel, _nothing)(reason, architecture, environment)
            if mend is not None:
                found.setdefault(mend.fix, mend)
    return list(found.values())


def notes(architecture: str) -> list[str]:
    """Where the portable kernel's tile shapes for a GPU come from."""
    if registry.kernel("triton").unavailable() is not None:
        return []
    from sparsemla.kernels.triton import shapes  # imports triton, which not every machine has

    table = shapes.user_table()
    if table.is_file():
        return [f"tile shapes of the triton kernel: {table}, then the committed table"]
    near = shapes.nearest(architecture)
    if near == architecture:
        return [f"tile shapes of the triton kernel: the committed ones for {architecture}"]
    measured = "`sparsemla bench --tune` measures better ones"
    return [f"tile shapes of the triton kernel: those of {near}, the nearest to {architecture}; {measured}"]


def _nothing(reason: str, architecture: str, environment: Mapping[str, str]) -> Shortfall | None:
    return None


def _hopper(reason: str, architecture: str, environment: Mapping[str, str]) -> Shortfall | None:
    if architecture != "sm_90":
        return None  # not meant for this GPU: nothing to mend
    if reason.endswith("is not there"):
        return Shortfall(f"hopper: {reason}", "pip install 'sparsemla[hopper]'")
    if reason.startswith("import of"):
        return Shortfall(f"hopper: {reason}", "pip install --force-reinstall 'sparsemla[hopper]'")
    return None


def _triton(reason: str, architecture: str, environment: Mapping[str, str]) -> Shortfall | None:
    if reason.endswith("is not there"):
        return Shortfall(f"triton: {reason}", "pip install 'sparsemla[triton]'")
    if reason.startswith("needs triton"):
        return Shortfall(f"triton: {reason}", "pip install --upgrade 'triton>=3.4'")
    if environment.get("TRITON_INTERPRET"):
        return Shortfall(f"triton: {reason}", "unset TRITON_INTERPRET")
    if reason.startswith("import of"):
        return Shortfall(f"triton: {reason}", "pip install --force-reinstall 'sparsemla[triton]'")
    if reason.startswith("needs compute capability"):
        return Shortfall(f"triton: {reason}", "use a GPU of compute capability 8.0 or later (Ampere)")
    return None


_MENDING: dict[str, Callable[[str, str, Mapping[str, str]], Shortfall | None]] = {"hopper": _hopper, "triton": _triton}


def render(report: Report) -> RenderableType:
    """The report for a terminal."""
    words = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    head = Text.assemble(("versions ", "bold"), words, f", driver {report.driver}")
    parts: list[RenderableType] = [head, _gpus(report.gpus), _services(report)]
    parts += [Text(note, style="dim") for note in report.notes]
    for item in report.shortfalls:
        parts.append(Text.assemble(("short of ", "bold yellow"), item.what, ("\n   mend: ", "bold"), item.fix))
    if not report.shortfalls:
        parts.append(Text("nothing to mend", style="green"))
    return Group(*parts)


def _gpus(gpus: list[Gpu]) -> RenderableType:
    if not gpus:
        return Text.assemble(("GPU ", "bold"), "none that torch sees; attention runs on the CPU")
    table = Table(box=box.SIMPLE, header_style="bold", show_edge=False, padding=(0, 2, 0, 0))
    for title in ("GPU", "architecture", "SMs", "memory", "shared memory a block", "registers an SM", "L2"):
        table.add_column(title, justify="left" if title in ("GPU", "architecture") else "right")
    for gpu in gpus:
        table.add_row(
            f"{gpu.index} {gpu.name}",
            gpu.architecture,
            str(gpu.processors),
            f"{gpu.memory / 2**30:.1f} GiB",
            _size(gpu.shared_memory_a_block, 2**10, "KiB"),
            NOTHING if gpu.registers_a_processor is None else f"{gpu.registers_a_processor:,}",
            _size(gpu.l2, 2**20, "MiB"),
        )
    return table


def _size(value: int | None, unit: int, name: str) -> str:
    return NOTHING if value is None else f"{value / unit:.0f} {name}"


def _services(report: Report) -> RenderableType:
    table = Table(box=box.SIMPLE, header_style="bold", show_edge=False, padding=(0, 2, 0, 0))
    table.add_column("cache format", no_wrap=True)
    table.add_column("columns", justify="right")
    table.add_column(f"served on {report.device} by", no_wrap=True)
    table.add_column("why not")
    numbers: dict[tuple[str, str], int] = {}  # the same reason mostly holds for many formats: said once, below
    for service in report.services:
        style = "red" if report.blockwise and registry.KERNELS[-1].name in service.kernel else "green"
        marks = [
            f"{name} [{numbers.setdefault((name, why), len(numbers) + 1)}]" for name, why in service.reasons.items()
        ]
        table.add_row(service.format, str(service.d_qk), Text(service.kernel, style=style), Text(", ".join(marks)))
    reasons = [Text(f"[{number}] {name}: {why}") for (name, why), number in numbers.items()]
    return Group(table, *reasons)
