# SPDX-License-Identifier: MIT
# libvjp-metal: the Metal backend in a separate library, loaded when a "metal" device is opened. It is plain C and loads the
# frameworks at run time, so that it builds on any system; elsewhere than on macOS opening a device fails with the reason.
set(VJP_METAL auto CACHE STRING "Metal backend: auto, on, off (auto is on: it needs nothing but the compiler)")
string(TOLOWER "${VJP_METAL}" vjp_metal)
if(vjp_metal STREQUAL off)
  return()
endif()
file(GLOB VJP_METAL_SHADERS CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/gpu/shaders/*.metal)
# Files that others include are not shaders.
list(FILTER VJP_METAL_SHADERS EXCLUDE REGEX "/(activation|attention_matrices|common|decay|elementwise|exponential|matrices|norm|pairs|silu|tiles)\\.metal$")
vjp_embed(metal ${VJP_METAL_SHADERS})
vjp_add_backend(metal)
message(STATUS "Metal backend: src/gpu/metal")
