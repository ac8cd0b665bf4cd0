# SPDX-License-Identifier: MIT
"""Looks into a wheel: tests/wheel.py WHEEL PLATFORM VERSION.

The wheel must contain the package, the C module, the library and the program; those three must be for the processor and
system of the platform, and need nothing newer than its tag says. Its metadata must have the version of the header.
"""
import re
import struct
import sys
import zipfile

ELF, MACH_O, PE = b"\x7fELF", b"\xcf\xfa\xed\xfe", b"MZ"
# The files, and what a program file begins with and has as its processor's number.
PLATFORMS = {
    "linux-x86_64": (ELF, 62, "_core.abi3.so", "libvjp.so.{}", "vjp"),
    "linux-aarch64": (ELF, 183, "_core.abi3.so", "libvjp.so.{}", "vjp"),
    "macos-arm64": (MACH_O, 0x0100000C, "_core.abi3.so", "libvjp.{}.dylib", "vjp"),
    "macos-x86_64": (MACH_O, 0x01000007, "_core.abi3.so", "libvjp.{}.dylib", "vjp"),
    "windows-x86_64": (PE, 0x8664, "_core.pyd", "libvjp.dll", "vjp.exe"),
}
GLIBC = (2, 28)
MACOS = (11, 0)


def machine(data):
    if data.startswith(ELF):
        return struct.unpack_from("<H", data, 18)[0]
    if data.startswith(MACH_O):
        return struct.unpack_from("<I", data, 4)[0]
    return struct.unpack_from("<H", data, struct.unpack_from("<I", data, 0x3C)[0] + 4)[0]


def oldest_macos(data):
    """The oldest system that a Mach-O file says it runs on, by its load command LC_BUILD_VERSION."""
    at = 32
    for _ in range(struct.unpack_from("<I", data, 16)[0]):
        command, size = struct.unpack_from("<II", data, at)
        if command == 0x32:
            version = struct.unpack_from("<I", data, at + 12)[0]
            return version >> 16, version >> 8 & 255
        at += size
    return None


def check_cuda(path, wheel, version):
    """The wheel of the CUDA backend: the library alone, which finds cuBLAS where pip puts it and serves one version of vjp."""
    info = f"vjp_cuda13-{version}.dist-info"
    library = wheel.read("vjp/libvjp-cuda.so")
    metadata = wheel.read(f"{info}/METADATA").decode()
    wrong = [f"{name} should not be there" for name in wheel.namelist() if name != "vjp/libvjp-cuda.so" and not name.startswith(info)]
    if b"$ORIGIN/../nvidia/cu13/lib" not in library or b"libcublasLt.so.13" not in library:
        wrong.append("its library does not look for cuBLAS in nvidia/cu13/lib")
    wrong += [f"it does not need {name}" for name in (f"vjp-kernels=={version}", "nvidia-cublas") if f"Requires-Dist: {name}" not in metadata]
    if f"\nVersion: {version}\n" not in metadata or version.encode() not in library:
        wrong.append(f"its version is not {version}")
    if "-py3-none-" not in path:
        wrong.append("its tag is not py3-none")
    return wrong


def check(path, platform, version):
    wrong = []
    wheel = zipfile.ZipFile(path)
    names = set(wheel.namelist())
    if platform == "cuda13":
        return check_cuda(path, wheel, version)
    info = f"vjp_kernels-{version}.dist-info"
    for name in ("vjp/__init__.py", "vjp/_ops.py", "vjp/py.typed", f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD"):
        if name not in names:
            wrong.append(f"{name} is missing")
    if wrong:
        return wrong
    tag = re.search(r"^Tag: (.*)$", wheel.read(f"{info}/WHEEL").decode(), re.M).group(1)
    if not path.endswith(f"-{tag}.whl"):
        wrong.append(f"its tag inside is {tag}")
    if f"\nVersion: {version}\n" not in wheel.read(f"{info}/METADATA").decode():
        wrong.append(f"its metadata do not have the version {version}")
    if platform == "native":
        return wrong
    magic, processor, module, library, program = PLATFORMS[platform]
    minor = ".".join(version.split(".")[:2])
    for name in (f"vjp/{module}", f"vjp/{library.format(minor)}", f"vjp/bin/{program}"):
        if name not in names:
            wrong.append(f"{name} is missing")
            continue
        data = wheel.read(name)
        if not data.startswith(magic) or machine(data) != processor:
            wrong.append(f"{name} is not for {platform}")
        needed = max((tuple(map(int, found.split(b"."))) for found in re.findall(rb"GLIBC_(\d+\.\d+)", data)), default=(0, 0))
        if magic == ELF and needed > GLIBC:
            wrong.append(f"{name} needs glibc {needed[0]}.{needed[1]}; the tag promises {GLIBC[0]}.{GLIBC[1]}")
        if magic == MACH_O and oldest_macos(data) != MACOS:
            wrong.append(f"{name} is for macOS {oldest_macos(data)}, the tag says {MACOS}")
        if not name.startswith("vjp/_core") and version.encode() not in data:
            wrong.append(f"{name} does not have the version {version} in it")
    others = [name for name in names if re.search(r"\.(so|dylib|dll|pyd|exe|a|lib|pdb)(\.|$)", name)]
    if len(others) != (3 if magic == PE else 2):
        wrong.append(f"libraries that should not be there, or too few: {sorted(others)}")
    return wrong


if __name__ == "__main__":
    found = check(*sys.argv[1:4])
    for line in found:
        print(f"{sys.argv[1]}: {line}", file=sys.stderr)
    sys.exit(bool(found))
