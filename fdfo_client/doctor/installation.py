"""Python and packages against what the installed distribution says that it needs."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Collection, Iterator, Sequence

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from fdfo_client.doctor.finding import Finding, fail, ok, warn

DISTRIBUTION = "fdfo"
# What each extra is for; of others that the distribution has (tools of development) nothing is said.
EXTRAS = {
    "scheduler": "a scheduler",
    "worker": "a worker",
    "cli": "fdfo top",
    "bench": "fdfo bench and fdfo replay",
    "flashinfer": "attention kernels on CUDA",
    "gateway": "OpenAI's API",
}
NEEDED_TO_SERVE = ("scheduler", "worker")

VersionOf = Callable[[str], str | None]


def installed_version(package: str) -> str | None:
    """None for a package that is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python(asked: str, version: str = platform.python_version()) -> Finding:
    """`asked`: a range of versions, such as >=3.11."""
    if SpecifierSet(asked).contains(version, prereleases=True):
        return ok("python", f"{version}, {asked} is needed")
    return fail("python", f"{version}, {asked} is needed", f"install a Python {asked} and make the environment with it")


def check_packages(
    requirements: Sequence[Requirement], extras: Collection[str], version_of: VersionOf = installed_version
) -> Iterator[Finding]:
    """The packages that the client itself needs, then those of each of `extras`, which need not all be there."""
    yield from _check_group("packages", "the client", [one for one in requirements if _applies(one, "")], version_of)
    for extra, purpose in EXTRAS.items():
        if extra not in extras:
            continue
        own = [one for one in requirements if _applies(one, extra) and not _applies(one, "")]
        yield from _check_group(extra, purpose, own, version_of)


def check() -> Iterator[Finding]:
    """Of this environment."""
    try:
        metadata = importlib.metadata.metadata(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        yield warn(
            "packages",
            f"{DISTRIBUTION} is not installed as a package, so nothing says which versions it needs",
            "pip install --editable . in the checkout",
        )
        return
    yield ok(DISTRIBUTION, metadata["Version"])
    yield check_python(metadata["Requires-Python"] or ">=3.11")
    requirements = [Requirement(line) for line in importlib.metadata.requires(DISTRIBUTION) or ()]
    yield from check_packages(requirements, metadata.get_all("Provides-Extra") or ())


def _check_group(name: str, purpose: str, group: Sequence[Requirement], version_of: VersionOf) -> Iterator[Finding]:
    what = name if name == "packages" else f"extra {name}"
    versions = {one: version_of(one.name) for one in group}
    missing = [one.name for one, version in versions.items() if version is None]
    bad = {
        one: version
        for one, version in versions.items()
        if version is not None and not one.specifier.contains(version, prereleases=True)
    }
    for one, version in bad.items():
        wanted = f"{one.name}{one.specifier}"
        yield fail(what, f"{one.name} {version}; {one.specifier} is needed", f"pip install '{wanted}'")
    if missing:
        found = f"{', '.join(missing)} not installed"
        if name == "packages":
            yield fail(what, found, f"pip install {DISTRIBUTION}")
        elif name in NEEDED_TO_SERVE:
            yield warn(what, f"{found}, for {purpose}", f"pip install '{DISTRIBUTION}[{name}]', where it is to serve")
        else:
            yield ok(what, f"{found}, for {purpose}: pip install '{DISTRIBUTION}[{name}]'")
    elif not bad:
        yield ok(what, ", ".join(f"{one.name} {version}" for one, version in versions.items()))


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})
