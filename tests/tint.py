# SPDX-License-Identifier: MIT
"""tests/tint.py FOLDER: compiles every .wgsl in a folder with Tint, Dawn's compiler, and makes a pipeline of it, which also
checks the limits that every device has: wgpu lets a shader use more memory of a workgroup than that.

Dawn needs no GPU for that: its null backend checks and compiles shaders as the others do. The folder is filled by any
run of vjp with VJP_WEBGPU_SHADERS=FOLDER. Needs the package dawn-python; exits 77 where it is not installed.
"""
import glob
import os
import sys
import tempfile

try:
    from pydawn import utils, webgpu
except (ImportError, OSError) as error:
    print(f"Dawn is not installed ({error}): Tint was not run")
    sys.exit(77)


def null_adapter():
    """Like utils.request_adapter_sync, but for the backend that has no GPU."""
    result = {}

    def on_adapter(status, adapter, message, _):
        result.update(status=status, adapter=adapter, message=utils.from_wgpu_str(message))

    info = webgpu.WGPURequestAdapterCallbackInfo()
    info.mode = webgpu.WGPUCallbackMode_WaitAnyOnly
    info.callback = webgpu.WGPURequestAdapterCallback(on_adapter)
    options = webgpu.WGPURequestAdapterOptions()
    options.backendType = webgpu.WGPUBackendType_Null
    utils.wait(webgpu.wgpuInstanceRequestAdapterF(utils.instance, options, info))
    if result["status"] != webgpu.WGPURequestAdapterStatus_Success:
        sys.exit(f"Dawn's null backend: {result['message']}")
    return result["adapter"]


def complaint(device, path):
    """Tint's message about a file, or None."""
    with open(path, encoding="utf-8") as file:
        source = file.read()
    try:
        module = utils.create_shader_module(device, source)
        utils.create_compute_pipeline(device, None, {"module": module, "entry_point": "main"})
        error = None
    except Exception as exception:  # the package raises bare exceptions
        error = str(exception)
    return error


def main():
    device = utils.request_device_sync(null_adapter())
    paths = sorted(glob.glob(sys.argv[1] + "/*.wgsl"))
    if not paths:
        sys.exit("no shaders in " + sys.argv[1])
    for wrong in WRONG:
        if not complaint_of(device, wrong):
            sys.exit(f"Tint accepts a shader that is wrong, so this test does not work:\n{wrong}")
    bad = 0
    for path in paths:
        said = complaint(device, path)
        if said:
            bad += 1
            print(f"{path}: {said}")
    print(f"Tint compiled {len(paths)} shaders, refused {bad}")
    sys.exit(1 if bad else 0)


# What naga accepts and Tint refuses: a barrier under a condition that differs between threads, and more memory of a
# workgroup than every device has.
WRONG = (
    """@compute @workgroup_size(64) fn main(@builtin(local_invocation_index) lane: u32) {
    if (lane < 3u) { workgroupBarrier(); }
}
""",
    """var<workgroup> much: array<u32, 4097>;
@compute @workgroup_size(64) fn main(@builtin(local_invocation_index) lane: u32) { much[lane] = lane; }
""",
)


def complaint_of(device, source):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "wrong.wgsl")
        with open(path, "w", encoding="utf-8") as file:
            file.write(source)
        return complaint(device, path)


main()
