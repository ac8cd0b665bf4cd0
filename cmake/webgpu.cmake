# libvjp-webgpu: the WebGPU backend in a library of its own, opened when a "webgpu" device is. It is compiled against
# webgpu.h and links no implementation: one is found at run time.
set(VJP_WEBGPU auto CACHE STRING "WebGPU backend: auto (where webgpu.h is found), on, off")
set(VJP_WEBGPU_PREFIX "${PROJECT_SOURCE_DIR}/.venv" CACHE STRING
    "A Python environment where the package wgpu may lie, looked at when building and when a device is opened")

string(TOLOWER "${VJP_WEBGPU}" vjp_webgpu)
if(vjp_webgpu STREQUAL off)
  return()
endif()
file(GLOB wheel_folders ${VJP_WEBGPU_PREFIX}/lib*/python3*/site-packages/wgpu/resources
     $ENV{VIRTUAL_ENV}/lib*/python3*/site-packages/wgpu/resources
     $ENV{HOME}/.local/lib*/python3*/site-packages/wgpu/resources
     /usr/local/lib*/python3*/*-packages/wgpu/resources /usr/lib*/python3*/*-packages/wgpu/resources)
find_path(WEBGPU_INCLUDE_DIR webgpu.h HINTS ${wheel_folders} PATH_SUFFIXES webgpu)
if(NOT WEBGPU_INCLUDE_DIR)
  if(vjp_webgpu STREQUAL on)
    message(FATAL_ERROR "VJP_WEBGPU is on, but no webgpu.h was found; `pip install wgpu` in a virtual environment and "
                        "set VJP_WEBGPU_PREFIX to it, or set WEBGPU_INCLUDE_DIR")
  endif()
  message(STATUS "WebGPU backend: no webgpu.h, left out")
  return()
endif()

set(VJP_GPU_OPS layer_norm rms_norm group_norm rope cumsum gather maxpool2d linear)
list(TRANSFORM VJP_GPU_OPS PREPEND src/gpu/ OUTPUT_VARIABLE gpu_files)
list(TRANSFORM gpu_files APPEND .c)
file(GLOB shader_files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/webgpu/*.wgsl)
set(shaders ${CMAKE_BINARY_DIR}/webgpu_shaders.c)
add_custom_command(OUTPUT ${shaders}
  COMMAND ${CMAKE_COMMAND} -D OUT=${shaders} -D "FILES=${shader_files}" -P ${PROJECT_SOURCE_DIR}/cmake/embed.cmake
  DEPENDS ${shader_files} ${PROJECT_SOURCE_DIR}/cmake/embed.cmake VERBATIM)
add_library(vjp_webgpu_objects OBJECT src/webgpu/api.c src/webgpu/device.c src/webgpu/launch.c src/webgpu/source.c
  src/gpu/launch.c src/gpu/norm.c ${gpu_files} ${shaders})
target_link_libraries(vjp_webgpu_objects PRIVATE vjp_flags)
target_include_directories(vjp_webgpu_objects SYSTEM PUBLIC ${WEBGPU_INCLUDE_DIR})
target_compile_definitions(vjp_webgpu_objects PRIVATE VJP_WEBGPU_PREFIX="${VJP_WEBGPU_PREFIX}")
add_library(vjp-webgpu SHARED $<TARGET_OBJECTS:vjp_webgpu_objects>)
# What it needs of core and op comes as copies of its own, hidden.
target_link_libraries(vjp-webgpu PRIVATE vjp_static ${CMAKE_DL_LIBS} m)
target_link_options(vjp-webgpu PRIVATE -Wl,--exclude-libs,ALL -Wl,--no-undefined -Wl,--as-needed)
set_target_properties(vjp-webgpu PROPERTIES INSTALL_RPATH "\$ORIGIN")
message(STATUS "WebGPU backend: webgpu.h in ${WEBGPU_INCLUDE_DIR}")
