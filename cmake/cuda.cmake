# SPDX-License-Identifier: MIT
# libvjp-cuda: the CUDA backend, a separate library that is loaded when a "cuda" device is opened. libvjp does not link it.
set(VJP_CUDA auto CACHE STRING "CUDA backend: auto (where nvcc is found), on, off")
set(VJP_CUDA_ARCHITECTURES auto CACHE STRING
    "Cards to compile for, such as 80;90;100;120; auto: those of this machine, or 80;90. PTX of the last is for later cards")

string(TOLOWER "${VJP_CUDA}" vjp_cuda)
if(vjp_cuda STREQUAL off OR VJP_SANITIZE)
  return()
endif()
include(CheckLanguage)
set(CMAKE_CUDA_ARCHITECTURES OFF) # named below, file by file
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

# Each card takes minutes: by default those that are here, or where there are none Ampere and Hopper.
set(vjp_cuda_cards ${VJP_CUDA_ARCHITECTURES})
if(vjp_cuda_cards STREQUAL auto)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE vjp_cuda_here ERROR_QUIET RESULT_VARIABLE vjp_cuda_failed TIMEOUT 20)
  set(vjp_cuda_cards)
  if(vjp_cuda_failed EQUAL 0)
    string(REGEX MATCHALL "[0-9]+[.][0-9]" vjp_cuda_here "${vjp_cuda_here}")
    foreach(card ${vjp_cuda_here})
      string(REPLACE "." "" card ${card})
      if(card GREATER_EQUAL 80)
        list(APPEND vjp_cuda_cards ${card})
      endif()
    endforeach()
    list(REMOVE_DUPLICATES vjp_cuda_cards)
    list(SORT vjp_cuda_cards COMPARE NATURAL)
  endif()
  if(NOT vjp_cuda_cards)
    set(vjp_cuda_cards 80 90)
  endif()
endif()

# sm_100 is assembled from the PTX of sm_90: no kernel uses anything newer, and making the PTX is most of the work.
foreach(card ${vjp_cuda_cards})
  if(NOT card MATCHES "^[0-9]+$")
    message(FATAL_ERROR "VJP_CUDA_ARCHITECTURES: \"${card}\" is not a card's number, such as 90")
  endif()
  if(NOT (card EQUAL 100 AND 90 IN_LIST vjp_cuda_cards))
    set(codes sm_${card})
    if(card EQUAL 90 AND 100 IN_LIST vjp_cuda_cards)
      list(APPEND codes sm_100)
    endif()
    list(GET vjp_cuda_cards -1 last)
    if(card EQUAL last)
      list(APPEND codes compute_${card})
    endif()
    list(JOIN codes "," codes)
    list(APPEND vjp_cuda_codes "--generate-code=arch=compute_${card},code=[${codes}]")
  endif()
endforeach()
# Hopper's own instructions exist in sm_90a alone, and no other card runs the kernels of these files.
set(hopper_files ${PROJECT_SOURCE_DIR}/src/cuda/attention/hopper.cu ${PROJECT_SOURCE_DIR}/src/cuda/gemm/long_sums.cu
    ${PROJECT_SOURCE_DIR}/src/cuda/linear/gated_forward.cu ${PROJECT_SOURCE_DIR}/src/cuda/linear/gated.cu
    ${PROJECT_SOURCE_DIR}/src/cuda/conv/conv2d_hopper_windows.cu ${PROJECT_SOURCE_DIR}/src/cuda/conv/conv2d_hopper_weights.cu)
list(REMOVE_ITEM cuda_files ${hopper_files})
set_source_files_properties(${cuda_files} PROPERTIES COMPILE_OPTIONS "${vjp_cuda_codes}")
set(vjp_cuda_hopper 0)
if(90 IN_LIST vjp_cuda_cards)
  set(vjp_cuda_codes --generate-code=arch=compute_90a,code=sm_90a)
  set(vjp_cuda_hopper 1)
endif()
set_source_files_properties(${hopper_files} PROPERTIES COMPILE_OPTIONS "${vjp_cuda_codes}")
# Built for other cards alone, they are empty: then a Hopper card runs the kernels of all cards, from their PTX.
set_source_files_properties(${hopper_files} ${PROJECT_SOURCE_DIR}/src/cuda/attention/fast.cu ${PROJECT_SOURCE_DIR}/src/cuda/conv/conv2d.cu
    PROPERTIES COMPILE_DEFINITIONS VJP_CUDA_HOPPER=${vjp_cuda_hopper})
list(JOIN vjp_cuda_cards ", " vjp_cuda_list)
set_source_files_properties(${PROJECT_SOURCE_DIR}/src/cuda/common/device.cu PROPERTIES COMPILE_DEFINITIONS "VJP_CUDA_CARDS=\"${vjp_cuda_list}\"")
message(STATUS "CUDA backend: nvcc ${CMAKE_CUDA_COMPILER_VERSION}, for sm ${vjp_cuda_list}")

# The wheel vjp-cuda13 puts it into the package vjp, beside libvjp; pip puts cuBLAS into nvidia/cu13/lib next to that.
if(SKBUILD)
  set_target_properties(vjp-cuda PROPERTIES INSTALL_RPATH "\$ORIGIN:\$ORIGIN/../nvidia/cu13/lib")
  install(TARGETS vjp-cuda LIBRARY DESTINATION vjp COMPONENT cuda)
endif()
