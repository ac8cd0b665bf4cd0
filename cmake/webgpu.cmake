# SPDX-License-Identifier: MIT
# libvjp-webgpu: the WebGPU backend in a separate library, loaded when a "webgpu" device is opened. It is compiled against
# webgpu.h and links no implementation: one is found at run time. A module for browsers has the backend in itself, if its
# memory is shared with the worker that owns the GPU.
set(VJP_WEBGPU auto CACHE STRING "WebGPU backend: auto (where webgpu.h is found), on, off")
set(VJP_WEBGPU_PREFIX "${PROJECT_SOURCE_DIR}/.venv" CACHE STRING
    "A Python environment that may have the package wgpu; searched when building and when a device is opened")

string(TOLOWER "${VJP_WEBGPU}" vjp_webgpu)
if(vjp_webgpu STREQUAL off OR (VJP_WEB AND NOT VJP_WEB MATCHES threads))
  return()
endif()
file(GLOB wheel_folders ${VJP_WEBGPU_PREFIX}/lib*/python3*/site-packages/wgpu/resources
     $ENV{VIRTUAL_ENV}/lib*/python3*/site-packages/wgpu/resources
     $ENV{HOME}/.local/lib*/python3*/site-packages/wgpu/resources
     /usr/local/lib*/python3*/*-packages/wgpu/resources /usr/lib*/python3*/*-packages/wgpu/resources)
if(VJP_WEB) # of this machine only that header, which is the same for all
  find_path(WEBGPU_INCLUDE_DIR webgpu.h HINTS ${wheel_folders} NO_DEFAULT_PATH NO_CMAKE_FIND_ROOT_PATH)
else()
  find_path(WEBGPU_INCLUDE_DIR webgpu.h HINTS ${wheel_folders} PATH_SUFFIXES webgpu)
endif()
if(NOT WEBGPU_INCLUDE_DIR)
  if(vjp_webgpu STREQUAL on)
    message(FATAL_ERROR "VJP_WEBGPU is on, but no webgpu.h was found; `pip install wgpu` in a virtual environment and "
                        "set VJP_WEBGPU_PREFIX to it, or set WEBGPU_INCLUDE_DIR")
  endif()
  message(STATUS "WebGPU backend: no webgpu.h, left out")
  return()
endif()

file(GLOB shader_files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/gpu/shaders/*.wgsl)
vjp_embed(webgpu ${shader_files})
vjp_add_backend(webgpu)
target_include_directories(vjp_webgpu_objects SYSTEM PUBLIC ${WEBGPU_INCLUDE_DIR})
target_compile_definitions(vjp_webgpu_objects PRIVATE VJP_WEBGPU_PREFIX="${VJP_WEBGPU_PREFIX}")
message(STATUS "WebGPU backend: webgpu.h in ${WEBGPU_INCLUDE_DIR}")
