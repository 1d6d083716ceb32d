"""Every check of this repository. Run it with `uv run nox -f nox.py`.

Two environments hold torch: the project's own (`.venv`, everything) and one shared by the unit
sessions, which uv reduces to what a package declares before that package's tests run, so that an
undeclared import fails. The light one holds tools only.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import nox

# This file is named like the package it imports. Without this line every Python started from the
# repository root would find the file first.
os.environ.setdefault("PYTHONSAFEPATH", "1")

nox.needs_version = ">=2026.4"
nox.options.error_on_external_run = True
nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "imports", "types", "unit", "triton", "build", "integration"]

ROOT = Path(__file__).parent
PACKAGES = ["lora-weights", "lora-kernels", "lora-cache", "lora-layers", "lora-server"]
LIGHT = {"lora-cache"}
# What a package's tests need of its own optional parts.
EXTRAS = {
    "lora-server": ["demo", "otel", "bench"],
    "lora-weights": ["remote", "hub"],
    "lora-kernels": ["bench"],
}
# Marks of the tests that have a session of their own, which the default run leaves out.
LONG = ["browser", "soak", "api_fuzz"]
ENVIRONMENTS = ROOT / ".nox" / "environments"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _uv_run(
    session: nox.Session, *arguments: str, environment: str | None = None, **variables: str
) -> None:
    """Run a command in one of the environments, exactly as locked."""
    env: dict[str, str | None] = {**OFFLINE, **variables}
    if environment is not None:
        env["UV_PROJECT_ENVIRONMENT"] = str(ENVIRONMENTS / environment)
    session.run("uv", "run", "--frozen", *arguments, env=env, external=True)


def _run_in_package(
    session: nox.Session,
    package: str,
    *arguments: str,
    takes_posargs: bool = True,
    **variables: str,
) -> None:
    """Run a command with nothing installed but what one package declares."""
    environment = "light-tests" if package in LIGHT else "shared"
    extras = [argument for extra in EXTRAS.get(package, []) for argument in ("--extra", extra)]
    _uv_run(
        session,
        *("--exact", "--package", package, "--no-default-groups", "--group", "test", *extras),
        *arguments,
        *(session.posargs if takes_posargs else ()),
        environment=environment,
        **variables,
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format; list the longest files for review."""
    tool = ["--only-group", "lint"]
    _uv_run(session, *tool, "ruff", "check", ".", environment="light")
    _uv_run(session, *tool, "ruff", "format", "--check", ".", environment="light")
    files = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("integration_tests/**/*.py")]
    sizes = sorted(((len(f.read_text().splitlines()), f) for f in files), reverse=True)
    for lines, file in sizes[:5]:
        session.log(f"{lines:5d} lines  {file.relative_to(ROOT)}")


@nox.session
def imports(session: nox.Session) -> None:
    """Check that the packages know only what lies below them."""
    sources = os.pathsep.join(str(ROOT / "packages" / p / "src") for p in PACKAGES)
    _uv_run(
        session, "--only-group", "imports", "lint-imports", environment="light", PYTHONPATH=sources
    )


@nox.session
def types(session: nox.Session) -> None:
    """Check types, strictly: sources, tests, and this file."""
    for package in PACKAGES:
        folder = f"packages/{package}"
        _uv_run(session, "mypy", f"{folder}/src")
        _uv_run(session, "mypy", f"{folder}/tests")
    _uv_run(session, "mypy", "integration_tests")
    copy = Path(session.create_tmp()).resolve() / "checks.py"
    shutil.copyfile(ROOT / "nox.py", copy)
    # From a folder where `import nox` finds the package and not this file.
    with session.chdir(copy.parent):
        config = str(ROOT / "pyproject.toml")
        _uv_run(session, "--project", str(ROOT), "mypy", "--config-file", config, copy.name)


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def unit(session: nox.Session, package: str) -> None:
    """Run one package's tests with nothing installed but what it declares."""
    _run_in_package(session, package, "pytest", f"packages/{package}/tests")


@nox.session
def triton(session: nox.Session) -> None:
    """Run the Triton kernels in Triton's interpreter, and compile each for NVIDIA GPUs."""
    tests = ("pytest", "packages/lora-kernels/tests")
    _run_in_package(session, "lora-kernels", *tests, "-m", "triton", TRITON_INTERPRET="1")
    _run_in_package(session, "lora-kernels", *tests, "-m", "ptx")


@nox.session
def fuzz(session: nox.Session) -> None:
    """Show broken adapters to the doctor: 20,000 of them, or as many as `--count` says."""
    program = ("python", "packages/lora-weights/tests/fuzz_inspect.py")
    arguments = session.posargs or ["--count", "20000", "--seed", "1"]
    _run_in_package(session, "lora-weights", *program, *arguments, takes_posargs=False)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the operators; arguments are those of `python -m lora_kernels.bench`."""
    arguments = session.posargs or ["--quick"]
    _uv_run(session, "python", "-m", "lora_kernels.bench", *arguments)


@nox.session
def bench_cpu(session: nox.Session) -> None:
    """Measure a small model's serving on this CPU beside its goals; `--quick`, `--only 1,4`."""
    _uv_run(session, "python", "integration_tests/bench_cpu.py", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """Build the five wheels, install them together, import each."""
    dist = Path(session.create_tmp()).resolve() / "dist"
    target = dist.with_name("target")
    for folder in (dist, target):
        shutil.rmtree(folder, ignore_errors=True)
    session.run("uv", "build", "--all-packages", "--wheel", "-o", str(dist), external=True)
    wheels = sorted(str(wheel) for wheel in dist.glob("lora_*.whl"))
    if len(wheels) != len(PACKAGES):
        session.error(f"{len(wheels)} wheels built, expected {len(PACKAGES)}: {wheels}")
    install = ("uv", "pip", "install", "--no-deps", "--target", str(target))
    session.run(*install, *wheels, external=True)
    for package in PACKAGES:
        module = package.replace("-", "_")
        check = (
            f"import {module}, pathlib; home = pathlib.Path({module}.__file__).parent;"
            f"assert home.is_relative_to({str(target)!r}), home;"
            "assert (home / 'py.typed').exists()"
        )
        _uv_run(session, "python", "-c", check, PYTHONPATH=str(target))


@nox.session
def integration(session: nox.Session) -> None:
    """Run the tests that need several packages, processes or HTTP."""
    chosen = f"not ({' or '.join(['gpu', *LONG])})"
    _uv_run(session, "pytest", "integration_tests", "-m", chosen, *session.posargs)


@nox.session
def browser(session: nox.Session) -> None:
    """Look at the web page with Debian's Chromium; keep pictures of it."""
    _uv_run(session, "pytest", "integration_tests", "-m", "browser", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """Keep a server under load for ten minutes while adapters come and go."""
    _uv_run(session, "pytest", "integration_tests", "-m", "soak", "-s", *session.posargs)


@nox.session
def api_fuzz(session: nox.Session) -> None:
    """Send what the server's own OpenAPI document allows, and what it does not."""
    _uv_run(session, "pytest", "integration_tests", "-m", "api_fuzz", *session.posargs)
