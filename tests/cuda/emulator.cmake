# SPDX-License-Identifier: MIT
# cuda_emulator: a libvjp-cuda of which the processor is the card (emulate.h): every .cu of src/cuda but the one that calls
# cuBLASLt, compiled as it is by a C++ compiler against the stand-ins that lie in include/. Nothing needs it but the tests, so it is built
# when it is asked for, into a folder of its own: LD_LIBRARY_PATH=build/emulated build/vjp check --device cuda
if(VJP_SANITIZE OR CMAKE_CROSSCOMPILING OR APPLE OR WIN32 OR NOT TARGET vjp_static OR
   NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|aarch64|arm64")
  return()
endif()
include(CheckLanguage)
check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  message(STATUS "vjp: no C++ compiler: the CUDA backend's kernels are not emulated")
  return()
endif()
enable_language(CXX)
set(here ${CMAKE_CURRENT_SOURCE_DIR}/cuda)

file(GLOB kernel_files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cuda/*/*.cu)
list(FILTER kernel_files EXCLUDE REGEX "/gemm/products")
set(emulator_files ${here}/emulate.cpp ${here}/hopper.cpp ${here}/engine.cpp ${here}/runtime.cpp
    ${here}/products.cpp ${here}/tensor_cores.cpp)
add_library(cuda_emulator SHARED EXCLUDE_FROM_ALL ${kernel_files} ${emulator_files})
set_target_properties(cuda_emulator PROPERTIES OUTPUT_NAME vjp-cuda LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/emulated
  POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
# -g1: the report of a race names its line. -fno-strict-aliasing: as in CUDA's compiler, memory may be read as another type.
set_source_files_properties(${kernel_files} PROPERTIES LANGUAGE CXX
  COMPILE_OPTIONS "-x;c++;-O1;-g1;-w;-fno-exceptions;-fno-rtti;-fno-strict-aliasing;-fno-threadsafe-statics;-fsanitize=thread")
set_source_files_properties(${emulator_files} PROPERTIES
  COMPILE_OPTIONS "-O3;-g1;-Wall;-Wextra;-Wno-unknown-pragmas;-Wno-unused-parameter")
target_compile_options(cuda_emulator PRIVATE -std=c++20 -ffp-contract=off -fno-math-errno $<$<BOOL:${VJP_WERROR}>:-Werror>)
target_compile_definitions(cuda_emulator PRIVATE VJP_CUDA_HOPPER=1 "VJP_CUDA_CARDS=\"80 90\"")
target_include_directories(cuda_emulator PRIVATE ${here}/include ${CMAKE_CURRENT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
target_link_libraries(cuda_emulator PRIVATE vjp_static Threads::Threads ${CMAKE_DL_LIBS} m)
target_link_options(cuda_emulator PRIVATE -Wl,--exclude-libs,ALL -Wl,--no-undefined)
