"""Build the wheels of a release on one Linux machine, and check them: ``python tools/wheels.py`` (``make wheels``).

In: the checkout; ziglang, which compiles the allocator for each platform. Out: dist/, a wheel of pure Python for any
platform and one with the allocator in C for each of TARGETS, checked by twine, auditwheel and abi3audit. Publishes
nothing. Windows takes the wheel of pure Python.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_PLAIN = ROOT / "vramprobe" / "allocator" / "plain"
_MODULE = Path("vramprobe") / "allocator" / "_plain.abi3.so"
_GLIBC_MINOR = 17
_OF_LINUX = ("-shared",)
_OF_MACOS = ("-dynamiclib", "-undefined", "dynamic_lookup")  # Python's own symbols are found when it is loaded
#: Platform tag of a wheel → zig's target, and how a module is linked there.
TARGETS = {
    "manylinux_2_17_x86_64.manylinux2014_x86_64": ("x86_64-linux-gnu.2.17", _OF_LINUX),
    "manylinux_2_17_aarch64.manylinux2014_aarch64": ("aarch64-linux-gnu.2.17", _OF_LINUX),
    "macosx_11_0_arm64": ("aarch64-macos.11.0-none", _OF_MACOS),
    "macosx_11_0_x86_64": ("x86_64-macos.11.0-none", _OF_MACOS),
}


def main() -> None:
    """Build into the folder that is named, and check what was built."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--only", choices=[tag.partition(".")[0] for tag in TARGETS], help="one platform's wheel")
    parser.add_argument("--no-check", action="store_true", help="leave out twine, auditwheel and abi3audit")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    tags = [tag for tag in TARGETS if asked.only in (None, tag.partition(".")[0])]
    pure = build_pure(asked.out)
    wheels = [pure, *(with_module(pure, tag) for tag in tags)]
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 1e6:.2f} MB  {wheel.name}")
    if not asked.no_check:
        check(wheels)


def build_pure(out: Path) -> Path:
    """Return the wheel of pure Python, built from a copy."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.mkdir()
        for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        shutil.copytree(ROOT / "vramprobe", source / "vramprobe", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        words = ["wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(out)]
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words, str(source)]
        subprocess.run(command, check=True, env=os.environ | {"VRAMPROBE_PURE": "1"})
    (wheel,) = out.glob("vramprobe-*-py3-none-any.whl")
    return wheel


def with_module(pure: Path, platform: str) -> Path:
    """Return the wheel for ``platform``: the pure one, the compiled allocator, and the tags that say so."""
    import setuptools  # noqa: F401, whose own copy of wheel is found where there is no other
    from wheel.wheelfile import WheelFile

    version = pure.name.split("-")[1]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with WheelFile(pure) as archive:
            archive.extractall(root)
        compile_module(root / _MODULE, platform)
        about = root / f"vramprobe-{version}.dist-info" / "WHEEL"
        kept = [line for line in about.read_text().splitlines() if line and not line.startswith(("Tag:", "Root-Is-"))]
        tags = [f"Tag: cp311-abi3-{one}" for one in platform.split(".")]
        about.write_text("\n".join([*kept, "Root-Is-Purelib: false", *tags, ""]))
        built = pure.with_name(f"vramprobe-{version}-cp311-abi3-{platform}.whl")
        built.unlink(missing_ok=True)
        with WheelFile(built, "w") as archive:
            archive.write_files(root)
    return built


def compile_module(to: Path, platform: str) -> None:
    """Compile the allocator in C with zig, against the stable ABI of Python 3.11."""
    target, linked = TARGETS[platform]
    sources = [str(_PLAIN / name) for name in ("blocks.c", "pairing.c", "module.c")]
    words = ["-O2", "-fPIC", "-s", "-DPy_LIMITED_API=0x030B0000", f"-I{sysconfig.get_path('include')}", *linked]
    command = [sys.executable, "-m", "ziglang", "cc", "-target", target, *words, *sources, "-o", str(to)]
    subprocess.run(command, check=True)


def check(wheels: list[Path]) -> None:
    """Exit where one of the checkers refuses a wheel."""
    names = [str(wheel) for wheel in wheels]
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *names], check=True)
    compiled = [name for name in names if "-abi3-" in name]
    subprocess.run([sys.executable, "-m", "abi3audit", "--strict", "--summary", *compiled], check=True)
    for name in compiled:
        if "manylinux" in name and "x86_64" in name:
            said = subprocess.run(
                [sys.executable, "-m", "auditwheel", "show", name], check=True, capture_output=True, text=True
            ).stdout
            found = re.search(r'tag:\s+"manylinux_2_(\d+)_x86_64"', said)
            if found is None or int(found[1]) > _GLIBC_MINOR:
                sys.exit(f"auditwheel: {name} needs more than glibc 2.{_GLIBC_MINOR}:\n{said}")
            print(f"auditwheel: {Path(name).name} runs with glibc 2.{found[1]}")


if __name__ == "__main__":
    main()
