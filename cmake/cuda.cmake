# SPDX-License-Identifier: MIT
# libvjp-cuda: the CUDA backend, a separate library that is loaded when a "cuda" device is opened. libvjp does not link it.
set(VJP_CUDA auto CACHE STRING "CUDA backend: auto (where nvcc is found), on, off")
set(VJP_CUDA_ARCHITECTURES "80-real;90a-real;100-real;120" CACHE STRING
    "Cards to compile for: Ampere, Hopper, Blackwell for data centres, other Blackwells, and PTX for later cards")

string(TOLOWER "${VJP_CUDA}" vjp_cuda)
if(vjp_cuda STREQUAL off OR VJP_SANITIZE)
  return()
endif()
include(CheckLanguage)
set(CMAKE_CUDA_ARCHITECTURES ${VJP_CUDA_ARCHITECTURES})
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(vjp_cuda STREQUAL on)
    message(FATAL_ERROR "VJP_CUDA is on, but no nvcc was found; put it on PATH or set CUDACXX")
  endif()
  message(STATUS "CUDA backend: no nvcc, left out")
  return()
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)

file(GLOB cuda_files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cuda/*/*.cu)
add_library(vjp-cuda SHARED ${cuda_files})
target_include_directories(vjp-cuda PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
# As in the C files, an FMA is used only where it is written, as fmaf(): nothing is contracted.
target_compile_options(vjp-cuda PRIVATE -std=c++20 --fmad=false -Xfatbin=-compress-all --threads=0 -Xcompiler=-fvisibility=hidden,-Wall,-Wextra
  $<$<BOOL:${VJP_WERROR}>:-Werror=all-warnings>)
# It has its own hidden copies of what it needs of core and op.
target_link_libraries(vjp-cuda PRIVATE vjp_static CUDA::cudart_static CUDA::cublasLt)
target_link_options(vjp-cuda PRIVATE -Wl,--exclude-libs,ALL -Wl,--no-undefined -Wl,--as-needed)
set_target_properties(vjp-cuda PROPERTIES CUDA_VISIBILITY_PRESET hidden CUDA_RUNTIME_LIBRARY Static
  POSITION_INDEPENDENT_CODE ON INSTALL_RPATH "\$ORIGIN")
list(JOIN VJP_CUDA_ARCHITECTURES ", " vjp_cuda_list)
message(STATUS "CUDA backend: nvcc ${CMAKE_CUDA_COMPILER_VERSION}, for sm ${vjp_cuda_list}")
